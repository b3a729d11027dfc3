"""What a training run survives: kills at random points, and a table of faults."""
