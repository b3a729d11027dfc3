"""Reading traces of third-party instrumentations, recorded from real programs of each framework over real HTTP."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from lightning_core import Trace, rollout, trace_to_transitions, transitions_to_rows
from lightning_core.capture import outside_rollout, scope
from lightning_core.capture.spans import to_record
from lightning_core.endpoint.server import Routing
from lightning_core.otel import read_traces, spans_from_otlp, spans_to_otlp, spans_to_protobuf
from lightning_core.signals.air.tool_outcomes import tool_outcomes
from lightning_core.testing import Playground
from lightning_core.testing.contract import answer_prompt
from lightning_core.trace import Event, SpanRecord
from lightning_core.transitions import refused_calls
from tests.endpoint.serving import serve

ADD = 'use:add {"a": 1}'
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
    }
]


class Recorder:
    """A third party's tracing, in memory."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self._exporter))

    @property
    def spans(self) -> tuple[ReadableSpan, ...]:
        return self._exporter.get_finished_spans()

    @property
    def traces(self) -> list[Trace]:
        return read_traces(self.spans)

    @contextmanager
    def instrumented(self, *instrumentors: Any) -> Iterator[None]:
        for instrumentor in instrumentors:
            instrumentor.instrument(tracer_provider=self.provider)
        try:
            yield
        finally:
            for instrumentor in instrumentors:
                instrumentor.uninstrument()


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def served() -> Iterator[str]:
    """A model behind a URL, without Lightning's capture."""
    with serve(answer_prompt) as endpoint, rollout() as run:
        endpoint.open("key", run.address, Routing())
        with outside_rollout():
            yield endpoint.url
        endpoint.close("key")


def events(trace: Trace, kind: str) -> list[Event]:
    return [event for event in trace.events if event.kind == kind]


def names(trace: Trace, kind: str) -> list[str]:
    return [event.name for event in events(trace, kind)]


def inside(trace: Trace, event: Event, name: str) -> bool:
    """Whether ``event`` is inside an event of that name."""
    by_id = {e.id: e for e in trace.events}
    parent = by_id.get(event.parent or "")
    while parent is not None:
        if parent.name == name:
            return True
        parent = by_id.get(parent.parent or "")
    return False


def conversation(client: openai.OpenAI) -> None:
    """A call with a tool, the turn after it, and a streamed call."""
    messages: list[Any] = [{"role": "system", "content": "be nice"}, {"role": "user", "content": ADD}]
    answer = client.chat.completions.create(model="policy", messages=messages, tools=TOOLS, temperature=0.5)
    message = answer.choices[0].message
    assert message.tool_calls
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "2"}
    turn = [*messages, message.model_dump(exclude_none=True), result]
    client.chat.completions.create(model="policy", messages=turn, tools=TOOLS)
    list(
        client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "streamed"}], stream=True)
    )


def openinference_openai() -> Any:
    from openinference.instrumentation.openai import OpenAIInstrumentor

    return OpenAIInstrumentor()


PROGRAM = """
import sys
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SimpleSpanProcessor
from openinference.instrumentation.openai import OpenAIInstrumentor as OpenInference
from opentelemetry.instrumentation.openai import OpenAIInstrumentor as Traceloop
import openai
from tests.otel.test_otel_reading import conversation

url, path, *names = sys.argv[1:]
with open(path, "w") as file:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(ConsoleSpanExporter(out=file)))
    for name in names:
        {"openinference": OpenInference, "traceloop": Traceloop}[name]().instrument(tracer_provider=provider)
    with provider.get_tracer("program").start_as_current_span("program"), openai.OpenAI(base_url=url, api_key="key") as client:
        conversation(client)
"""


@pytest.mark.parametrize(
    "instrumentors",
    [
        pytest.param(["openinference"], marks=pytest.mark.long),
        ["traceloop"],
        pytest.param(["traceloop", "openinference"], marks=pytest.mark.long),
    ],
)
def test_the_openai_client(instrumentors: list[str], served: str, tmp_path: Path) -> None:
    """In a separate process: Traceloop's instrumentation cannot be removed."""
    path = tmp_path / "spans.json"
    subprocess.run([sys.executable, "-c", PROGRAM, served, str(path), *instrumentors], check=True, timeout=60)
    (trace,) = read_traces(path)
    first, second, streamed = trace.calls
    assert first.messages == ({"role": "system", "content": "be nice"}, {"role": "user", "content": ADD})
    assert first.response is not None
    (wish,) = first.response["tool_calls"]
    assert wish["function"]["name"] == "add"
    assert json.loads(wish["function"]["arguments"]) == {"a": 1}
    assert (first.model, first.temperature) == ("policy", 0.5)
    assert second.messages[-1] == {"role": "tool", "tool_call_id": wish["id"], "content": "2"}
    assert second.messages[2]["tool_calls"][0]["id"] == wish["id"]
    assert streamed.response == {"role": "assistant", "content": "answer to streamed"}
    assert [call.finish_reason for call in trace.calls][1:] == ["stop", "stop"]
    assert [call.agent for call in trace.calls] == [None] * 3
    (program,) = [event for event in trace.events if event.name == "program"]
    assert [call.parent for call in trace.calls] == [program.id] * 3
    assert program.parent == trace.events[0].id
    assert trace.events[0].kind == "rollout"


def test_a_graph_of_langgraph(recorder: Recorder, served: str) -> None:
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI
    from langgraph.graph import END, START, MessagesState, StateGraph
    from langgraph.prebuilt import ToolNode
    from openinference.instrumentation.langchain import LangChainInstrumentor

    @tool
    def add(a: int) -> int:
        """One more."""
        return a + 1

    model = ChatOpenAI(base_url=served, api_key="key", model="policy")  # type: ignore[arg-type]

    def planner(state: MessagesState) -> Any:
        return {"messages": [model.invoke([("user", "plan it")])]}

    def writer(state: MessagesState) -> Any:
        return {"messages": [model.bind_tools([add]).invoke([("user", ADD)])]}

    graph = StateGraph(MessagesState)
    graph.add_node(planner)
    graph.add_node(writer)
    graph.add_node("tools", ToolNode([add]))
    for edge in ((START, "planner"), ("planner", "writer"), ("writer", "tools"), ("tools", END)):
        graph.add_edge(*edge)
    with recorder.instrumented(LangChainInstrumentor()):
        graph.compile().invoke({"messages": [("user", "go")]})  # type: ignore[arg-type]
    (trace,) = recorder.traces
    assert trace.agents == ("planner", "writer")
    assert names(trace, "node") == ["planner", "writer", "tools"]
    (used,) = events(trace, "tool")
    assert (used.name, used.agent) == ("add", "tools")
    assert inside(trace, used, "tools")
    (signal,) = tool_outcomes(trace)
    assert (signal.tool, signal.call, signal.agent, signal.status) == ("add", trace.calls[1].id, "writer", "ok")


def test_an_agent_of_langchain_is_one_agent_and_watched_twice_a_call_is_one(recorder: Recorder, served: str) -> None:
    from langchain.agents import create_agent
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI
    from openinference.instrumentation.langchain import LangChainInstrumentor

    @tool
    def add(a: int) -> int:
        """One more."""
        return a + 1

    model = ChatOpenAI(base_url=served, api_key="key", model="policy")  # type: ignore[arg-type]
    with recorder.instrumented(LangChainInstrumentor(), openinference_openai()):
        create_agent(model, [add], name="adder").invoke({"messages": [("user", ADD)]})  # type: ignore[arg-type]
    watched = [s for s in recorder.spans if (s.attributes or {}).get("openinference.span.kind") == "LLM"]
    assert len(watched) == 4
    trace, *others = recorder.traces
    assert [other.calls for other in others] == [(), ()]
    assert [call.agent for call in trace.calls] == ["adder", "adder"]
    assert trace.calls[1].messages[-1]["content"] == "2"
    assert (names(trace, "tool"), names(trace, "agent")) == (["add"], ["adder"])


def test_an_agent_of_the_openai_agents_sdk(recorder: Recorder, served: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool
    from agents.tracing import set_trace_processors, set_tracing_disabled
    from openinference.instrumentation.openai_agents import OpenAIAgentsInstrumentor

    @function_tool
    def add(a: int) -> int:
        return a + 1

    async def main() -> None:
        async with openai.AsyncOpenAI(base_url=served, api_key="key") as client:
            model = OpenAIChatCompletionsModel("policy", client)
            await Runner.run(Agent(name="adder", model=model, tools=[add]), ADD)

    set_tracing_disabled(False)
    try:
        with recorder.instrumented(OpenAIAgentsInstrumentor()):
            asyncio.run(main())
    finally:
        set_trace_processors([])
    (trace,) = recorder.traces
    assert [call.agent for call in trace.calls] == ["adder", "adder"]
    assert "adder" in names(trace, "agent")
    (used,) = events(trace, "tool")
    assert (used.name, used.agent) == ("add", "adder")
    assert inside(trace, used, "adder")
    assert trace.calls[1].messages[-1]["content"] == "2"


def test_an_agent_of_autogen(recorder: Recorder, served: str) -> None:
    from autogen_agentchat.agents import AssistantAgent
    from autogen_ext.models.openai import OpenAIChatCompletionClient
    from openinference.instrumentation.autogen_agentchat import AutogenAgentChatInstrumentor

    def add(a: int) -> int:
        """One more."""
        return a + 1

    async def main() -> None:
        info: Any = {
            "vision": False,
            "function_calling": True,
            "json_output": False,
            "family": "unknown",
            "structured_output": False,
        }
        client = OpenAIChatCompletionClient(model="policy", base_url=served, api_key="key", model_info=info)
        await AssistantAgent("adder", client, tools=[add], reflect_on_tool_use=True).run(task=ADD)
        await client.close()

    with recorder.instrumented(AutogenAgentChatInstrumentor()):
        asyncio.run(main())
    (trace,) = recorder.traces
    assert [call.agent for call in trace.calls] == ["adder", "adder"]
    (used,) = events(trace, "tool")
    assert (used.name, used.agent) == ("add", "adder")
    assert inside(trace, used, "adder")
    assert trace.calls[0].response is not None
    (wish,) = trace.calls[0].response["tool_calls"]
    assert trace.calls[1].messages[-1] == {"role": "tool", "tool_call_id": wish["id"], "content": "2"}


def test_such_calls_are_transitions_that_cannot_be_trained_on(recorder: Recorder, served: str) -> None:
    tracer = recorder.provider.get_tracer("program")
    with (
        recorder.instrumented(openinference_openai()),
        openai.OpenAI(base_url=served, api_key="key") as client,
        tracer.start_as_current_span("writer", attributes={"openinference.span.kind": "AGENT"}),
    ):
        conversation(client)
    (trace,) = recorder.traces
    assert trace_to_transitions(trace, agents={"writer"}) == []
    assert len(refused_calls(trace, agents={"writer"})) == 3
    transitions = trace_to_transitions(trace, agents={"writer"}, refused=True)
    assert [t.call for t in transitions] == [call.id for call in trace.calls]
    assert all(t.refusal is not None and t.refusal.startswith("no token ids: model 'policy'") for t in transitions)
    assert [len(t.output_ids) for t in transitions] == [0, 0, 0]
    with pytest.raises(ValueError, match="cannot be trained on: no token ids"):
        transitions_to_rows(transitions)


@pytest.mark.parametrize("form", ["otlp.json", "otlp.jsonl", "otlp.pb", "console.json", "phoenix.json"])
def test_files(form: str, recorder: Recorder, served: str, tmp_path: Path) -> None:
    with recorder.instrumented(openinference_openai()), openai.OpenAI(base_url=served, api_key="key") as client:
        conversation(client)
    records = [to_record(span) for span in recorder.spans]
    path = tmp_path / form
    match form:
        case "otlp.json":
            path.write_text(json.dumps(spans_to_otlp(records), indent=2))
        case "otlp.jsonl":
            path.write_text("\n".join(json.dumps(spans_to_otlp([span])) for span in records) + "\n")
        case "otlp.pb":
            path.write_bytes(spans_to_protobuf(records))
        case "console.json":
            path.write_text("\n".join(span.to_json() for span in recorder.spans))
        case _:
            path.write_text(json.dumps({"data": [phoenix(span) for span in recorder.spans], "next_cursor": None}))
    stored, direct = read_traces(path), recorder.traces
    assert len(stored) == 3
    assert [c.messages for t in stored for c in t.calls] == [c.messages for t in direct for c in t.calls]
    assert [c.response for t in stored for c in t.calls] == [c.response for t in direct for c in t.calls]
    assert [t.rollout for t in stored] == [t.rollout for t in direct]


def phoenix(span: ReadableSpan) -> dict[str, Any]:
    """A span as Phoenix's REST API returns it: flat status, and messages as nested lists."""
    data = json.loads(span.to_json())
    attributes = data["attributes"]
    nested = [
        {"message": {"role": m["role"], "content": m["content"]}}
        for m in read_traces([span])[0].calls[0].messages
        if "tool_calls" not in m and "tool_call_id" not in m
    ]
    if len(nested) == sum(key.endswith("message.role") for key in attributes if key.startswith("llm.input")):
        attributes = {k: v for k, v in attributes.items() if not k.startswith("llm.input_messages.")}
        attributes["llm"] = {"input_messages": nested}
    return {
        "name": data["name"],
        "context": {key: value.removeprefix("0x") for key, value in data["context"].items()},
        "parent_id": None,
        "start_time": data["start_time"],
        "end_time": data["end_time"],
        "status_code": data["status"]["status_code"],
        "status_message": "",
        "attributes": attributes,
    }


def span(number: int, parent: int | None, attributes: dict[str, Any], name: str = "span") -> SpanRecord:
    return SpanRecord(
        name=name,
        trace_id="ab" * 16,
        span_id=f"{number:016x}",
        parent_id=None if parent is None else f"{parent:016x}",
        start_ns=number,
        end_ns=number + 1,
        attributes=attributes,
    )


def test_traceloops_flattened_messages() -> None:
    """The format of versions before 0.50."""
    call = {
        "llm.request.type": "chat",
        "gen_ai.request.model": "gpt",
        "gen_ai.prompt.0.role": "user",
        "gen_ai.prompt.0.content": "add",
        "gen_ai.prompt.10.role": "tool",
        "gen_ai.prompt.10.content": "2",
        "gen_ai.prompt.10.tool_call_id": "c0",
        "gen_ai.prompt.9.role": "assistant",
        "gen_ai.prompt.9.tool_calls.0.id": "c0",
        "gen_ai.prompt.9.tool_calls.0.name": "add",
        "gen_ai.prompt.9.tool_calls.0.arguments": '{"a": 1}',
        "gen_ai.completion.0.role": "assistant",
        "gen_ai.completion.0.content": "3",
        "gen_ai.completion.0.finish_reason": "stop",
    }
    (trace,) = read_traces([
        span(1, None, {"traceloop.span.kind": "workflow", "traceloop.entity.name": "flow"}),
        span(2, 1, {"traceloop.span.kind": "agent", "traceloop.entity.name": "adder"}),
        span(3, 2, {"traceloop.span.kind": "task", "traceloop.entity.name": "step"}),
        span(4, 3, call),
        span(5, 3, {"traceloop.span.kind": "tool", "traceloop.entity.name": "add", "traceloop.entity.input": "{}"}),
    ])  # fmt: skip
    (found,) = trace.calls
    function = {"name": "add", "arguments": '{"a": 1}'}
    assert found.messages == (
        {"role": "user", "content": "add"},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "c0", "type": "function", "function": function}]},
        {"role": "tool", "content": "2", "tool_call_id": "c0"},
    )
    assert found.response == {"role": "assistant", "content": "3"}
    assert (found.agent, found.model, found.finish_reason) == ("adder", "gpt", "stop")
    assert [(e.kind, e.name, e.agent) for e in trace.events[1:]] == [
        ("other", "span", None),
        ("agent", "adder", "adder"),
        ("node", "step", None),
        ("tool", "add", "adder"),
    ]


def test_genai_conventions_with_events_and_system_instructions() -> None:
    message_events = [
        {"name": "gen_ai.system.message", "content": "be nice"},
        {"name": "gen_ai.user.message", "content": "hi"},
        {"name": "gen_ai.choice", "index": 0, "finish_reason": "stop", "message": '{"content": "hello"}'},
    ]
    (trace,) = read_traces([
        span(1, None, {"gen_ai.operation.name": "invoke_agent", "gen_ai.agent.name": "greeter"}),
        span(2, 1, {"gen_ai.operation.name": "chat", "gen_ai.message_events": json.dumps(message_events)}),
        span(3, 1, {
            "gen_ai.operation.name": "chat",
            "gen_ai.system_instructions": json.dumps([{"type": "text", "content": "be nice"}]),
            "gen_ai.input.messages": json.dumps([{"role": "user", "parts": [{"type": "text", "content": "hi"}]}]),
            "gen_ai.output.messages": json.dumps([{"role": "assistant", "parts": [{"type": "text", "content": "hello"}]}]),
        }),
        span(4, 1, {"gen_ai.operation.name": "execute_tool"}, "execute_tool add"),
    ])  # fmt: skip
    for call in trace.calls:
        assert call.messages == ({"role": "system", "content": "be nice"}, {"role": "user", "content": "hi"})
        assert call.response == {"role": "assistant", "content": "hello"}
        assert call.agent == "greeter"
    assert len(trace.calls) == 2
    assert [(e.kind, e.name, e.agent) for e in trace.events[1:]] == [
        ("agent", "greeter", "greeter"),
        ("tool", "add", "greeter"),
    ]


def test_events_of_spans_come_through_otlp() -> None:
    event = {
        "name": "gen_ai.user.message",
        "timeUnixNano": "1",
        "attributes": [{"key": "content", "value": {"stringValue": "hi"}}],
    }
    document = spans_to_otlp([span(1, None, {"gen_ai.operation.name": "chat"})])
    document["resourceSpans"][0]["scopeSpans"][0]["spans"][0]["events"] = [event]
    (trace,) = read_traces(spans_from_otlp(document))
    assert trace.calls[0].messages == ({"role": "user", "content": "hi"},)


@pytest.mark.parametrize("reason", ["length", "max_tokens", "MAX_TOKENS", "model_context_window_exceeded"])
def test_a_cut_response_has_one_finish_reason_for_all_providers(reason: str) -> None:
    (trace,) = read_traces(
        [span(1, None, {"gen_ai.operation.name": "chat", "gen_ai.response.finish_reasons": (reason,)})]
    )
    assert [call.finish_reason for call in trace.calls] == ["length"]


@pytest.mark.parametrize(
    "attributes",
    [
        {"gen_ai.operation.name": "chat", "gen_ai.output.messages": "not json", "gen_ai.request.temperature": "warm"},
        {"gen_ai.operation.name": "chat", "gen_ai.input.messages": '{"role": 1}', "gen_ai.output.messages": "[3]"},
        {"gen_ai.operation.name": "chat", "gen_ai.input.messages": '[{"role": "user", "tool_calls": "x"}]'},
        {"gen_ai.operation.name": "chat", "gen_ai.input.messages": '[{"tool_calls": [{"function": "f"}]}]'},
        {"gen_ai.operation.name": "chat", "gen_ai.response.finish_reasons": "stop"},
        {"openinference.span.kind": "LLM", "llm.invocation_parameters": "[]", "llm.input_messages.x.y": 1},
        {"openinference.span.kind": "LLM", "llm.input_messages.0.message": "plain", "llm.token_count.prompt": "many"},
        {"openinference.span.kind": "LLM", "llm.output_messages.0.message.tool_calls.0.tool_call.function": "f"},
        {"openinference.span.kind": "TOOL", "output.value": '{"data": 3}'},
        {"gen_ai.prompt.0": "plain", "gen_ai.completion.0.tool_calls.0": "x"},
        {"gen_ai.operation.name": "reward", "lightning.task.id": None, "lightning.policy_version": 3},
    ],
)
def test_what_others_write_wrongly_costs_no_more_than_itself(attributes: dict[str, Any]) -> None:
    (trace,) = read_traces([span(1, None, {k: v for k, v in attributes.items() if k != "lightning.task.id"})])
    assert len(trace.calls) + len(trace.events) == 2
    tool_outcomes(trace)
    assert trace.rewards == ()
    assert all(call.policy_version is None for call in trace.calls)


def test_a_span_that_is_its_own_ancestor() -> None:
    (trace,) = read_traces([span(1, 2, {}), span(2, 1, {"gen_ai.operation.name": "chat"})])
    assert len(trace.calls) == 1


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[1]", r"expected a JSON object or a list of them, found 1"),
        ("{", r"Expecting property name"),
        ('{"context": {}}', r"not a span in JSON, KeyError 'trace_id'"),
        ('{"a": 1}', r"expected OTLP/JSON with a list 'resourceSpans', found the keys \['a'\]"),
    ],
)
def test_files_that_hold_no_traces(text: str, expected: str, tmp_path: Path) -> None:
    path = tmp_path / "spans.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=expected) as caught:
        read_traces(path)
    assert str(path) in str(caught.value)


def test_a_last_line_that_is_cut_is_left_out_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lines = [json.dumps(spans_to_otlp([span(n, None, {"a": "é" * n})]), ensure_ascii=False).encode() for n in (1, 2)]
    path = tmp_path / "traces.jsonl"
    for size in (1, lines[1].index("é".encode()) + 1, len(lines[1]) - 1):
        path.write_bytes(lines[0] + b"\n" + lines[1][:size])
        assert len(read_traces(path)) == 1
        assert caplog.messages.pop() == f"{str(path)!r}: line 2, the last, is cut after {size} bytes; it is left out"
        caplog.clear()
    path.write_bytes(lines[0] + b"\n" + lines[0])
    assert len(read_traces(path)) == 1
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("damage", "expected"), [(b'{"a": "\xe9"}', "UTF-8, found on line 2"), (b'{"a', "line 2 column")]
)
def test_damage_before_the_last_line_is_an_error_with_its_line(damage: bytes, expected: str, tmp_path: Path) -> None:
    line = json.dumps(spans_to_otlp([span(1, None, {})])).encode()
    path = tmp_path / "traces.jsonl"
    path.write_bytes(b"\n".join([line, damage, line, b""]))
    with pytest.raises(ValueError, match=expected):
        read_traces(path)


def test_their_tracing_and_ours_do_not_affect_each_other(recorder: Recorder, playground: Playground) -> None:
    def talk() -> None:
        with openai.OpenAI(api_key="sk-own") as client:
            conversation(client)

    with playground.rollout() as alone, scope("writer"):
        talk()
    tracer = recorder.provider.get_tracer("program")
    with (
        recorder.instrumented(openinference_openai()),
        playground.rollout() as run,
        scope("writer"),
        tracer.start_as_current_span("program"),
    ):
        talk()
    assert shape(run.trace) == shape(alone.trace)
    assert [call.agent for call in run.trace.calls] == ["writer"] * 3
    (theirs,) = recorder.traces
    assert len(theirs.calls) == 3
    assert theirs.rollout != run.rollout


def shape(trace: Trace) -> list[Any]:
    return [(c.agent, c.messages[0], c.context) for c in trace.calls] + [(e.kind, e.name) for e in trace.events]
