"""Retrieval-augmented answers: an OpenAI Agents SDK agent that searches a corpus."""
