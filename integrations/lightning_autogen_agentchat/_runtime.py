"""The scope of messages: a runtime handles each in its own task, which may have been started anywhere.

A message keeps the scope in which it was sent. An agent of a runtime is not inside the agent that sent it a message: both are
inside the scope of the first message. Messages of a team are in the scope of the team's run.

An agent's exception is logged in one line. Wrapped: ``SingleThreadedAgentRuntime._process_send`` and ``_process_publish``, the
construction of its messages, and its logger's ``error``.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import autogen_core._single_threaded_agent_runtime as runtimes
from autogen_core import SingleThreadedAgentRuntime

from lightning_core.capture import current_rollout, current_scope, record
from lightning_core.capture.patching import Patches

_Scope = Callable[[], AbstractContextManager[None]]

_SCOPE = "__lightning_scope__"
"""The attribute of a message that re-enters the scope in which it was sent."""

_received: ContextVar[_Scope | None] = ContextVar("lightning_autogen_received", default=None)
"""The scope of the message that is being handled."""

_teams: dict[str, _Scope] = {}
"""The scopes of the teams that are running, by id."""


def install(patches: Patches) -> None:
    # The runtime's tasks and the sender may be outside any rollout, so these are wrapped everywhere.
    for message in (runtimes.SendMessageEnvelope, runtimes.PublishMessageEnvelope):
        patches.wrap(message, "__init__", _make_message, everywhere=True)
    for method in ("_process_send", "_process_publish"):
        patches.wrap(SingleThreadedAgentRuntime, method, _deliver, everywhere=True)
    patches.wrap(runtimes.logger, "error", _log_error)


@contextmanager
def handling() -> Generator[None]:
    """Handle a message; messages sent meanwhile have its scope."""
    token = _received.set(current_scope())
    try:
        yield
    finally:
        _received.reset(token)


@contextmanager
def team_scope(team: Any) -> Generator[None]:
    """Handle messages to ``team`` in the current scope."""
    team_id: str | None = None
    with record("autogen_agentchat.team"):
        team_id = team._team_id
    if team_id is None:
        yield
        return
    _teams[team_id] = current_scope()
    try:
        yield
    finally:
        _teams.pop(team_id, None)


def _make_message(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> None:
    wrapped(*args, **kwargs)
    received = _received.get() if current_rollout() is not None else None
    setattr(instance, _SCOPE, received or current_scope())


async def _deliver(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
    message = args[0] if args else kwargs["message_envelope"]
    with _scope_of(message)():
        return await wrapped(*args, **kwargs)


def _log_error(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> None:
    # An agent's exception is on its event and ends its team's run. The runtime logs it for every participant, with a traceback each.
    wrapped(*args, **kwargs | {"exc_info": False})


def _scope_of(message: Any) -> _Scope:
    recipient = getattr(message, "recipient", None)
    key = message.topic_id.source if recipient is None else recipient.key
    return _teams.get(key) or getattr(message, _SCOPE, nullcontext)
