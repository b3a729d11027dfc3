"""Sampling in process, from the weights that are trained."""
