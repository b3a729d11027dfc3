"""Figures of a run, computed from its store."""
