"""Automatic intermediate rewards of calls, from tool outcomes, lengths and response formats (``credit.air``)."""
