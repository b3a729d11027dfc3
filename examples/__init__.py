"""Example agents, each with the tasks and configuration that train it."""
