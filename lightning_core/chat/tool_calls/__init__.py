"""Calls of tools in the text of a response, and their results in a conversation."""
