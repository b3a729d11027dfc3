"""The results of tools that a rollout keeps, and the recorded ones that it returns again.

A result is kept as a pickle, as text. The process that trains does not load it: it goes back to a process of the same agent.
"""

from __future__ import annotations

import base64
import pickle
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from lightning_core import trace as tr
from lightning_core.capture.recording import record
from lightning_core.capture.scope import is_failure
from lightning_core.capture.spans import SpanHandle
from lightning_core.errors import describe

T = TypeVar("T")
_Outcome = tuple[Literal["returned", "raised"], Any]

RESULT = "lightning.tool.pickled_result"
"""Attribute of a tool's span: the result or exception of its body; base64 of a pickle."""
NOT_KEPT = "lightning.tool.not_kept"
"""Attribute of a tool's span: the reason its result cannot be returned again."""

_MAX_BYTES = 1 << 20
"""Most bytes of a pickled result that is kept."""
_KEY = (tr.AGENT, tr.TOOL, tr.TOOL_ARGUMENTS, tr.TOOL_CALL_ID)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedTool:
    """One call of a tool in a recorded rollout."""

    id: str
    """The span's id."""
    attributes: Mapping[str, Any]
    """The span's attributes. A call with the same agent, name, arguments and call id gets the result."""
    result: str
    """The attribute `RESULT`."""
    error: str | None
    """The error of the span."""
    calls: frozenset[str]
    """Ids of the model calls in its body, which do not happen again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolResults:
    """The tools whose results a rollout keeps, and the recorded results that it returns again. Called for each attempt."""

    names: frozenset[str] | None
    """Names of tools; None: the functions that are marked with ``@replayable``."""
    recorded: Sequence[RecordedTool] = ()
    """The recorded calls in order of start."""

    def __call__(self) -> ToolReplay:
        return ToolReplay(self)


class ToolReplay:
    """Runs the selected tools of one attempt: returns the recorded results that are left, and keeps the results of tools that run."""

    def __init__(self, results: ToolResults) -> None:
        self._names = results.names
        self._left: dict[tuple[Any, ...], deque[RecordedTool]] = defaultdict(deque)
        for tool in results.recorded:
            self._left[_key(tool.attributes)].append(tool)

    def selects(self, name: str, *, marked: bool) -> bool:
        """Whether results of the tool ``name`` are kept; ``marked``: it is a function with ``@replayable``."""
        return marked if self._names is None else name in self._names

    def run(self, handle: SpanHandle, body: Callable[[], T]) -> T:
        """The recorded result of the tool of the span ``handle``, or else ``body``'s. A recorded exception is raised again."""
        if (outcome := self._restore(handle)) is not None:
            return _repeat(outcome)
        try:
            result = body()
        except BaseException as error:
            _keep(handle, ("raised", error))
            raise
        _keep(handle, ("returned", result))
        return result

    async def arun(self, handle: SpanHandle, body: Callable[[], Awaitable[T]]) -> T:
        """`run` for a ``body`` that returns an awaitable."""
        if (outcome := self._restore(handle)) is not None:
            return _repeat(outcome)
        try:
            result = await body()
        except BaseException as error:
            _keep(handle, ("raised", error))
            raise
        _keep(handle, ("returned", result))
        return result

    def _take(self, attributes: Mapping[str, Any]) -> RecordedTool | None:
        """The first recorded call that is left with the same agent, name, arguments and call id; None if there is none."""
        left = self._left.get(_key(attributes))
        try:
            return left.popleft() if left else None
        except IndexError:  # another thread was faster
            return None

    def _restore(self, handle: SpanHandle) -> _Outcome | None:
        with record("tool.replay"):
            recorded = self._take(handle.attributes)
            if recorded is None:
                return None
            try:
                outcome = pickle.loads(base64.b64decode(recorded.result))
            except Exception as error:  # noqa: BLE001 - code of the result's classes
                handle.set(**{NOT_KEPT: f"its recorded result cannot be loaded: {describe(error)}"})
                return None
            handle.set(**{RESULT: recorded.result, tr.REPLAYS: recorded.id})
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


def _key(attributes: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(attributes.get(name) for name in _KEY)
