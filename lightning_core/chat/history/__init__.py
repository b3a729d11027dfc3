"""The conversations of a rollout, whose sampled tokens are kept for the next prompt."""
