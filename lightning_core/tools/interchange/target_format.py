"""The protocol of a format that rollouts are written in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_core.capture.selectors import matches
from lightning_core.records.store import Phase
from lightning_core.trace import Call, SpanRecord, Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedRollout:
    """A rollout to write."""

    trace: Trace
    spans: Sequence[SpanRecord]
    """All its spans, with our attributes."""
    agents: Sequence[str]
    """Names or patterns of the agents whose calls are written; empty: all."""

    @property
    def calls(self) -> list[Call]:
        """The calls to write."""
        return [call for call in self.trace.calls if call.refused is None and self._is_chosen(call)]

    def _is_chosen(self, call: Call) -> bool:
        return not self.agents or (call.agent is not None and any(matches(name, call.agent) for name in self.agents))


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetFormat:
    """A format that can be exported."""

    name: str
    """For ``--as``."""
    title: str
    write: Callable[[ExportedRollout, Counter[str]], list[Mapping[str, Any]]]
    """The JSON documents of a rollout; what cannot be written is counted, by reason."""
    takes_agents: bool = True
    takes_failed: bool = True
    """Whether rollouts that failed are written."""
    phase: Phase | None = None
    """The phase of a run's rollouts that is written unless the user chooses; None: all."""
    one_document: bool = True
    """Whether a rollout is one document, which can be a file."""
