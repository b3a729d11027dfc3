"""The embedded trainer: torch on one machine."""
