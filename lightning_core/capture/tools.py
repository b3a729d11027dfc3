"""Runs the bodies of tools, or returns their recorded results where a rollout repeats a recorded one.

Only for the tools that ``rollouts.forks.tools`` selects. An integration calls a tool's body through `run_tool` or `arun_tool` in the tool's
scope, so the framework's own steps around the body happen again.

A result is kept as a pickle, as text. The process that trains does not load it: it goes back to a process of the same agent.
"""

from __future__ import annotations

import base64
import pickle
from collections.abc import Awaitable, Callable
from typing import Any, Literal, TypeVar

from lightning_core.capture.recording import record
from lightning_core.capture.scope import current_rollout, is_failure
from lightning_core.capture.spans import SpanHandle
from lightning_core.capture.tool_results import NOT_KEPT, RESULT, ToolReplay
from lightning_core.errors import describe
from lightning_core.trace import REPLAYS, TOOL

T = TypeVar("T")
_Outcome = tuple[Literal["returned", "raised"], Any]

_MAX_BYTES = 1 << 20
"""Most bytes of a pickled result that is kept."""


def run_tool(handle: SpanHandle, body: Callable[[], T], *, marked: bool = False) -> T:
    """The result of ``body``, the tool of the span ``handle``; a recorded result is returned without running the body.

    A recorded exception is raised again. ``marked``: the tool is a function with ``@replayable``.
    """
    replay = _selected(handle, marked)
    if replay is None:
        return body()
    if (outcome := _restore(replay, handle)) is not None:
        return _repeat(outcome)
    try:
        result = body()
    except BaseException as error:
        _keep(handle, ("raised", error))
        raise
    _keep(handle, ("returned", result))
    return result


async def arun_tool(handle: SpanHandle, body: Callable[[], Awaitable[T]], *, marked: bool = False) -> T:
    """`run_tool` for a ``body`` that returns an awaitable."""
    replay = _selected(handle, marked)
    if replay is None:
        return await body()
    if (outcome := _restore(replay, handle)) is not None:
        return _repeat(outcome)
    try:
        result = await body()
    except BaseException as error:
        _keep(handle, ("raised", error))
        raise
    _keep(handle, ("returned", result))
    return result


def keeps_result(name: str) -> bool:
    """Whether results of the framework's tool ``name`` are kept here."""
    run = current_rollout()
    return run is not None and run.tools is not None and run.tools.selects(name, marked=False)


def _selected(handle: SpanHandle, marked: bool) -> ToolReplay | None:
    run = current_rollout()
    if run is None or run.tools is None:
        return None
    name = handle.attributes.get(TOOL)
    return run.tools if isinstance(name, str) and run.tools.selects(name, marked=marked) else None


def _restore(replay: ToolReplay, handle: SpanHandle) -> _Outcome | None:
    with record("tool.replay"):
        recorded = replay.take(handle.attributes)
        if recorded is None:
            return None
        try:
            outcome = pickle.loads(base64.b64decode(recorded.result))
        except Exception as error:  # noqa: BLE001 - code of the result's classes
            handle.set(**{NOT_KEPT: f"its recorded result cannot be loaded: {describe(error)}"})
            return None
        handle.set(**{RESULT: recorded.result, REPLAYS: recorded.id})
        if recorded.error is not None:
            handle.fail(recorded.error)
        return outcome
    return None


def _repeat(outcome: _Outcome) -> Any:
    kind, value = outcome
    if kind == "raised":
        raise value
    return value


def _keep(handle: SpanHandle, outcome: _Outcome) -> None:
    kind, value = outcome
    if NOT_KEPT in handle.attributes:
        return
    with record("tool.keep"):
        if kind == "raised" and not is_failure(value):
            handle.set(**{NOT_KEPT: f"it was ended by {type(value).__name__}"})
            return
        try:
            data = pickle.dumps(outcome)
        except Exception as error:  # noqa: BLE001 - code of the result's classes
            handle.set(
                **{NOT_KEPT: f"its result, of type {type(value).__name__}, cannot be pickled: {describe(error)}"}
            )
            return
        if len(data) > _MAX_BYTES:
            handle.set(**{NOT_KEPT: f"its result has {len(data)} bytes; at most {_MAX_BYTES} are kept"})
        else:
            handle.set(**{RESULT: base64.b64encode(data).decode()})
