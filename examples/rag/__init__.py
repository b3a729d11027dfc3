"""Retrieval-augmented answers with the OpenAI Agents SDK: a researcher that searches a corpus until it can answer."""
