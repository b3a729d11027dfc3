"""Instrumentations as their manuals initialize them; a server of the tests takes what they export."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

SINK = os.environ.get("COEXISTS_SINK", "http://127.0.0.1:9")
"""The URL of a server that accepts everything."""


def sentry() -> None:
    import sentry_sdk

    sentry_sdk.init(dsn=f"{SINK.replace('//', '//key@')}/1", traces_sample_rate=1.0, send_default_pii=True)


def langfuse() -> None:
    from langfuse import Langfuse
    from langfuse.langchain import CallbackHandler

    Langfuse(public_key="pk-lf-1", secret_key="sk-lf-1", base_url=SINK)
    _add_callback(CallbackHandler())
    _openinference()


def openlit() -> None:
    import openlit

    openlit.init(otlp_endpoint=SINK, disable_metrics=True)


def traceloop() -> None:
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
    from traceloop.sdk import Traceloop

    Traceloop.init(app_name="agents", exporter=InMemorySpanExporter(), telemetry_enabled=False)


def logfire() -> None:
    import logfire

    logfire.configure(send_to_logfire=False, console=False)
    logfire.instrument_openai_agents()
    logfire.instrument_openai()
    logfire.instrument_httpx()
    _openinference(without="openai_agents")


def datadog() -> None:
    import ddtrace.auto  # noqa: F401 - patches when it is imported
    from ddtrace.llmobs import LLMObs

    LLMObs.enable(ml_app="agents", api_key="k", site="localhost", agentless_enabled=True)


def phoenix() -> None:
    from phoenix.otel import register

    register(endpoint=f"{SINK}/v1/traces", auto_instrument=True, verbose=False)


def openinference() -> None:
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider

    trace.set_tracer_provider(TracerProvider())
    _openinference()


def mlflow() -> None:
    import mlflow

    mlflow.set_tracking_uri(f"{SINK}/mlflow")
    mlflow.openai.autolog()
    mlflow.langchain.autolog()
    mlflow.autogen.autolog()


def langsmith() -> None:
    os.environ |= {"LANGSMITH_TRACING": "true", "LANGSMITH_API_KEY": "k", "LANGSMITH_ENDPOINT": SINK}
    from agents import add_trace_processor
    from langsmith.wrappers import OpenAIAgentsTracingProcessor

    add_trace_processor(OpenAIAgentsTracingProcessor())


def _openinference(without: str = "") -> None:
    from openinference.instrumentation.autogen_agentchat import AutogenAgentChatInstrumentor
    from openinference.instrumentation.langchain import LangChainInstrumentor
    from openinference.instrumentation.openai import OpenAIInstrumentor
    from openinference.instrumentation.openai_agents import OpenAIAgentsInstrumentor

    for instrumentor in (AutogenAgentChatInstrumentor, LangChainInstrumentor, OpenAIInstrumentor):
        instrumentor().instrument()
    if without != "openai_agents":
        OpenAIAgentsInstrumentor().instrument()


def _add_callback(handler: Any) -> None:
    """Give ``handler`` to every run of LangChain and LangGraph."""
    from contextvars import ContextVar

    from langchain_core.tracers.context import register_configure_hook

    register_configure_hook(ContextVar("handler", default=handler), inheritable=True)


INSTRUMENTS: dict[str, Callable[[], None]] = {
    each.__name__: each
    for each in (
        sentry,
        langfuse,
        openlit,
        traceloop,
        logfire,
        datadog,
        phoenix,
        openinference,
        mlflow,
        langsmith,
    )
}
