"""LangGraph: the contract suite, and tests of graphs."""

from __future__ import annotations

import inspect
import operator
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from typing import Annotated, Any, TypedDict

import pytest
from langchain.agents import create_agent
from langchain_core.messages import HumanMessage
from langchain_core.runnables import RunnableLambda
from langchain_core.tools import tool
from langgraph._internal._constants import CONFIG_KEY_CHECKPOINTER
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.errors import GraphBubbleUp
from langgraph.func import entrypoint, task
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.graph.state import CompiledStateGraph
from langgraph.prebuilt import ToolNode, ToolRuntime
from langgraph.pregel import Pregel
from langgraph.types import Command, PregelExecutableTask, RetryPolicy, Send, interrupt

from lightning_core import trainable
from lightning_core.capture.integration import Installed
from lightning_core.errors import ConfigError
from lightning_core.testing import Playground
from lightning_core.testing.contract import (
    ADD_PROMPT,
    AgentSpec,
    HostAdapter,
    IntegrationContract,
    ancestors,
    parent_of,
    user_message,
)
from lightning_core.transitions import discarded_calls, trace_to_transitions
from tests.integrations.combinations import combined
from tests.integrations.runnables import add, chat_model, run_runnable

INTEGRATION = "langgraph"


class State(TypedDict):
    said: Annotated[list[str], operator.add]


class LangGraphAdapter(HostAdapter):
    """Every part is a node with a sync or async function, since LangGraph runs both kinds."""

    integration = "langgraph"
    host = "langgraph"

    def build(self, parts: Sequence[AgentSpec], *, parallel: bool = False, base_url: str | None = None) -> Any:
        graph = StateGraph(State)
        for part in parts:
            graph.add_node(part.name, self.make_node(part, base_url))
        edges = [(START, part.name) for part in parts]
        if not parallel:
            edges = list(zip([START, *(p.name for p in parts)], [p.name for p in parts], strict=False))
        for edge in edges:
            graph.add_edge(*edge)
        return graph.compile()

    def make_node(self, part: AgentSpec, base_url: str | None) -> Any:
        model = chat_model(base_url)
        agent = create_agent(model, [add]) if part.tool else None
        inner = self.build([part.inner], base_url=base_url) if part.inner else None
        messages = [HumanMessage(part.text)]

        def run(state: State) -> State:
            if agent is not None:
                agent.invoke({"messages": messages})
            else:
                model.invoke(messages)
            if inner is not None:
                inner.invoke({"said": []})
            if part.error is not None:
                raise part.error
            return {"said": [part.name]}

        async def arun(state: State) -> State:
            if agent is not None:
                await agent.ainvoke({"messages": messages})
            else:
                await model.ainvoke(messages)
            if inner is not None:
                await inner.ainvoke({"said": []})
            if part.error is not None:
                raise part.error
            return {"said": [part.name]}

        if part.marked:
            return RunnableLambda(trainable(part.name)(run), trainable(part.name)(arun))
        return RunnableLambda(run, arun)

    def run(self, program: Any) -> None:
        program.invoke({"said": []})

    async def arun(self, program: Any) -> None:
        await program.ainvoke({"said": []})

    def stream(self, program: Any) -> None:
        assert list(program.stream({"said": []}, stream_mode=["messages", "updates"]))

    async def astream(self, program: Any) -> None:
        assert [chunk async for chunk in program.astream({"said": []}, stream_mode=["messages", "updates"])]

    def patched_call(self) -> tuple[Any, str]:
        import langgraph.pregel._runner as runner

        return runner, "run_with_retry"


class TestLangGraph(IntegrationContract):
    distribution = "lightning-rl"
    adapter = LangGraphAdapter()


def one_node(name: str, node: Any) -> StateGraph[Any]:
    graph = StateGraph(MessagesState)
    graph.add_node(name, node)
    graph.add_edge(START, name)
    return graph


HELLO: Any = {"messages": [HumanMessage("hello")]}


def speak(state: MessagesState) -> Any:
    return {"messages": [chat_model().invoke("hello")]}


async def aspeak(state: MessagesState) -> Any:
    return {"messages": [await chat_model().ainvoke("hello")]}


def test_private_api() -> None:
    """The private functions that are wrapped exist with the expected signatures."""
    import langgraph.pregel._runner as runner

    for function, is_async in ((runner.run_with_retry, False), (runner.arun_with_retry, True)):
        assert next(iter(inspect.signature(function).parameters)) == "task"
        assert inspect.iscoroutinefunction(function) is is_async
    assert {"name", "config", "id"} <= {f.name for f in fields(PregelExecutableTask)}
    assert CONFIG_KEY_CHECKPOINTER == "__pregel_checkpointer"
    assert list(inspect.signature(ToolNode._validate_tool_call).parameters) == ["self", "call"]
    assert issubclass(GraphBubbleUp, Exception)


# What can be marked


def make_markable() -> dict[str, Any]:
    graph = StateGraph(MessagesState)
    graph.add_node("anything", speak)
    graph.add_edge(START, "anything")
    return {
        "function": speak,
        "async function": aspeak,
        "lambda": RunnableLambda(speak, aspeak),
        "chain": RunnableLambda(lambda s: s["messages"]) | chat_model() | (lambda m: {"messages": [m]}),
        "agent": create_agent(chat_model(), []),
        "graph": graph.compile(),
    }


@pytest.mark.parametrize(
    ("integration", "how", "kind"),
    combined(
        [True, False],
        ["invoke", "ainvoke", "stream", "astream", "batch", "abatch", "astream_events"],
        list(make_markable()),
        where=lambda integration, how, kind: kind != "async function" or how.startswith("a"),
    ),
)
def test_marked_nodes(
    request: pytest.FixtureRequest, playground: Playground, kind: str, how: str, integration: bool
) -> None:
    program = one_node("node", trainable(make_markable()[kind], name="writer")).compile()
    if integration:
        request.getfixturevalue("installed")
    with playground.rollout() as run:
        run_runnable(program, how, HELLO)
    calls = run.trace.calls
    assert [call.agent for call in calls] == ["writer"] * (2 if "batch" in how else 1)
    path = ancestors(run.trace, parent_of(run.trace, calls[0]))
    assert path.count("writer") == 1
    assert path[-1] == "rollout"
    assert ("node" in path) is integration


def test_a_marked_graph_is_still_a_graph(playground: Playground) -> None:
    graph = one_node("node", speak).compile(checkpointer=InMemorySaver(), name="talk")
    marked = trainable(graph, name="writer")
    assert isinstance(marked, CompiledStateGraph)
    assert isinstance(marked, Pregel)
    assert marked is not graph
    assert marked.get_graph().nodes.keys() == graph.get_graph().nodes.keys()
    thread: Any = {"configurable": {"thread_id": "1"}}
    with playground.rollout() as run:
        marked.with_config(tags=["later"]).invoke(HELLO, thread)
        graph.invoke(HELLO, {"configurable": {"thread_id": "2"}})
    assert [call.agent for call in run.trace.calls] == ["writer", None]
    assert len(marked.get_state(thread).values["messages"]) == 2


def test_a_marked_subgraph_streams_and_is_found(playground: Playground) -> None:
    inner = trainable(one_node("inner", speak).compile(), name="writer")
    outer = one_node("outer", inner).compile()
    assert [name for name, _ in outer.get_subgraphs()] == ["outer"]
    with playground.rollout():
        namespaces = [namespace for namespace, _ in outer.stream(HELLO, subgraphs=True)]
    assert any(namespace and namespace[0].startswith("outer") for namespace in namespaces)


@pytest.mark.parametrize("compiled", [True, False])
def test_parts_of_a_graph(playground: Playground, compiled: bool) -> None:
    builder = StateGraph(MessagesState)
    for name in ("writer", "critic", "rewriter"):
        builder.add_node(name, speak)
    builder.add_edge(START, "writer").add_edge("writer", "critic").add_edge("critic", "rewriter")
    if compiled:
        graph = trainable(builder.compile(), agents=["writer", "rewriter"])
    else:
        graph = trainable(builder, agents=["writer", "rewriter"]).compile()
    with playground.rollout() as run:
        graph.invoke(HELLO)
        builder.compile().invoke(HELLO)
    assert [call.agent for call in run.trace.calls] == ["writer", None, "rewriter", None, None, None]


def test_unknown_parts_are_an_error() -> None:
    graph = one_node("writer", speak)
    with pytest.raises(ConfigError, match=r"no part named 'write'; the parts are \['writer'\]"):
        trainable(graph.compile(), agents=["write"])
    with pytest.raises(ConfigError, match="compile the graph"):
        trainable(graph, name="writer")


# Selected by name, without a mark


def test_a_graph_compiled_long_before(playground: Playground) -> None:
    graph = one_node("writer", speak).compile()
    graph.invoke  # noqa: B018 - any use of it
    with Installed().installed("langgraph"), playground.rollout(train=["writer"]) as run:
        graph.invoke(HELLO)
    assert [call.agent for call in run.trace.calls] == ["writer"]


@pytest.mark.usefixtures("installed")
def test_subgraphs(playground: Playground) -> None:
    """By default calls belong to the innermost node; a selected node owns all calls inside it."""
    graph = one_node("team", one_node("member", speak).compile()).compile()
    for agents, speaker in (
        ((), "member"),
        (("team",), "team"),
        (("member",), "member"),
        (("team", "member"), "member"),
    ):
        with playground.rollout(train=agents) as run:
            graph.invoke(HELLO)
        assert [call.agent for call in run.trace.calls] == [speaker]
        assert ancestors(run.trace, parent_of(run.trace, run.trace.calls[0])) == ["member", "team", "rollout"]


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("how", ["invoke", "ainvoke"])
def test_send(playground: Playground, how: str) -> None:
    class Wide(TypedDict):
        said: Annotated[list[str], operator.add]

    def work(topic: str) -> Any:
        return {"said": [chat_model().invoke(topic).text]}

    graph = StateGraph(Wide)
    graph.add_node("work", work)
    graph.add_conditional_edges(START, lambda _: [Send("work", f"topic {i}") for i in range(5)])
    with playground.rollout(train=["work"]) as run:
        run_runnable(graph.compile(), how, {"said": []})
    assert [call.agent for call in run.trace.calls] == ["work"] * 5
    assert len({call.parent for call in run.trace.calls}) == 5


@pytest.mark.usefixtures("installed")
def test_functional_api(playground: Playground) -> None:
    @task
    def writer(text: str) -> str:
        return chat_model().invoke(text).text

    @entrypoint()
    def program(texts: list[str]) -> list[str]:
        return [future.result() for future in [writer(text) for text in texts]]

    with playground.rollout(train=["writer"]) as run:
        program.invoke(["a", "b"])
    assert [call.agent for call in run.trace.calls] == ["writer", "writer"]
    assert ancestors(run.trace, parent_of(run.trace, run.trace.calls[0])) == ["writer", "program", "rollout"]


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("agents", [(), ("writer",)])
def test_create_agent_by_its_name(playground: Playground, agents: tuple[str, ...]) -> None:
    agent = create_agent(chat_model(), [add], name="writer")
    for program in (agent, one_node("node", agent).compile(), one_node("writer", agent).compile()):
        with playground.rollout(train=agents) as run:
            program.invoke({"messages": [HumanMessage(ADD_PROMPT)]})
        assert [call.agent for call in run.trace.calls] == ["writer", "writer"]


@pytest.mark.usefixtures("installed")
def test_create_agent_without_a_name_has_the_name_of_its_node(playground: Playground) -> None:
    graph = one_node("writer", create_agent(chat_model(), [add])).compile()
    with playground.rollout() as run:
        graph.invoke({"messages": [HumanMessage(ADD_PROMPT)]})
    assert [call.agent for call in run.trace.calls] == ["writer", "writer"]
    assert [event.name for event in run.trace.events] == ["rollout", "writer", "add"]


# How nodes end


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("marked", [True, False])
def test_an_interrupt_is_not_a_failure(playground: Playground, marked: bool) -> None:
    def ask(state: MessagesState) -> Any:
        chat_model().invoke("before")
        return {"messages": [HumanMessage(interrupt("go on?"))]}

    graph = one_node("ask", trainable("asker")(ask) if marked else ask).compile(checkpointer=InMemorySaver())
    thread: Any = {"configurable": {"thread_id": "1"}}
    with playground.rollout() as run:
        assert "__interrupt__" in graph.invoke(HELLO, thread)
        graph.invoke(Command(resume="yes"), thread)
    assert len(run.trace.calls) == 2
    assert [event.error for event in run.trace.events] == [None] * (5 if marked else 3)


def drafts(state: MessagesState) -> Any:
    draft = chat_model().invoke("draft")
    return {"messages": [draft, HumanMessage(interrupt("go on?"))]}


def says(text: str) -> Any:
    return lambda state: {"messages": [chat_model().invoke(text)]}


def drafts_in_subgraph(state: MessagesState) -> Any:
    """Calls a graph, of which one node is done when another is interrupted."""
    chat_model().invoke("before")
    inner = StateGraph(MessagesState)
    inner.add_sequence([("done", says("done")), ("draft", drafts)])
    inner.add_edge(START, "done")
    return inner.compile(checkpointer=True).invoke(state)


@tool
def look_up(a: int, b: int) -> str:
    """Asks a model, then a person."""
    return f"{chat_model().invoke('inside a tool').content} {interrupt('go on?')}"


@task
def outline() -> str:
    return chat_model().invoke("outline").text


@entrypoint(checkpointer=InMemorySaver())
def write(text: str) -> str:
    outline().result()
    chat_model().invoke("draft")
    return interrupt("go on?")


AGENT_WITH_TOOL = create_agent(chat_model(), [look_up])
USE_LOOK_UP = 'use:look_up {"a": 1, "b": 2}'


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("program", "said", "discarded"),
    [
        (one_node("ask", drafts), "hello", ["draft"]),
        (one_node("ask", trainable("asker")(drafts)), "hello", ["draft"]),
        (one_node("ask", drafts_in_subgraph), "hello", ["before", "draft"]),
        (one_node("agent", AGENT_WITH_TOOL), USE_LOOK_UP, ["inside a tool"]),
        (write, "hello", ["draft"]),
    ],
    ids=["node", "marked", "subgraph", "tool of an agent", "functional"],
)
def test_responses_of_a_node_that_runs_again_after_an_interrupt_are_not_trained(
    playground: Playground, program: Any, said: str, discarded: list[str]
) -> None:
    """What completed before the interrupt is not repeated, and stays."""
    graph = program.compile(checkpointer=InMemorySaver()) if isinstance(program, StateGraph) else program
    thread: Any = {"configurable": {"thread_id": "1"}}
    start: Any = {"messages": [HumanMessage(said)]} if isinstance(program, StateGraph) else said
    with playground.rollout() as run:
        assert "__interrupt__" in graph.invoke(start, thread)
        assert discarded_calls(run.trace) == set()
        paused = {call.id for call in run.trace.calls}
        graph.invoke(Command(resume="yes"), thread)
    dropped = [call for call in run.trace.calls if call.id in discarded_calls(run.trace)]
    assert [call.messages[-1]["content"] for call in dropped] == discarded
    assert paused.issuperset(call.id for call in dropped)
    agents = {call.agent for call in run.trace.calls if call.agent}
    kept = {t.call for t in trace_to_transitions(run.trace, agents=agents, refused=True) if t.refusal is None}
    assert kept.isdisjoint(call.id for call in dropped)


@pytest.mark.usefixtures("installed")
def test_a_jump_to_the_parent_is_not_a_failure(playground: Playground) -> None:
    def jump(state: MessagesState) -> Any:
        return Command(goto="end", graph=Command.PARENT)

    graph = StateGraph(MessagesState)
    graph.add_node("team", one_node("jump", trainable("jumper")(jump)).compile(), destinations=("end",))
    graph.add_node("end", speak)
    graph.add_edge(START, "team")
    with playground.rollout() as run:
        graph.compile().invoke(HELLO)
    assert [event.error for event in run.trace.events] == [None] * 5
    assert [call.agent for call in run.trace.calls] == ["end"]


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("how", ["invoke", "ainvoke"])
def test_a_retried_node_is_one_event(playground: Playground, how: str) -> None:
    attempts: list[int] = []

    def flaky(state: MessagesState) -> Any:
        chat_model().invoke("try")
        attempts.append(1)
        if len(attempts) == 1:
            raise RuntimeError("not yet")
        return {}

    graph = StateGraph(MessagesState)
    graph.add_node("flaky", flaky, retry_policy=RetryPolicy(initial_interval=0, jitter=False, retry_on=RuntimeError))
    graph.add_edge(START, "flaky")
    with playground.rollout() as run:
        run_runnable(graph.compile(), how, HELLO)
    assert len(run.trace.calls) == 2
    assert [(event.name, event.error) for event in run.trace.events] == [("rollout", None), ("flaky", None)]


# Tools


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("how", ["invoke", "ainvoke"])
def test_a_tool_that_does_not_exist(playground: Playground, how: str) -> None:
    agent = create_agent(chat_model(), [add], name="writer")
    with playground.rollout() as run:
        run_runnable(agent, how, {"messages": [HumanMessage('use:multiply {"a": 2}')]})
    (event,) = [event for event in run.trace.events if event.kind == "tool"]
    assert (event.name, event.agent) == ("multiply", "writer")
    assert event.error is not None
    assert "not a valid tool" in event.error
    assert event.attributes["gen_ai.tool.call.arguments"] == '{"a": 2}'


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("how", ["invoke", "ainvoke"])
def test_an_agent_inside_a_tool_hangs_under_the_tool(playground: Playground, how: str) -> None:
    researcher = create_agent(chat_model(), [], name="researcher")

    @tool
    def research(topic: str, runtime: ToolRuntime) -> str:
        """Ask the researcher."""
        return researcher.invoke({"messages": [HumanMessage(topic)]})["messages"][-1].text

    agent = create_agent(chat_model(), [research], name="writer")
    with playground.rollout() as run:
        run_runnable(agent, how, {"messages": [HumanMessage('use:research {"topic": "rain"}')]})
    assert [call.agent for call in run.trace.calls] == ["writer", "researcher", "writer"]
    path = ancestors(run.trace, parent_of(run.trace, run.trace.calls[1]))
    assert path == ["researcher", "research", "writer", "rollout"]
    (event,) = [event for event in run.trace.events if event.kind == "tool"]
    assert event.attributes["gen_ai.tool.call.arguments"] == '{"topic": "rain"}'


@pytest.mark.usefixtures("installed")
def test_threads_that_a_node_starts(playground: Playground) -> None:
    def writer(state: MessagesState) -> Any:
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(chat_model().invoke, ["one", "two"]))
        thread = threading.Thread(target=chat_model().invoke, args=("three",))
        thread.start()
        thread.join()
        return {}

    with playground.rollout() as run:
        one_node("writer", writer).compile().invoke(HELLO)
    assert sorted(user_message(call) for call in run.trace.calls) == ["one", "three", "two"]
    assert {call.agent for call in run.trace.calls} == {"writer"}
