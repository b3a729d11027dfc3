"""Credit rules and losses that no run of ours supports with a figure, each named in a configuration as module:callable."""
