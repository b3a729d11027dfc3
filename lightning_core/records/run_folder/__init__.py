"""The folder of a run, and what is in it besides the store: configurations, checkpoints, the lock."""
