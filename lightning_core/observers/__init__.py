"""Ways to watch a run: progress, early stop, monitors and trackers."""
