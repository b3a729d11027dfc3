"""Readers of finished and running runs: lists, comparisons, curves, traces and credit computed again."""
