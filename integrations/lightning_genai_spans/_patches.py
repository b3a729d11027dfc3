"""The wrapped functions, with the reason for each.

- ``opentelemetry.sdk.trace.Span.start`` (public), which every provider's spans go through: it links a span to its parent and to the
  current scope. A span processor would have to be added to each provider, and cannot be removed.
- ``opentelemetry.trace.ProxyTracer`` (public), see ``_tracers``.
- Frameworks, see ``_switches`` and ``_selectors``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from opentelemetry import trace
from opentelemetry.sdk.trace import Span

from lightning_core.capture import record
from lightning_core.capture.context import opened_scope
from lightning_core.capture.patching import Patches
from lightning_core.capture.resolvers import register_resolver, unregister_resolver
from lightning_genai_spans._host_spans import find_host_span, follow
from lightning_genai_spans._selectors import install_selectors
from lightning_genai_spans._switches import install_switches
from lightning_genai_spans._tracers import install_tracers

_OURS = "lightning_core"
_HAVE_AN_INTEGRATION = frozenset(
    {"autogen-core", "autogen_core", "autogen_agentchat", "langchain", "langgraph", "openai_agents"}
)
"""Frameworks whose agents and tools another integration records: the ends of the names of their instrumentations' tracers."""


def install(patches: Patches) -> None:
    patches.wrap(Span, "start", _start)
    install_tracers(patches)
    register_resolver(_resolve)
    patches.on_undo(lambda: unregister_resolver(_resolve))
    install_selectors(patches)
    install_switches(patches)


def _resolve(scope: Any) -> Any:
    with record("genai_spans"):
        host = find_host_span(trace.get_current_span())
        # A host span that started in another scope encloses this one, which was then opened inside it.
        if host is not None and host.base is scope:
            return host.enter()
    return scope


def _start(wrapped: Callable[..., Any], instance: Span, args: Any, kwargs: Any) -> Any:
    result = wrapped(*args, **kwargs)
    with record("genai_spans"):
        name = "" if instance.instrumentation_scope is None else instance.instrumentation_scope.name
        if name != _OURS:
            parent = _parent(*args, **kwargs)
            follow(instance, parent, opened_scope(), silent=name.rpartition(".")[2] in _HAVE_AN_INTEGRATION)
    return result


def _parent(start_time: Any = None, parent_context: Any = None) -> Any:
    return find_host_span(trace.get_current_span(parent_context))
