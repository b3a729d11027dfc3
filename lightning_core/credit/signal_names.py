"""The sources of training signal besides the rewards of rollouts: the names of their folders in `signals/`."""

SIGNALS = (
    "curriculum",
    "forks",
    "information_gain",
    "judge",
    "air",
    "critic",
    "distill",
    "cross_entropy",
)
"""In the order in which signals act in a step."""
