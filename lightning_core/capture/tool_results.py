"""The results of tools that a rollout keeps, and the recorded ones that it returns again."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_core import trace as tr

RESULT = "lightning.tool.pickled_result"
"""Attribute of a tool's span: the result or exception of its body; base64 of a pickle."""
NOT_KEPT = "lightning.tool.not_kept"
"""Attribute of a tool's span: the reason its result cannot be returned again."""

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
    """The tools whose results a rollout keeps, and the recorded results that it returns again."""

    names: frozenset[str] | None
    """Names of tools; None: the functions that are marked with ``@replayable``."""
    recorded: Sequence[RecordedTool] = ()
    """The recorded calls in order of start."""


class ToolReplay:
    """The recorded results that are left in one rollout."""

    def __init__(self, results: ToolResults) -> None:
        self._names = results.names
        self._left: dict[tuple[Any, ...], deque[RecordedTool]] = defaultdict(deque)
        for tool in results.recorded:
            self._left[_key(tool.attributes)].append(tool)

    def selects(self, name: str, *, marked: bool) -> bool:
        """Whether results of the tool ``name`` are kept; ``marked``: it is a function with ``@replayable``."""
        return marked if self._names is None else name in self._names

    def take(self, attributes: Mapping[str, Any]) -> RecordedTool | None:
        """The first recorded call that is left with the same agent, name, arguments and call id; None if there is none."""
        left = self._left.get(_key(attributes))
        try:
            return left.popleft() if left else None
        except IndexError:  # another thread was faster
            return None


def _key(attributes: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(attributes.get(name) for name in _KEY)
