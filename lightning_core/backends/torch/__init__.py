"""Sampling in this process, from the weights that are being trained."""
