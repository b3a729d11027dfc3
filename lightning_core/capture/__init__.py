"""The rollout and agent of a model call, in the agent's process: scopes, marks, patches of frameworks."""

from lightning_core.capture.containers import Container
from lightning_core.capture.context import bind, current_scope, outside_rollout
from lightning_core.capture.recording import declare_agents, note_elsewhere, record, reward
from lightning_core.capture.run import ActiveRollout, find_rollout
from lightning_core.capture.scope import (
    ScopeKind,
    current_address,
    current_rollout,
    is_current_agent,
    is_current_scope,
    is_selected,
    next_sequence,
    register_control_flow,
    rollout,
    run_as,
    scope,
)
from lightning_core.capture.stepping import StepScope
from lightning_core.capture.tools import arun_tool, run_tool

__all__ = [
    "ActiveRollout",
    "Container",
    "ScopeKind",
    "StepScope",
    "arun_tool",
    "bind",
    "current_address",
    "current_rollout",
    "current_scope",
    "declare_agents",
    "find_rollout",
    "is_current_agent",
    "is_current_scope",
    "is_selected",
    "next_sequence",
    "note_elsewhere",
    "outside_rollout",
    "record",
    "register_control_flow",
    "reward",
    "rollout",
    "run_as",
    "run_tool",
    "scope",
]
