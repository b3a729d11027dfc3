"""Finds prompts that raise the reward of an agent: demonstrations of its own, and system prompts by GEPA."""

BUDGET = 300
"""Most rollouts of training tasks."""
DEMONSTRATIONS = 4
"""Demonstrations of each agent."""
SETS = 4
"""Sets of demonstrations that are compared."""
