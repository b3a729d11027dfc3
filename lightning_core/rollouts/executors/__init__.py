"""Executors run agents: on an event loop, on threads or in worker processes, never on the runner's own loop."""
