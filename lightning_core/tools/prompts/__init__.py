"""Finds prompts that raise the reward of an agent: demonstrations of its own, and system prompts by GEPA."""
