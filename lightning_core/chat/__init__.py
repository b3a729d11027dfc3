"""Converts messages to tokens and back. No other package tokenizes."""
