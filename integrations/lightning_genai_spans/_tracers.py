"""A tracer provider whose spans are not exported, for hosts whose spans are switched on here, or that found no provider.

The program's own provider stays the global one. If there is none, a host's spans are recorded inside rollouts without setting one:
setting it would be final, and a program may set its own later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from opentelemetry import trace
from opentelemetry.util._decorator import _agnosticcontextmanager  # pyright: ignore[reportPrivateUsage]

from lightning_core.capture import current_rollout
from lightning_core.capture.patching import Patches
from lightning_core.capture.spans import make_provider

_sdk = make_provider()


class _Tracer(trace.Tracer):
    """Records inside rollouts; does nothing outside."""

    def __init__(self, name: str) -> None:
        self._recording = _sdk.get_tracer(name)
        self._no_op = trace.NoOpTracer()

    def start_span(self, *args: Any, **kwargs: Any) -> trace.Span:
        tracer = self._no_op if current_rollout() is None else self._recording
        return tracer.start_span(*args, **kwargs)

    # As in the SDK's tracer, so the result decorates coroutine functions too.
    @_agnosticcontextmanager
    def start_as_current_span(self, *args: Any, **kwargs: Any) -> Iterator[trace.Span]:
        tracer = self._no_op if current_rollout() is None else self._recording
        with tracer.start_as_current_span(*args, **kwargs) as span:
            yield span


class HostProvider(trace.TracerProvider):
    """Tracers that record inside rollouts, export nothing and do nothing outside."""

    def get_tracer(self, instrumenting_module_name: str, *args: Any, **kwargs: Any) -> trace.Tracer:
        return _Tracer(instrumenting_module_name)


HOST_PROVIDER = HostProvider()


def install_tracers(patches: Patches) -> None:
    """Record the spans of tracers that no provider serves."""
    patches.wrap(trace.ProxyTracer, "start_span", _start_span)
    patches.wrap(trace.ProxyTracer, "start_as_current_span", _start_span_as_current)


def _start_span(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
    tracer = _tracer_instead_of(instance)
    return (wrapped if tracer is None else tracer.start_span)(*args, **kwargs)


def _start_span_as_current(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
    tracer = _tracer_instead_of(instance)
    return (wrapped if tracer is None else tracer.start_as_current_span)(*args, **kwargs)


def _tracer_instead_of(proxy: Any) -> trace.Tracer | None:
    if not isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
        return None
    return HOST_PROVIDER.get_tracer(getattr(proxy, "_instrumenting_module_name", "host"))
