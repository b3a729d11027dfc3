"""Supervised fine-tuning on recorded rollouts: a warm start from a teacher's traces, or from the run's own good rollouts."""
