"""A cross-entropy on tokens of the rollouts (``algorithm.ce``)."""
