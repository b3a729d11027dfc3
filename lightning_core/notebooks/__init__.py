"""Displays for Jupyter notebooks."""
