"""The embedded trainer: PyTorch on one machine."""
