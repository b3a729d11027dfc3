"""The files of a run: store, metrics, report, checkpoints."""
