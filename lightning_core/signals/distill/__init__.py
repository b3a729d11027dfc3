"""On-policy distillation (``algorithm.distill``)."""
