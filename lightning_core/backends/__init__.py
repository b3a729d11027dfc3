"""Sampling backends: a script, torch in this process, a vLLM server, verl's servers."""
