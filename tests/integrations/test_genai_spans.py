"""Agents and tools by the host's OpenTelemetry spans. The frameworks themselves are in ``tests/frameworks``."""

from __future__ import annotations

import contextvars
import gc
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager

import httpx
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import Span, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from lightning_core import trainable
from lightning_core.capture import current_address, scope
from lightning_core.capture.integration import Installed
from lightning_core.rollouts.local_agents import patched
from lightning_core.testing import Playground
from lightning_core.testing.programs import answer_prompt
from lightning_core.testing.traces import ancestors, parent_of
from lightning_core.trace import TOOL_ARGUMENTS, TOOL_CALL_ID, TOOL_RESULT
from lightning_genai_spans import _host_spans

EXPORTED = InMemorySpanExporter()
PROVIDER = TracerProvider()
PROVIDER.add_span_processor(SimpleSpanProcessor(EXPORTED))
TRACER = PROVIDER.get_tracer("a_framework")


@pytest.fixture(scope="module")
def served() -> Iterator[Playground]:
    with Playground(answer_prompt) as served:
        yield served


@pytest.fixture
def playground(served: Playground) -> Iterator[Playground]:
    EXPORTED.clear()
    with patched(["genai-spans"]):
        yield served


def agent(name: str, tracer: trace.Tracer = TRACER) -> AbstractContextManager[trace.Span]:
    attributes = {"gen_ai.operation.name": "invoke_agent", "gen_ai.agent.name": name}
    return tracer.start_as_current_span(f"invoke_agent {name}", attributes=attributes)


def ask(text: str = "hello") -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": text}]}
    httpx.post("https://api.openai.com/v1/chat/completions", json=body).raise_for_status()


def speaker() -> str | None:
    address = current_address()
    assert address is not None
    return address.agent


def test_the_nearest_agent_makes_the_call(playground: Playground) -> None:
    with playground.rollout(train=["inner"]) as run:
        with agent("outer"):
            ask()
            with TRACER.start_as_current_span("a step"), agent("inner"), TRACER.start_as_current_span("chat"):
                ask()
            ask()
        ask()
    assert [call.agent for call in run.trace.calls] == ["outer", "inner", "outer", None]
    assert ancestors(run.trace, parent_of(run.trace, run.trace.calls[1])) == ["inner", "outer", "rollout"]
    assert [event.name for event in run.trace.events] == ["rollout", "outer", "inner"]


def test_attributes_that_are_set_after_the_start_count(playground: Playground) -> None:
    with playground.rollout(), TRACER.start_as_current_span("a span") as span:
        assert speaker() is None
        span.set_attributes({"openinference.span.kind": "AGENT", "agent.name": "late"})
        assert speaker() == "late"


@pytest.mark.parametrize(("name", "expected"), [("manager.run", "manager"), ("A. B._execute_core", "A. B"), ("x", "x")])
def test_an_openinference_span_without_a_name_is_named_by_its_own(
    playground: Playground, name: str, expected: str
) -> None:
    with (
        playground.rollout(),
        TRACER.start_as_current_span(name, attributes={"openinference.span.kind": "AGENT"}),
    ):
        assert speaker() == expected


def test_an_enclosing_mark_wins_unless_the_agent_is_selected(playground: Playground) -> None:
    @trainable("solve-spans")
    def solve() -> None:
        with agent("calculator"), agent("detail"):
            ask()

    found = []
    for train in ([], ["calculator"], ["detail"]):
        with playground.rollout(train=train or ["solve-spans"]) as run:
            solve()
        found += [call.agent for call in run.trace.calls]
    assert found == ["solve-spans", "calculator", "detail"]


def test_a_scope_inside_an_agent_is_nearer_and_sees_it(playground: Playground) -> None:
    with playground.rollout(train=["calculator"]), agent("calculator"):
        with scope("node", kind="node"):
            assert speaker() == "calculator"
            with agent("unselected"):
                assert speaker() == "calculator"
        with scope("marked"):
            assert speaker() == "marked"
        assert speaker() == "calculator"


def test_a_thread_belongs_to_the_agent_that_started_it(playground: Playground) -> None:
    found: list[str | None] = []

    def work() -> None:
        found.append(speaker())

    def with_context() -> None:
        with TRACER.start_as_current_span("chat"):
            found.append(speaker())

    with playground.rollout(), agent("outer"), agent("starter"):
        threads = [
            threading.Thread(target=work),
            threading.Thread(target=contextvars.copy_context().run, args=(with_context,)),
        ]
        for thread in threads:
            thread.start()
            thread.join(10)
    assert found == ["starter", "starter"]


def test_an_agent_of_another_rollout_does_not_count(playground: Playground) -> None:
    with playground.rollout(), agent("first"), playground.rollout():
        assert speaker() is None


def test_a_tool_is_an_event_with_its_outcome(playground: Playground) -> None:
    def attributes(call: str) -> dict[str, str]:
        return {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": "add", "gen_ai.tool.call.id": call}

    with playground.rollout() as run, agent("solver"):
        with TRACER.start_as_current_span("execute_tool add", attributes=attributes("call_1")) as span:
            span.set_attributes({"gen_ai.tool.call.arguments": '{"a": 1}', "gen_ai.tool.call.result": "3"})
            with agent("helper"):
                ask()
        with (
            pytest.raises(ValueError, match="negative"),
            TRACER.start_as_current_span("execute_tool add", attributes=attributes("call_2")),
        ):
            raise ValueError("negative")
    fine, failed = [event for event in run.trace.events if event.kind == "tool"]
    wanted = {TOOL_CALL_ID: "call_1", TOOL_ARGUMENTS: '{"a": 1}', TOOL_RESULT: "3"}
    assert {key: fine.attributes[key] for key in wanted} == wanted
    assert (fine.agent, fine.error, failed.agent) == ("solver", None, "solver")
    assert failed.error is not None
    assert "negative" in failed.error
    assert ancestors(run.trace, parent_of(run.trace, run.trace.calls[0])) == ["helper", "add", "solver", "rollout"]


def test_a_span_that_never_ends_is_the_parent_of_its_calls(playground: Playground) -> None:
    with playground.rollout() as run:
        span = TRACER.start_span("invoke_agent lost", attributes={"gen_ai.operation.name": "invoke_agent"})
        with trace.use_span(span, end_on_exit=False):
            ask()
    assert parent_of(run.trace, run.trace.calls[0]).name == "lost"


def test_spans_of_frameworks_with_an_integration_are_left_to_it(playground: Playground) -> None:
    with playground.rollout(), agent("writer", PROVIDER.get_tracer("autogen-core")):
        assert speaker() is None


def test_no_span_is_kept(playground: Playground) -> None:
    for _ in range(3):
        with playground.rollout(), agent("outer"), agent("inner"):
            ask()
    gc.collect()
    assert len(_host_spans._known) == 0


def test_the_programs_exporters_get_the_programs_spans(playground: Playground) -> None:
    with playground.rollout(), agent("solver"):
        ask()
    assert [span.name for span in EXPORTED.get_finished_spans()] == ["invoke_agent solver"]


def test_without_a_provider_spans_are_recorded_in_rollouts_and_none_is_set(playground: Playground) -> None:
    tracer = trace.ProxyTracerProvider().get_tracer("a_framework")
    with agent("solver", tracer) as span:
        assert not span.is_recording()
    with playground.rollout(), agent("solver", tracer):
        assert speaker() == "solver"
    assert isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider)


def test_removing_it_restores_everything() -> None:
    def identities() -> list[dict[str, int]]:
        return [{name: id(value) for name, value in vars(owner).items()} for owner in (Span, trace.ProxyTracer)]

    before = identities()
    installed = Installed()
    installed.install("genai-spans")
    assert identities() != before
    installed.uninstall("genai-spans")
    assert identities() == before


def test_rollouts_are_recorded_where_telemetry_is_disabled() -> None:
    program = """
        from lightning_core.testing import playground
        from lightning_core.capture import scope
        with playground(["x"], train=["a"], integrations=[]) as run:
            with scope("a"):
                pass
        assert [event.name for event in run.trace.events] == ["rollout", "a"], run.trace
    """
    subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        check=True,
        env={**os.environ, "OTEL_SDK_DISABLED": "true"},
    )
