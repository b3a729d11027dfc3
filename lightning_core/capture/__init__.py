"""Runs inside the agent's process: the rollout's scope, marks, patches of hosts and HTTP clients, threads."""

from lightning_core.capture.scope import (
    Run,
    StepScope,
    bind,
    current_address,
    current_run,
    find_run,
    here,
    next_sequence,
    no_failure,
    outside,
    record,
    reward,
    rollout,
    scope,
    speaks,
    stands_in,
)

__all__ = [
    "Run",
    "StepScope",
    "bind",
    "current_address",
    "current_run",
    "find_run",
    "here",
    "next_sequence",
    "no_failure",
    "outside",
    "record",
    "reward",
    "rollout",
    "scope",
    "speaks",
    "stands_in",
]
