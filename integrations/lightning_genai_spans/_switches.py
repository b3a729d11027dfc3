"""Frameworks whose spans are off by default: how each is switched on, and off again.

A framework that the program itself switched on is left alone. Spans that are switched on here go to ``HOST_PROVIDER``, so they
reach no exporter. A framework is never imported for this; it is switched on when the program imports it.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

from opentelemetry.metrics import NoOpMeterProvider

from lightning_core.capture.import_hooks import when_imported
from lightning_core.capture.patching import Patches
from lightning_genai_spans._tracers import HOST_PROVIDER

logger = logging.getLogger(__name__)


def install_switches(patches: Patches) -> None:
    """Switch on the spans of each of these frameworks, when it is imported."""
    for module, switch in _SWITCHES.items():
        when_imported(patches, module, partial(switch, patches))


def _replace(patches: Patches, owner: Any, name: str, value: Any) -> None:
    """Set an attribute until the patches are undone, unless the program sets it in the meantime."""
    original = getattr(owner, name)
    setattr(owner, name, value)

    def restore() -> None:
        if getattr(owner, name) is value:
            setattr(owner, name, original)

    patches.on_undo(restore)


def _pydantic_ai(patches: Patches, module: Any) -> None:
    if module.Agent._instrument_default:
        return
    settings = module.InstrumentationSettings(tracer_provider=HOST_PROVIDER, meter_provider=NoOpMeterProvider())
    _replace(patches, module.Agent, "_instrument_default", settings)


def _agent_framework(patches: Patches, module: Any) -> None:
    settings = module.OBSERVABILITY_SETTINGS
    # On by default in 1.23; then the program decides whether arguments and results of tools are recorded.
    if settings.ENABLED or settings._user_disabled:
        return
    _replace(patches, settings, "_enable_instrumentation", True)
    _replace(patches, settings, "_enable_sensitive_data", True)  # arguments and results of tools
    _replace(patches, module, "get_tracer", lambda *_, **__: HOST_PROVIDER.get_tracer(module.__name__))


def _semantic_kernel(patches: Patches, module: Any) -> None:
    settings = module.MODEL_DIAGNOSTICS_SETTINGS
    if settings.enable_otel_diagnostics or settings.enable_otel_diagnostics_sensitive:
        return
    _replace(patches, settings, "enable_otel_diagnostics_sensitive", True)  # arguments and results of tools
    if hasattr(module, "tracer"):
        _replace(patches, module, "tracer", HOST_PROVIDER.get_tracer(module.__name__))


def _openinference(name: str, instrumentor: str) -> Callable[[Patches, Any], None]:
    package = f"openinference.instrumentation.{name}"

    def switch(patches: Patches, module: Any) -> None:
        try:
            instrument = getattr(importlib.import_module(package), instrumentor)()
        except ModuleNotFoundError:
            logger.warning(
                "the agents of %s cannot be selected by name without its instrumentor: pip install 'lightning-rl[%s]'",
                name,
                name,
            )
            return
        if not instrument.is_instrumented_by_opentelemetry:
            instrument.instrument(tracer_provider=HOST_PROVIDER)
            patches.on_undo(instrument.uninstrument)

    return switch


_SWITCHES: dict[str, Callable[[Patches, Any], None]] = {
    "pydantic_ai": _pydantic_ai,
    "agent_framework.observability": _agent_framework,
    "semantic_kernel.utils.telemetry.agent_diagnostics.decorators": _semantic_kernel,
    "semantic_kernel.utils.telemetry.model_diagnostics.decorators": _semantic_kernel,
    "semantic_kernel.utils.telemetry.model_diagnostics.function_tracer": _semantic_kernel,
    "smolagents": _openinference("smolagents", "SmolagentsInstrumentor"),
    "crewai": _openinference("crewai", "CrewAIInstrumentor"),
    "agno.agent": _openinference("agno", "AgnoInstrumentor"),
}
