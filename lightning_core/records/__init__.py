"""What a run leaves behind: store, report, checkpoints, progress."""
