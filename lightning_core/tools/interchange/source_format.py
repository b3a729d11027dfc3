"""The protocol of a format of traces: documents → spans and scores."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from lightning_core.errors import describe
from lightning_core.trace import SpanRecord

Document = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceScore:
    """A named score of a trace, or of one of its spans."""

    trace_id: str
    name: str
    value: Any
    """As the source has it: a number, true or false, or a text."""
    span_id: str | None = None
    """None: of the whole trace."""
    time_ns: int = 0
    """When it was given; of several with a name, the last counts. 0: not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions:
    """What the user chooses about a format."""

    trace_key: str | None = None
    """The metadata key whose value completions of one trace have in common."""


@dataclass(slots=True)
class Findings:
    """What a format has read so far."""

    spans: list[SpanRecord] = field(default_factory=list[SpanRecord])
    """Spans with ids of OpenTelemetry, in any order: of a known convention, or with our attributes."""
    scores: list[SourceScore] = field(default_factory=list[SourceScore])
    metadata: dict[str, Mapping[str, Any]] = field(default_factory=dict[str, Mapping[str, Any]])
    """Metadata of spans, by span id, and of traces, by trace id."""
    names: dict[str, str] = field(default_factory=dict[str, str])
    """The source's own id of traces whose id had to be replaced."""
    refused: dict[str, str] = field(default_factory=dict[str, str])
    """Traces with a record that cannot be read, and the reason."""
    left_out: Counter[str] = field(default_factory=Counter[str])
    """What is missing of the traces that were read, or belongs to no trace, by reason."""

    @contextmanager
    def record_of(self, trace_id: str | None) -> Generator[None]:
        """An error in the body rejects the trace ``trace_id``, or counts a record without a trace."""
        try:
            yield
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError, RecursionError) as error:
            missing = f"no field {error}" if isinstance(error, KeyError) else describe(error)
            self.refuse(trace_id, missing)

    def refuse(self, trace_id: str | None, reason: str) -> None:
        """Reject a record for ``reason``, and its trace if it is known."""
        if trace_id is None:
            self.left_out[f"records without a trace: {reason:.160}"] += 1
        else:
            self.refused.setdefault(trace_id, f"a record cannot be read: {reason:.160}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFormat:
    """A format that can be imported."""

    name: str
    """For ``--from``."""
    title: str
    recognize: Callable[[Document], bool]
    """Whether a document has this format."""
    read: Callable[[Sequence[Document], Findings, ReadOptions], None]
    """Add what ``documents`` have to the findings; documents of any other form are counted there."""
    takes_trace_key: bool = False
