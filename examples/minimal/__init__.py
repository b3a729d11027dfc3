"""The whole algorithm on the public API, in one file."""
