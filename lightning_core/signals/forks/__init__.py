"""Forks: rollouts that repeat another one up to one of its calls, and sample from there on (``rollouts.forks``)."""
