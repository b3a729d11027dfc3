"""Sampling from a vLLM server."""
