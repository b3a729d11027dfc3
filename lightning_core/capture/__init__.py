"""Runs inside the agent's process: scopes, marks, patches of hosts and HTTP clients."""

from lightning_core.capture.run import Run, find_run
from lightning_core.capture.scope import (
    StepScope,
    bind,
    current_address,
    current_run,
    current_scope,
    is_current_agent,
    is_current_scope,
    next_sequence,
    outside_rollout,
    record,
    register_control_flow,
    reward,
    rollout,
    scope,
)

no_failure = register_control_flow
"""The old name of `register_control_flow`, kept for third-party integrations until 0.2."""

__all__ = [
    "Run",
    "StepScope",
    "bind",
    "current_address",
    "current_run",
    "current_scope",
    "find_run",
    "is_current_agent",
    "is_current_scope",
    "next_sequence",
    "no_failure",
    "outside_rollout",
    "record",
    "register_control_flow",
    "reward",
    "rollout",
    "scope",
]
