"""The trace of a model call outside rollouts: one for each outermost unit of work.

A unit of work is an outermost marked function, a run of a framework, or the host's current OpenTelemetry trace. Its trace has a root whose
id follows from the trace id, so processes that share an OpenTelemetry trace share the root.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable
from dataclasses import dataclass

from opentelemetry import trace as otel

from lightning_core.capture.address import Address
from lightning_core.capture.context import Scope, current, find_scope, set_ambient
from lightning_core.capture.run import ActiveRollout, has_live_runs


def new_trace() -> str:
    """A random trace id."""
    return os.urandom(16).hex()


def root_of(trace: str) -> str:
    """The span id of the root of a recorded trace."""
    return trace[16:]


def is_sampled(trace: str, share: float) -> bool:
    """Whether a trace is among the ``share`` (0 to 1) that is recorded; the same for all processes."""
    return int(trace[24:], 16) < share * (1 << 32)


@dataclass(frozen=True, slots=True)
class CallOrigin:
    """The trace, the parent span and the agent of a model call."""

    trace: str
    parent: str
    agent: str | None
    in_unit: bool
    """Whether a unit of work is open; otherwise the trace belongs to this call alone."""
    conversation: str | None = None
    """The conversation of a call outside units, if the program names it. Calls of one agent and conversation are one trace."""


class RecordedUnits:
    """Opens a trace for each unit of work in this process while it is installed.

    While rollouts run in the process, code outside them is in no unit.
    """

    def __init__(self, selectors: Iterable[str] = ()) -> None:
        # Never opened, so it is not live: the calls of a recorded program are not routed, and never refused.
        self._run = ActiveRollout(
            task=None, task_id="", agents=frozenset(selectors), endpoint=None, api_key=None, strict=False
        )
        self._reference = weakref.ref(self._run)

    def install(self) -> None:
        """Give code outside rollouts a scope."""
        set_ambient(self._open)

    def uninstall(self) -> None:
        """Undo `install`. Units that are open see no rollout any more."""
        set_ambient(None)
        self._run.ended = True

    def _open(self) -> Scope | None:
        if has_live_runs():
            return None
        trace = _host_trace() or new_trace()
        return Scope(self._reference, Address(rollout=trace, span=root_of(trace)), marked=False)

    def origin(self) -> CallOrigin | None:
        """The origin of a model call made now; None inside a rollout, or inside `outside_rollout`."""
        scope = find_scope()
        if scope is None or scope.run is not self._run:
            return None
        address = scope.address
        in_unit = current.get() is not None or _host_trace() is not None
        return CallOrigin(address.rollout, address.span, address.agent, in_unit)


def _host_trace() -> str | None:
    """The id of the trace of the host's own OpenTelemetry span, if one is current."""
    context = otel.get_current_span().get_span_context()
    return f"{context.trace_id:032x}" if context.is_valid else None
