"""Reports runs to experiment trackers: TensorBoard, Weights & Biases, MLflow, Trackio, and trackers of the user."""

from lightning_core.observers.trackers.tracker import TrackedRun, Tracker
from lightning_core.records.observer import RunState

__all__ = ["RunState", "TrackedRun", "Tracker"]
