"""Prompts that the policy endpoint adds to the requests of agents: policy = weights + prompt."""
