"""Reports runs to experiment trackers: TensorBoard, Weights & Biases, MLflow, Trackio, and trackers of the user."""

from lightning_core.observers.trackers.tracker import RunState, TrackedRun, Tracker

__all__ = ["RunState", "TrackedRun", "Tracker"]
