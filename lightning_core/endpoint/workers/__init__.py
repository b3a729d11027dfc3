"""The endpoint in several processes."""
