"""Answers model calls with recorded responses, in place of a provider.

``responses`` finds the response to a request, ``server`` serves them.
"""
