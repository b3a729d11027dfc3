"""Carries the rollout and agent of a call to the endpoint: HTTP clients, threads, queues, processes and programs."""

from lightning_core.capture.scope import rollout
from lightning_core.propagation.children.environment import endpoint_environment
from lightning_core.propagation.children.launch import ProgramResult, launch
from lightning_core.propagation.children.scope import bind_for_process

__all__ = ["ProgramResult", "bind_for_process", "endpoint_environment", "launch", "rollout"]
