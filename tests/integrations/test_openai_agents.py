"""The OpenAI Agents SDK: the contract suite, and tests of its own agents."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import json
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from agents import (
    Agent,
    AgentHooks,
    GuardrailFunctionOutput,
    Handoff,
    InputGuardrail,
    InputGuardrailTripwireTriggered,
    MaxTurnsExceeded,
    Model,
    ModelBehaviorError,
    ModelProvider,
    OutputGuardrail,
    OutputGuardrailTripwireTriggered,
    RunConfig,
    Runner,
    TracingProcessor,
    UserError,
    function_tool,
    handoff,
    set_trace_processors,
    set_tracing_disabled,
)
from agents.mcp import MCPServerStdio
from pydantic import BaseModel

from lightning_core import reward, trainable
from lightning_core.capture import current_address
from lightning_core.capture.mark import get_mark
from lightning_core.errors import ConfigError
from lightning_core.signals.air.tool_outcomes import tool_outcomes
from lightning_core.testing import tool_call
from lightning_core.testing.contract import (
    AgentSpec,
    HostAdapter,
    IntegrationContract,
    ancestors,
    run_async,
    user_message,
)
from tests.integrations.combinations import combined
from tests.integrations.sdk_programs import (
    HOWS,
    QUIET,
    Answer,
    Delegate,
    add,
    cast,
    chat_model,
    first,
    make,
    path,
    run,
    speakers,
    tools,
)

INTEGRATION = "openai-agents"
SYNC_IS_LONG = [pytest.param(how, marks=[pytest.mark.long] if how == "run_sync" else []) for how in HOWS]
"""``run_sync`` is ``run`` in a loop of its own; the contract and ``test_openai_agents_neighbours.py`` have it in the short form."""


class FailsAtItsEnd(AgentHooks[Any]):
    """Raises what a part specifies after its model call."""

    def __init__(self, part: AgentSpec) -> None:
        self.part = part

    async def on_end(self, context: Any, agent: Any, output: Any) -> None:
        if self.part.error is not None:
            raise self.part.error


class OpenAIAgentsAdapter(HostAdapter):
    """Every part is an agent with its own run."""

    integration = "openai-agents"
    host = "agents"

    def build(self, parts: Sequence[AgentSpec], *, parallel: bool = False, base_url: str | None = None) -> Any:
        return parallel, [(self.make_agent(part, base_url), part.text) for part in parts]

    def make_agent(self, part: AgentSpec, base_url: str | None) -> Agent[Any]:
        inner = (self.make_agent(part.inner, base_url), part.inner.text) if part.inner else ()
        agent = Agent[Any](
            name=part.name,
            model=Delegate(chat_model(base_url), *inner),
            tools=[add] if part.tool else [],
            hooks=FailsAtItsEnd(part),
        )
        return trainable(agent, name=part.name) if part.marked else agent

    def run(self, program: Any) -> None:
        parallel, runs = program
        with ThreadPoolExecutor(len(runs) if parallel else 1) as pool:
            work = [pool.submit(Runner.run_sync, *run, run_config=QUIET) for run in runs]
            for future in work:
                future.result()

    async def arun(self, program: Any) -> None:
        await self.each(program, lambda run: Runner.run(*run, run_config=QUIET))

    def stream(self, program: Any) -> None:
        run_async(self.astream(program))

    async def astream(self, program: Any) -> None:
        async def consume(run: Any) -> None:
            result = Runner.run_streamed(*run, run_config=QUIET)
            assert [event async for event in result.stream_events()]

        await self.each(program, consume)

    async def each(self, program: Any, start: Any) -> None:
        parallel, runs = program
        if parallel:
            await asyncio.gather(*map(start, runs))
        else:
            for run in runs:
                await start(run)

    def patched_call(self) -> tuple[Any, str]:
        from agents.run import AgentRunner

        return AgentRunner, "_run_impl"


class TestOpenAIAgents(IntegrationContract):
    distribution = "lightning-rl"
    adapter = OpenAIAgentsAdapter()


@pytest.fixture(autouse=True)
def _installed(request: pytest.FixtureRequest) -> None:
    if request.cls is not TestOpenAIAgents:
        request.getfixturevalue("installed")


def test_private_api() -> None:
    """The private functions that are wrapped exist with the expected signatures."""
    import agents.run
    import agents.tool
    from agents.run_internal import run_loop, tool_execution, turn_resolution

    for place, asynchronous, parameters in (
        (agents.run.AgentRunner._run_impl, True, ["self", "starting_agent"]),
        (agents.run.start_streaming, True, ["starting_input", "streamed_result"]),
        (run_loop.run_single_turn, True, ["bindings"]),
        (run_loop.run_single_turn_streamed, True, ["streamed_result", "bindings"]),
        (turn_resolution.resolve_interrupted_turn, True, ["bindings"]),
        (tool_execution._FunctionToolBatchExecutor._execute_single_tool_body, True, ["func_tool", "tool_call"]),
        (agents.tool.maybe_invoke_function_tool_failure_error_function, True, ["error"]),
        (run_loop.get_response_with_retry, True, ["get_response"]),
        (tool_execution.function_needs_approval, True, ["function_tool"]),
        (run_loop.maybe_filter_model_input, True, ["run_config"]),
        (run_loop.prepare_input_with_session, True, ["input", "session", "session_input_callback"]),
        (run_loop.save_result_to_session, True, ["session"]),
        (run_loop.get_handoffs, True, ["agent"]),
        (run_loop.gather_with_cancel, True, []),
        (turn_resolution.execute_handoffs, True, ["public_agent", "run_handoffs"]),
        (turn_resolution.process_model_response, False, ["all_tools", "response", "handoffs"]),
    ):
        assert inspect.iscoroutinefunction(place) is asynchronous, place
        signature = inspect.signature(place).parameters
        assert set(parameters) <= set(signature), place
        # Arguments that are not passed by name are at the expected position.
        for index, name in enumerate(parameters):
            assert signature[name].kind is inspect.Parameter.KEYWORD_ONLY or list(signature)[index] == name, place
    assert "get_stream" in inspect.signature(run_loop.stream_response_with_retry).parameters
    assert {"_agent_ref", "on_invoke_handoff"} <= {field.name for field in dataclasses.fields(Handoff)}
    assert make("inner").as_tool("ask", "asks")._agent_instance.name == "inner"


# What can be marked


@pytest.mark.parametrize("how", SYNC_IS_LONG)
def test_a_marked_agent_is_still_an_agent(how: str) -> None:
    agent = make("Writer")
    marked = trainable(agent, name="writer")
    assert isinstance(marked, Agent)
    assert (marked is not agent, marked.name, type(marked).__name__) == (True, "Writer", "Agent")
    assert get_mark(agent) is None
    with cast({"Writer": "ok", "Scribe": "ok"}) as playground, playground.rollout() as rollout:
        run(marked, "original", how)
        run(marked.clone(instructions="Scribe"), "clone", how)
        run(dataclasses.replace(marked, name="Another"), "replaced", how)
        run(agent, "unmarked", how)
    assert speakers(rollout.trace) == ["writer", "writer", "writer", "Writer"]
    assert [event.kind for event in rollout.trace.events] == ["rollout", "agent", "agent", "agent", "node"]


def test_only_agents_can_be_marked() -> None:
    with pytest.raises(ConfigError, match=r"expected an agents\.Agent"):
        trainable(add, name="add")
    with pytest.raises(ConfigError, match=r"expected an agents\.Agent"):
        trainable(add, agents=["add"])


def make_school() -> Agent[Any]:
    """Triage hands off to Math and History, both hand back; Math has an Assistant as a tool, which can hand off to a Clerk."""
    clerk = make("Clerk")
    assistant = make("Assistant", handoffs=[clerk])
    math = make("Math", tools=[assistant.as_tool("assist", "Helps.")])
    history = make("History")
    triage = make("Triage", handoffs=[math, handoff(history, tool_name_override="ask_history")])
    math.handoffs = [triage]
    history.handoffs = [handoff(triage)]
    return triage


def triage(prompt: str) -> str:
    if "<tool_response>\n4" in prompt:
        return "Done"
    return tool_call("ask_history" if "when?" in prompt else "transfer_to_math")


SCHOOL: dict[str, Answer] = {
    "Triage": triage,
    "Math": lambda prompt: (
        tool_call("transfer_to_triage") if "<tool_response>\n4" in prompt else tool_call("assist", input="2 + 2")
    ),
    "Assistant": tool_call("transfer_to_clerk"),
    "Clerk": "4",
    "History": "In 1789.",
}


@pytest.mark.parametrize("how", SYNC_IS_LONG)
def test_agents_of_a_graph_by_name(how: str) -> None:
    original = make_school()
    marked = trainable(original, agents=["Math", "History", "Clerk"])
    with cast(SCHOOL) as playground:
        with playground.rollout() as one:
            run(marked, "what is 2 + 2?", how)
        with playground.rollout() as two:
            result = run(marked, "when?", how)
        with playground.rollout() as three:
            run(original, "when?", how)
    kinds = {event.name: event.kind for event in one.trace.events}
    assert speakers(one.trace) == ["Triage", "Math", "Assistant", "Clerk", "Math", "Triage"]
    assert {name for name, kind in kinds.items() if kind == "agent"} == {"Math", "Clerk"}
    assert path(one.trace, one.trace.calls[3]) == ["Clerk", "assist", "Math", "rollout"]
    assert [event.kind for event in two.trace.events if event.name == "History"] == ["agent"]
    assert get_mark(result.last_agent) is not None  # a conversation continues with its last agent
    assert [event.kind for event in three.trace.events if event.name == "History"] == ["node"]


def test_unknown_agents_of_a_graph_are_an_error() -> None:
    with pytest.raises(
        ConfigError, match=r"no agent named 'Maths'; the agents are \['Assistant', 'Clerk', 'History', 'Math',"
    ):
        trainable(make_school(), agents=["Maths"])
    with pytest.raises(ConfigError, match="already marked as 'prof'"):
        trainable(make("Triage", handoffs=[trainable(make("Math"), name="prof")]), agents=["Math"])


# Handoffs and nesting


@pytest.mark.parametrize("how", SYNC_IS_LONG)
def test_a_handoff(how: str) -> None:
    target = make("History")
    start = make("Triage", handoffs=[handoff(target)])
    script: dict[str, Answer] = {"Triage": tool_call("transfer_to_history"), "History": "In 1789."}
    with cast(script) as playground, playground.rollout(train=["Triage"]) as rollout:
        run(start, "when?", how)
    trace = rollout.trace
    assert speakers(trace) == ["Triage", "History"]
    assert [path(trace, call) for call in trace.calls] == [["Triage", "rollout"], ["History", "rollout"]]
    (event,) = tools(trace)
    assert ancestors(trace, event) == ["transfer_to_history", "Triage", "rollout"]
    assert (event.attributes["lightning.handoff.from"], event.attributes["lightning.handoff.to"]) == (
        "Triage",
        "History",
    )
    (signal,) = tool_outcomes(trace)
    assert (signal.tool, signal.call, signal.status) == ("transfer_to_history", trace.calls[0].id, "ok")


def test_a_handoff_that_fails() -> None:
    def refuse(context: Any) -> None:
        raise PermissionError("not today")

    start = make("Triage", handoffs=[handoff(make("History"), on_handoff=refuse)])
    with (
        cast({"Triage": tool_call("transfer_to_history")}) as playground,
        pytest.raises(PermissionError),
        playground.rollout() as rollout,
    ):
        run(start, "when?")
    assert [event.error for event in tools(rollout.trace)] == ["PermissionError: not today"]
    assert rollout.trace.events[1].error == "PermissionError: not today"


@pytest.mark.parametrize("how", SYNC_IS_LONG)
def test_a_stay_is_one_event_with_any_number_of_calls(how: str) -> None:
    agent = make("Writer", tools=[add])
    turns = iter([tool_call("add", a=1, b=2), tool_call("add", a=3, b=4), "7"])
    with cast({"Writer": lambda prompt: next(turns)}) as playground, playground.rollout() as rollout:
        run(agent, "add", how)
    assert [event.name for event in rollout.trace.events] == ["rollout", "Writer", "add", "add"]
    assert len({call.parent for call in rollout.trace.calls}) == 1
    assert current_address() is None


@pytest.mark.parametrize("how", SYNC_IS_LONG)
def test_agents_as_parallel_tools(how: str) -> None:
    """The calls of each inner agent are children of its tool, and belong to that agent."""
    names = ["Spanish", "French", "German"]
    translators = [trainable(make(name), name=name.lower()) for name in names]
    agent = make("Desk", tools=[t.as_tool(f"to_{t.name.lower()}", "Translates.") for t in translators])
    wishes = "".join(tool_call(f"to_{name.lower()}", input=f"{name}: hi") for name in names)
    with (
        cast({"Desk": first(wishes, "Done"), **dict.fromkeys(names, "Hola")}, delay=0.01) as playground,
        playground.rollout() as rollout,
    ):
        run(agent, "translate", how)
    trace = rollout.trace
    assert sorted(map(str, speakers(trace))) == ["Desk", "Desk", "french", "german", "spanish"]
    for call in trace.calls:
        if call.agent != "Desk":
            assert user_message(call).lower() == f"{call.agent}: hi"
            assert path(trace, call) == [call.agent, f"to_{call.agent}", "Desk", "rollout"]


def test_max_turns_is_the_agents_failure() -> None:
    with (
        cast({"Writer": tool_call("add", a=1, b=2)}) as playground,
        pytest.raises(MaxTurnsExceeded),
        playground.rollout() as rollout,
    ):
        run(make("Writer", tools=[add]), "add", max_turns=2)
    assert len(rollout.trace.calls) == 2
    assert "MaxTurnsExceeded" in str(rollout.trace.events[1].error)


# Tools


@pytest.mark.parametrize("how", SYNC_IS_LONG)
def test_a_tool_that_does_not_exist_ends_the_run(how: str) -> None:
    with (
        cast({"Writer": tool_call("multiply", a=2)}) as playground,
        pytest.raises(ModelBehaviorError),
        playground.rollout() as rollout,
    ):
        run(make("Writer", tools=[add]), "multiply", how)
    (event,) = tools(rollout.trace)
    assert (event.name, event.agent) == ("multiply", "Writer")
    assert "not found in agent Writer" in str(event.error)
    assert [signal.status for signal in tool_outcomes(rollout.trace)] == ["error"]


def test_an_unknown_tool_is_reported_to_the_model() -> None:
    config = RunConfig(tracing_disabled=True, tool_not_found_behavior="return_error_to_model")
    with cast({"Writer": first(tool_call("multiply", a=2), "Sorry")}) as playground, playground.rollout() as rollout:
        run(make("Writer", tools=[add]), "multiply", run_config=config)
    assert [(event.name, event.error) for event in tools(rollout.trace)] == [
        ("multiply", "there is no tool 'multiply'")
    ]
    assert len(rollout.trace.calls) == 2


def test_how_tools_fail() -> None:
    @function_tool(failure_error_function=None)
    def strict() -> str:
        raise RuntimeError("out of order")

    @function_tool(timeout=0.01)
    async def slow() -> str:
        await asyncio.sleep(60)
        return "never"

    with (
        cast({"Writer": first(tool_call("slow"), "Sorry"), "Editor": tool_call("strict")}) as playground,
        playground.rollout() as rollout,
    ):
        run(make("Writer", tools=[slow]), "wait")
        with pytest.raises(UserError, match="out of order"):
            run(make("Editor", tools=[strict]), "fail")
    errors = [event.error for event in tools(rollout.trace)]
    assert errors == ["Tool 'slow' timed out after 0.01 seconds.", "RuntimeError: out of order"]


def test_a_run_that_waits_for_approval_and_continues() -> None:
    @function_tool(needs_approval=True)
    def send(text: str) -> str:
        return "sent"

    agent = make("Writer", tools=[send])
    with cast({"Writer": first(tool_call("send", text="hi"), "Done")}) as playground, playground.rollout() as rollout:
        waiting = run(agent, "send it")
        assert not tools(rollout.trace)
        state = waiting.to_state()
        state.approve(waiting.interruptions[0])
        assert run(agent, state).final_output == "Done"
    assert speakers(rollout.trace) == ["Writer", "Writer"]
    (event,) = tools(rollout.trace)
    assert (event.error, event.agent) == (None, "Writer")
    assert ancestors(rollout.trace, event) == ["send", "Writer", "rollout"]


CALCULATOR = """
import sys

try:
    from mcp.server.mcpserver import MCPServer
except ImportError:
    from mcp.server.fastmcp import FastMCP as MCPServer

server = MCPServer("calculator")


@server.tool()
def divide(a: int, b: int) -> int:
    return a // b


server.run()
"""


@pytest.mark.parametrize("divisor", [pytest.param(2, marks=pytest.mark.long), 0])
def test_tools_of_an_mcp_server(divisor: int) -> None:
    """A server in a separate process, over standard input and output. Its failure is a result for the SDK."""

    async def work() -> None:
        async with MCPServerStdio({"command": sys.executable, "args": ["-c", CALCULATOR]}) as server:
            await Runner.run(make("Solver", mcp_servers=[server]), "8 / 2", run_config=QUIET)

    with (
        cast({"Solver": first(tool_call("divide", a=8, b=divisor), "4")}) as playground,
        playground.rollout() as rollout,
    ):
        run_async(work())
    assert speakers(rollout.trace) == ["Solver", "Solver"]
    (signal,) = tool_outcomes(rollout.trace)
    assert (signal.tool, signal.call, signal.arguments) == (
        "divide",
        rollout.trace.calls[0].id,
        json.dumps({"a": 8, "b": divisor}),
    )
    if divisor:
        assert signal.status == "ok"
    else:
        assert (signal.status, "Error executing tool" in str(signal.error)) == ("error", True)


# Guardrails


class Verdict(BaseModel):
    is_homework: bool


def make_guardrail(**settings: Any) -> InputGuardrail[Any]:
    guard = make("Guard", output_type=Verdict)

    async def homework(context: Any, agent: Any, text: Any) -> GuardrailFunctionOutput:
        verdict = (await Runner.run(guard, text, run_config=QUIET)).final_output
        return GuardrailFunctionOutput(verdict, tripwire_triggered=verdict.is_homework)

    return InputGuardrail(guardrail_function=homework, **settings)


# In the short form: all four kinds of guardrail, two of them streamed.
@pytest.mark.parametrize(
    ("trips", "parallel", "how"),
    [
        pytest.param(trips, parallel, how, marks=[] if how == ("run", "run_streamed")[trips] else [pytest.mark.long])
        for trips in (True, False)
        for parallel in (True, False)
        for how in HOWS
    ],
)
def test_an_input_guardrail(how: str, parallel: bool, trips: bool) -> None:
    """Its agent is a child of the guardrail, not the guarded agent."""
    agent = trainable(make("Tutor", input_guardrails=[make_guardrail(run_in_parallel=parallel)]), name="tutor")
    verdict = Verdict(is_homework=trips).model_dump_json()
    with cast({"Guard": verdict, "Tutor": "Think."}) as playground, playground.rollout() as rollout:
        try:
            run(agent, "solve", how)
        except InputGuardrailTripwireTriggered:
            assert trips
    trace = rollout.trace
    (guard,) = [call for call in trace.calls if "Guard" in str(call.messages[0]["content"])]
    assert guard.agent == "Guard"
    assert path(trace, guard) == ["Guard", "homework", "rollout"]
    (event,) = [event for event in trace.events if event.name == "homework"]
    assert (event.attributes["lightning.guardrail.triggered"], event.error) == (trips, None)
    answers = [call for call in trace.calls if call is not guard]
    assert all((call.agent, path(trace, call)) == ("tutor", ["tutor", "rollout"]) for call in answers)
    if not (parallel and trips):  # a parallel guardrail may stop the run after a model request
        assert len(answers) == (not trips)


@pytest.mark.parametrize("how", SYNC_IS_LONG)
def test_an_output_guardrail(how: str) -> None:
    def polite(context: Any, agent: Any, output: Any) -> GuardrailFunctionOutput:
        return GuardrailFunctionOutput(None, tripwire_triggered="please" not in output)

    agent = make("Tutor", output_guardrails=[OutputGuardrail(polite)])
    with (
        cast({"Tutor": "No."}) as playground,
        pytest.raises(OutputGuardrailTripwireTriggered),
        playground.rollout() as rollout,
    ):
        run(agent, "solve", how)
    events = {event.name: event for event in rollout.trace.events}
    assert events["polite"].attributes["lightning.guardrail.triggered"] is True
    assert "OutputGuardrailTripwireTriggered" in str(events["Tutor"].error)


# The SDK's own


class Spans(TracingProcessor):
    """Records the names of the agents in the SDK's own spans."""

    def __init__(self) -> None:
        self.agents: list[str] = []

    def on_span_start(self, span: Any) -> None:
        if span.span_data.type == "agent":
            self.agents.append(span.span_data.name)

    def on_span_end(self, span: Any) -> None: ...
    def on_trace_start(self, trace: Any) -> None: ...
    def on_trace_end(self, trace: Any) -> None: ...
    def shutdown(self) -> None: ...
    def force_flush(self) -> None: ...


@pytest.mark.parametrize("how", SYNC_IS_LONG)
def test_the_sdks_own_tracing_is_not_needed_and_not_changed(how: str) -> None:
    recorded: list[Any] = []
    agent = make("Triage", handoffs=[make("Math", tools=[add])])
    script: dict[str, Answer] = {
        "Triage": tool_call("transfer_to_math"),
        "Math": lambda prompt: "3" if "<tool_response>\n3" in prompt else tool_call("add", a=1, b=2),
    }
    processor = Spans()
    set_trace_processors([processor])
    for disabled in (False, True):
        set_tracing_disabled(disabled)
        try:
            with cast(script) as playground, playground.rollout() as rollout:
                run(agent, "what is 1 + 2?", how, run_config=RunConfig())
        finally:
            set_tracing_disabled(False)
            set_trace_processors([] if disabled else [processor])
        recorded.append([(event.kind, event.name, event.error) for event in rollout.trace.events])
    assert recorded[0] == recorded[1]
    assert [name for _, name, _ in recorded[0]] == ["rollout", "Triage", "transfer_to_math", "Math", "add"]
    assert processor.agents == ["Triage", "Math"]


class Provider(ModelProvider):
    def get_model(self, model_name: str | None) -> Model:
        return Delegate(chat_model())


MODELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "a third party's model": (Delegate(chat_model()), {}),
    "no model, another provider": (None, {"model_provider": Provider()}),
    "the SDK's default API": ("gpt-4o", {}),
    "several providers": ("openai/gpt-4o", {}),
    "the run's model instead": (chat_model(), {"model": "gpt-4o"}),
    "no model at all": (None, {}),
}


@pytest.mark.parametrize(("kind", "how"), combined(list(MODELS), ["run", "run_streamed"]))
def test_models(monkeypatch: pytest.MonkeyPatch, how: str, kind: str) -> None:
    model, settings = MODELS[kind]
    monkeypatch.setenv("OPENAI_API_KEY", "sk-of-the-agent")
    agent = trainable(make("Writer", model=model, tools=[add]), name="writer")
    config = RunConfig(tracing_disabled=True, **settings)
    with cast({"Writer": first(tool_call("add", a=1, b=2), "3")}) as playground, playground.rollout() as rollout:
        assert run(agent, "1 + 2?", how, run_config=config).final_output == "3"
    assert speakers(rollout.trace) == ["writer", "writer"]
    assert [event.attributes["gen_ai.tool.call.result"] for event in tools(rollout.trace)] == ["3"]
    assert [signal.status for signal in tool_outcomes(rollout.trace)] == ["ok"]
    assert user_message(rollout.trace.calls[0]) == "1 + 2?"


# Programs


def test_rewards_reach_the_call_that_is_meant(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two questions, one through a tool: five calls of three agents with structured outputs and the SDK's own model."""

    class Solution(BaseModel):
        answer: str

    monkeypatch.setenv("OPENAI_API_KEY", "sk-of-the-agent")
    math = Agent(name="MathAgent", instructions="Math", tools=[add], output_type=Solution)
    history = Agent(name="HistoryAgent", instructions="History", output_type=Solution)
    triage = Agent(name="TriageAgent", instructions="Triage", handoffs=[math, history])
    script: dict[str, Answer] = {
        "Triage": lambda prompt: tool_call("transfer_to_mathagent" if "+" in prompt else "transfer_to_historyagent"),
        "Math": lambda prompt: '{"answer": "3"}' if "<tool_response>\n3" in prompt else tool_call("add", a=1, b=2),
        "History": '{"answer": "1789"}',
    }
    with cast(script) as playground, playground.rollout(train=["MathAgent", "HistoryAgent"]) as rollout:
        three = run(triage, "What is 1 + 2?")
        reward(1.0, call=three.raw_responses[1].response_id)
        year = run(triage, "When was the revolution?")
        reward(0.5, agent="HistoryAgent")
    assert (three.final_output, year.final_output) == (Solution(answer="3"), Solution(answer="1789"))
    assert speakers(rollout.trace) == ["TriageAgent", "MathAgent", "MathAgent", "TriageAgent", "HistoryAgent"]
    given = [(one.value, one.call, one.agent) for one in rollout.trace.rewards]
    assert given == [(1.0, rollout.trace.calls[1].id, None), (0.5, None, "HistoryAgent")]
