"""One rollout while it happens: its settings, its spans, and what could not be recorded.

`rollout` (in ``scope``) opens a run and makes it current. Other threads and processes find it by its id with `find_run`.
"""

from __future__ import annotations

import json
import threading
from collections import Counter
from typing import Any

from opentelemetry.trace import Span, Status, StatusCode

from lightning_core import trace as tr
from lightning_core.capture.spans import listen, start_root, stop_listening, to_record
from lightning_core.errors import CaptureError
from lightning_core.trace import Address, SpanRecord, Trace, describe, spans_to_trace

_MAX_FAILURES = 20
"""Failures kept with their text; all of them are counted."""

_live: dict[str, Run] = {}


class Run:
    """One rollout in progress. Thread-safe.

    `trace` can be read at any time. It is final once the run is closed.
    """

    def __init__(
        self,
        *,
        task: Any,
        task_id: str,
        agents: frozenset[str],
        endpoint: str | None,
        api_key: str | None,
        redirect_hosts: frozenset[str] | None,
        strict: bool,
    ) -> None:
        self.task = task
        self.task_id = task_id
        self.agents = agents
        """Agent names selected by the configuration, in addition to those marked in code."""
        self.endpoint = endpoint
        """Base URL of the policy endpoint, such as ``http://127.0.0.1:8000/v1``.

        None: requests are not redirected.
        """
        self.api_key = api_key
        self.redirect_hosts = redirect_hosts
        """Hosts whose model requests are redirected to the endpoint; None: the known providers."""
        self.strict = strict
        self.counters: Counter[str] = Counter()
        self.failures: list[str] = []
        """What could not be recorded; a strict rollout raises at its end if there is any."""
        self.infrastructure: list[str] = []
        """Infrastructure failures. They are not the agent's: the attempt is repeated."""
        self.rollout = ""
        """Trace id, 32 hexadecimal digits; empty until the run is opened."""
        self._spans: list[SpanRecord] = []
        self._lock = threading.Lock()
        self._root: Span | None = None

    def open(self) -> None:
        """Start the root span and register the run. Raises RuntimeError if it was opened before."""
        if self._root is not None:
            raise RuntimeError("this rollout was already entered; create a new rollout() for each attempt")
        self._root = start_root({tr.TASK_ID: self.task_id, tr.TASK: json.dumps(self.task, default=repr)})
        self.rollout = f"{self._root.get_span_context().trace_id:032x}"
        _live[self.rollout] = self
        listen(self.rollout, self._append)

    def close(self, error: BaseException | None) -> None:
        """End the root span and unregister the run.

        ``error`` is the exception that ended the rollout, if any. Raises `CaptureError` if the run is strict, something
        could not be recorded, and there is no ``error``.
        """
        assert self._root is not None
        if error is not None:
            self._root.set_status(Status(StatusCode.ERROR, describe(error)))
        self._root.end()
        stop_listening(self.rollout)
        del _live[self.rollout]
        self._count_unmatched_rewards()
        if self.strict and self.failures and error is None:
            raise CaptureError(
                f"rollout {self.rollout} could not record everything: {'; '.join(self.failures[:5])}. "
                "Training on it would silently miss data; pass strict=False to continue anyway."
            )

    @property
    def trace(self) -> Trace:
        """The trace recorded so far."""
        with self._lock:
            spans = list(self._spans)
        if self._root is not None and self._root.is_recording():
            spans.append(to_record(self._root, end_ns=0))  # pyright: ignore[reportArgumentType]
        return spans_to_trace(spans, counters=self.counters)

    @property
    def address(self) -> Address:
        """The address of the rollout itself: no agent, the root span as parent."""
        assert self._root is not None
        return Address(rollout=self.rollout, span=f"{self._root.get_span_context().span_id:016x}")

    @property
    def spans(self) -> tuple[SpanRecord, ...]:
        """All finished spans."""
        with self._lock:
            return tuple(self._spans)

    def count(self, what: str, *, detail: str | None = None) -> None:
        """Count ``what`` as not recorded, and keep ``detail`` as a failure if it is given."""
        with self._lock:
            self.counters[what] += 1
            if detail is not None and len(self.failures) < _MAX_FAILURES:
                self.failures.append(f"{what}: {detail}")

    def count_infrastructure_failure(self, detail: str) -> None:
        """Record a failure of the infrastructure, as opposed to one of the agent."""
        with self._lock:
            self.counters["infrastructure"] += 1
            self.infrastructure.append(detail)

    def _append(self, span: SpanRecord) -> None:
        with self._lock:
            self._spans.append(span)

    def _count_unmatched_rewards(self) -> None:
        """Count rewards whose ``call`` does not exist: they would be dropped silently."""
        spans = self.spans
        calls = {span.span_id for span in spans if span.attributes.get(tr.OPERATION) == "chat"}
        for span in spans:
            call = span.attributes.get(tr.REWARD_CALL)
            if call is not None and call not in calls:
                self.count(
                    "reward",
                    detail=f"there is no call {call!r} in this rollout; expected the id of one of its responses",
                )


def find_run(rollout_id: str) -> Run | None:
    """The live rollout with that id (taken from a request header), or None."""
    return _live.get(rollout_id)
