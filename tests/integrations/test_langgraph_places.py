"""LangGraph: routers, hooks and other code around a node are places of their own, and paths tell equal names apart."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Annotated, Any, TypedDict

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import (
    AgentMiddleware,
    LLMToolEmulator,
    LLMToolSelectorMiddleware,
    SummarizationMiddleware,
    before_model,
)
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import HumanMessage
from langchain_core.runnables import RunnableLambda
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.cache.memory import InMemoryCache
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.func import entrypoint, task
from langgraph.graph import END, START, StateGraph
from langgraph.prebuilt import create_react_agent  # pyright: ignore[reportDeprecated]
from langgraph.types import CachePolicy, Command, Send, interrupt
from pydantic import SecretStr

from lightning_core import Trace, trainable
from lightning_core.errors import ConfigError
from lightning_core.testing import Playground, open_playground
from lightning_core.testing.contract import ADD_PROMPT, ancestors, parent_of, run_async, user_message
from lightning_core.trace import DECLARED_AGENTS
from tests.integrations.combinations import combined
from tests.integrations.runnables import run_runnable

INTEGRATION = "langgraph"
pytestmark = pytest.mark.usefixtures("installed")
llm = ChatOpenAI(model="policy", api_key=SecretStr("sk-of-the-agent"), max_retries=0)


class State(TypedDict):
    said: Annotated[list[str], operator.add]


EMPTY: Any = {"said": []}
HOWS = ["invoke", "ainvoke", "stream", "astream"]


def say(text: str) -> Any:
    """A node that sends ``text`` to the model."""
    return lambda _: {"said": [llm.invoke(text).text]}


def speakers(trace: Trace) -> dict[str, str | None]:
    return {user_message(call): call.agent for call in trace.calls}


def chain(*nodes: tuple[str, Any]) -> StateGraph[Any]:
    graph = StateGraph(State)
    for name, node in nodes:
        graph.add_node(name, node)
    for (before, _), (after, _) in zip([(START, None), *nodes], nodes, strict=False):
        graph.add_edge(before, after)
    return graph


# Routers


def route(state: Any) -> str:
    llm.invoke("which way")
    return "end"


async def aroute(state: State) -> str:
    await llm.ainvoke("which way")
    return "end"


class Router:
    def __call__(self, state: State) -> str:
        return route(state)


class Routers:
    def choose(self, state: State) -> str:
        return route(state)


ROUTERS: dict[str, tuple[Any, str]] = {
    "function": (route, "route"),
    "coroutine": (aroute, "aroute"),
    "method": (Routers().choose, "choose"),
    "object": (Router(), "condition"),
    "lambda": (lambda state: route(state), "condition"),
    "Runnable": (RunnableLambda(route, aroute, name="pick"), "pick"),
    "chain": ((lambda _: "which way") | llm | (lambda _: "end"), "condition"),
    "Send": (lambda state: [Send(route(state), EMPTY)], "condition"),
    "generator of several": (RunnableLambda(lambda state: [route(state)], name="several"), "several"),
}


@pytest.mark.parametrize(
    ("train", "how", "kind"),
    combined(
        [[], ["work"], ["ROUTER"]],
        HOWS,
        list(ROUTERS),
        where=lambda train, how, kind: kind != "coroutine" or how.startswith("a"),
    ),
)
def test_a_router_is_a_place_of_its_own(playground: Playground, kind: str, how: str, train: list[str]) -> None:
    router, name = ROUTERS[kind]
    graph = chain(("work", say("work")))
    graph.add_node("end", say("end"))
    graph.add_conditional_edges("work", router, ["end"] if kind != "Send" else None)
    program = graph.compile()
    with playground.rollout(train=[name if selected == "ROUTER" else selected for selected in train]) as run:
        run_runnable(program, how, EMPTY)
    assert speakers(run.trace) == {"work": "work", "which way": name, "end": "end"}
    call = next(call for call in run.trace.calls if user_message(call) == "which way")
    assert ancestors(run.trace, parent_of(run.trace, call)) == [name, "rollout"]


def test_a_router_of_a_graph_compiled_and_marked_before(playground: Playground) -> None:
    graph = chain(("work", trainable("worker")(say("work"))))
    graph.add_conditional_edges("work", route, {"end": END})
    program = graph.compile()
    with playground.rollout() as run:
        program.invoke(EMPTY)
    assert speakers(run.trace) == {"work": "worker", "which way": "route"}


def test_a_router_at_the_start(playground: Playground) -> None:
    graph = StateGraph(State).add_node("end", say("end"))
    graph.add_conditional_edges(START, route)
    outer = chain(("team", graph.compile()))
    with playground.rollout(train=["end"]) as run:
        outer.compile().invoke(EMPTY)
    assert speakers(run.trace) == {"which way": "route", "end": "end"}
    assert ancestors(run.trace, parent_of(run.trace, run.trace.calls[0])) == ["route", "team", "rollout"]


@pytest.mark.parametrize(("train", "agent"), [(["team"], "team"), (["team", "team/route"], "team/route")])
def test_a_router_inside_a_selected_team_belongs_to_the_team(
    playground: Playground, train: list[str], agent: str
) -> None:
    inner = chain(("work", say("work")))
    inner.add_conditional_edges("work", route, {"end": END})
    with playground.rollout(train=train) as run:
        chain(("team", inner.compile())).compile().invoke(EMPTY)
    assert speakers(run.trace) == {"work": "team", "which way": agent}


def test_a_retried_node_does_not_own_its_router(playground: Playground) -> None:
    graph = chain(("work", say("work")))
    graph.add_conditional_edges("work", route, {"end": END})
    with playground.rollout(train=["work"]) as run:
        graph.compile().batch([EMPTY, EMPTY])
    assert [call.agent for call in run.trace.calls if user_message(call) == "which way"] == ["route", "route"]


def test_routers_of_create_agent_leave_no_events(playground: Playground) -> None:
    with playground.rollout() as run:
        create_agent(llm, [add], name="writer").invoke(ask_add())
    assert [event.name for event in run.trace.events] == ["rollout", "writer", "add"]


# Other code that LangGraph runs around a node


def add_up(before: list[str], new: list[str]) -> list[str]:
    if new:
        llm.invoke("reduce")
    return before + new


class Reduced(TypedDict):
    said: Annotated[list[str], add_up]


def test_keys_of_caches_and_reducers_do_not_speak_for_a_node(playground: Playground) -> None:
    def key(_: Any) -> str:
        return llm.invoke("cache key").text

    graph = StateGraph(Reduced).add_edge(START, "work")
    graph.add_node("work", say("work"), cache_policy=CachePolicy(key_func=key))
    with playground.rollout(train=["work"]) as run:
        graph.compile(cache=InMemoryCache()).invoke(EMPTY)
    assert speakers(run.trace) == {"cache key": None, "work": "work", "reduce": None}


def test_command_defer_and_interrupt_stay_in_their_node(playground: Playground) -> None:
    def decide(state: State) -> Any:
        llm.invoke("decide")
        return Command(goto="late", update={"said": [interrupt("go on?")]})

    graph = chain(("decide", decide))
    graph.add_node("late", say("late"), defer=True)
    program = graph.compile(checkpointer=InMemorySaver())
    thread: Any = {"configurable": {"thread_id": "1"}}
    with playground.rollout(train=["late"]) as run:
        program.invoke(EMPTY, thread)
        program.invoke(Command(resume="yes"), thread)
    assert [(user_message(c), c.agent) for c in run.trace.calls] == [("decide", "decide")] * 2 + [("late", "late")]


def test_send_and_tasks_fan_out(playground: Playground) -> None:
    @task
    def work(text: str) -> str:
        return llm.invoke(text).text

    @entrypoint()
    def program(texts: list[str]) -> list[str]:
        llm.invoke("program")
        return [future.result() for future in [work(text) for text in texts]]

    with playground.rollout(train=["work"]) as run:
        program.invoke(["a", "b"])
    assert speakers(run.trace) == {"program": "program", "a": "work", "b": "work"}


# Hooks of agents


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@tool
def subtract(a: int, b: int) -> int:
    """Subtract two numbers."""
    return a - b


@tool
def consult(question: str) -> str:
    """Consult an expert."""
    return llm.invoke(f"consult: {question}").text


def ask_add() -> Any:
    return {"messages": [HumanMessage(ADD_PROMPT)]}


@before_model
def check(state: Any, runtime: Any) -> None:
    llm.invoke("check")


class Hooks(AgentMiddleware[Any, Any]):
    def before_agent(self, state: Any, runtime: Any) -> None:
        llm.invoke("before agent")

    def after_model(self, state: Any, runtime: Any) -> None:
        llm.invoke("after model")

    def after_agent(self, state: Any, runtime: Any) -> None:
        llm.invoke("after agent")


SUMMARIZE = SummarizationMiddleware(llm, trigger=("messages", 1), keep=("messages", 1))

HOOKS: dict[str, tuple[Callable[[], Any], set[str]]] = {
    "before_model": (lambda: create_agent(llm, [add], middleware=[check], name="writer"), {"check.before_model"}),
    "others": (
        lambda: create_agent(llm, [add], middleware=[Hooks()], name="writer"),
        {"Hooks.before_agent", "Hooks.after_model", "Hooks.after_agent"},
    ),
    "summary": (lambda: create_agent(llm, [add], middleware=[SUMMARIZE], name="writer"), {"summarization"}),
    "emulator": (
        lambda: create_agent(llm, [add], middleware=[LLMToolEmulator(model=llm)], name="writer"),
        {"tool_emulation"},
    ),
}


@pytest.mark.parametrize(("train", "how", "kind"), combined([[], ["writer"]], ["invoke", "stream"], list(HOOKS)))
def test_hooks_do_not_speak_for_their_agent(playground: Playground, kind: str, how: str, train: list[str]) -> None:
    build, names = HOOKS[kind]
    with playground.rollout(train=train) as run:
        run_runnable(build(), how, ask_add())
    assert {call.agent for call in run.trace.calls} == {"writer", *names}
    own = [call for call in run.trace.calls if call.agent == "writer"]
    assert len(own) == 2
    assert all(user_message(call).startswith("use:add") or "add" in str(call.messages) for call in own)


def test_a_selected_hook_is_an_agent(playground: Playground) -> None:
    agent = create_agent(llm, [add], middleware=[SUMMARIZE], name="writer")
    with playground.rollout(train=["SummarizationMiddleware.before_model"]) as run:
        agent.invoke(ask_add())
    assert {call.agent for call in run.trace.calls} == {"writer", "SummarizationMiddleware.before_model"}


def test_the_selection_of_tools_is_auxiliary() -> None:
    selector = LLMToolSelectorMiddleware(model=llm, max_tools=1, on_parsing_failure="all")
    agent = create_agent(llm, [add, subtract], middleware=[selector], system_prompt="You write.", name="writer")

    def script(prompt: str) -> str:
        return "It is 5." if "You write." in prompt else '{"tools": ["add"]}'

    with (
        open_playground(script, integrations=["langgraph"]) as opened,
        opened.rollout(train=["writer"]) as run,
    ):
        agent.invoke(ask_add())
    assert [call.agent for call in run.trace.calls] == ["tool_selection", "writer"]


@pytest.mark.filterwarnings("ignore:create_react_agent")
@pytest.mark.parametrize("train", [["writer"], ["agent"], []])
def test_model_hooks_of_create_react_agent(playground: Playground, train: list[str]) -> None:
    def hook(text: str) -> Any:
        def run(state: Any) -> Any:
            llm.invoke(text)
            return {"llm_input_messages": state["messages"]} if text == "before" else {}

        return run

    agent = create_react_agent(  # pyright: ignore[reportDeprecated]
        llm, [add], name="writer", pre_model_hook=hook("before"), post_model_hook=hook("after")
    )
    with playground.rollout(train=train) as run:
        agent.invoke(ask_add())
    speaking = speakers(run.trace)
    assert (speaking["before"], speaking["after"]) == ("pre_model_hook", "post_model_hook")
    assert speaking[ADD_PROMPT] == ("writer" if train == ["writer"] else "agent")


@pytest.mark.parametrize("train", [["writer"], ["writer", "consult"]])
def test_a_tool_that_calls_a_model_speaks_for_itself(playground: Playground, train: list[str]) -> None:
    writer = create_agent(llm, [consult], name="writer")
    with playground.rollout(train=train) as run:
        writer.invoke({"messages": [HumanMessage('use:consult {"question": "why"}')]})
    assert speakers(run.trace)["consult: why"] == "consult"
    (event,) = [event for event in run.trace.events if event.kind == "tool"]
    assert event.agent == "writer"


# Callbacks


class Grader(BaseCallbackHandler):
    def on_llm_end(self, response: Any, **kwargs: Any) -> None:
        if "grade" not in str(response):
            llm.invoke("grade")


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize(("train", "agent"), [(["work"], "Grader"), (["work", "Grader"], "Grader")])
def test_a_callback_does_not_speak_for_the_agent(
    playground: Playground, how: str, train: list[str], agent: str
) -> None:
    graph = chain(("work", RunnableLambda(lambda _: {"said": [llm.invoke("work").text]})))
    with playground.rollout(train=train) as run:
        run_runnable(graph.compile().with_config(callbacks=[Grader()]), how, EMPTY)
    assert speakers(run.trace) == {"work": "work", "grade": agent}


# Paths


def team(name: str | None = None) -> Any:
    return chain(("writer", say("writer"))).compile(name=name)


TEAMS: dict[str, Callable[[], Any]] = {
    "sub-graphs": lambda: chain(("first", team()), ("second", team())),
    "sub-graphs in functions": lambda: chain(
        ("first", lambda state: team().invoke(state)), ("second", lambda state: team().invoke(state))
    ),
    "named graphs in one node": lambda: chain(
        ("both", lambda state: team("second").invoke(team("first").invoke(state)))
    ),
    "agents": lambda: chain(
        ("a", as_agent("first")),
        ("b", as_agent("second")),
    ),
}


def as_agent(name: str) -> Any:
    """A node with a named agent, one tool of which is a graph with the node ``writer``."""

    @tool
    def delegate() -> str:
        """Delegate."""
        team().invoke(EMPTY)
        return "done"

    agent = create_agent(llm, [delegate], name=name)
    return lambda _: {"said": [agent.invoke({"messages": [HumanMessage("use:delegate {}")]})["messages"][-1].text]}


@pytest.mark.parametrize(("how", "kind"), combined(HOWS, list(TEAMS)))
def test_a_path_selects_one_of_two_nodes_with_one_name(playground: Playground, kind: str, how: str) -> None:
    program = TEAMS[kind]().compile()
    with playground.rollout(train=["second/writer"]) as run:
        run_runnable(program, how, EMPTY)
    agents = [call.agent for call in run.trace.calls if user_message(call) == "writer"]
    assert agents == ["writer", "second/writer"]


def test_a_marked_path(playground: Playground) -> None:
    builder = chain(("first", team()), ("second", chain(("deep", team())).compile()))
    for marked in (
        trainable(builder.compile(), agents=["second/deep/writer"]),
        trainable(builder, agents=["second/deep/writer"]).compile(),
    ):
        with playground.rollout() as run:
            marked.invoke(EMPTY)
            builder.compile().invoke(EMPTY)
        assert [call.agent for call in run.trace.calls] == ["writer", "second/deep/writer", "writer", "writer"]
        assert [name for name, _ in marked.get_subgraphs(recurse=True)] == ["first", "second", "second|deep"]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("third/writer", r"no part named 'third/writer'; the parts are \['code', 'first'\]"),
        ("first/critic", r"no part named 'critic'; the parts are \['writer'\]"),
        ("code/writer", "'writer' cannot be marked inside 'code': the node is not a graph"),
    ],
)
def test_a_path_that_cannot_be_marked_is_an_error(path: str, message: str) -> None:
    graph = chain(("first", team()), ("code", lambda state: team().invoke(state)))
    with pytest.raises(ConfigError, match=message):
        trainable(graph.compile(), agents=[path])


# Declared names


def test_a_graph_declares_the_names_in_it(playground: Playground) -> None:
    inner = chain(("writer", say("writer")))
    inner.add_conditional_edges("writer", route, {"end": END})
    graph = StateGraph(State).add_node("team", inner.compile()).add_node("never", say("never"))
    graph.add_node("other", team())
    graph.add_node("expert", create_agent(llm, [add], middleware=[check], name="expert_agent"))
    graph.add_conditional_edges(START, lambda _: "team", ["team", "never", "other", "expert"])
    with playground.rollout(train=["never"]) as run:
        graph.compile(name="program").invoke(EMPTY)
    assert set(run.trace.events[0].attributes[DECLARED_AGENTS]) == {
        *("program", "condition", "team", "writer", "route", "never", "other", "expert", "expert_agent"),
        *("check.before_model", "program/team/writer", "program/other/writer"),
    }
    assert {call.agent for call in run.trace.calls} == {"writer", "route"}


def test_a_graph_declares_the_agents_that_its_tools_delegate_to(playground: Playground) -> None:
    helpers = {"helper": create_agent(llm, [], name="helper")}

    @tool
    def delegate() -> str:
        """Delegate."""
        return str(helpers["helper"].invoke({"messages": []}))

    with playground.rollout(train=["lead"]) as run:
        create_agent(llm, [delegate], name="lead").invoke({"messages": [HumanMessage("hello")]})
    assert set(run.trace.events[0].attributes[DECLARED_AGENTS]) == {"lead", "helper"}


def test_a_graph_that_contains_itself_is_declared(playground: Playground) -> None:
    def work(state: State) -> Any:
        if len(state["said"]) < 2:
            return program.invoke({"said": [*state["said"], llm.invoke("work").text]})
        return {"said": []}

    program = chain(("work", work)).compile()
    with playground.rollout() as run:
        program.invoke(EMPTY)
    assert [call.agent for call in run.trace.calls] == ["work", "work"]


def test_asynchronous_generators_of_graphs_can_be_left(playground: Playground) -> None:
    async def first() -> None:
        stream = team("named").astream(EMPTY)
        await anext(stream)
        await stream.aclose()

    with playground.rollout() as run:
        run_async(first())
    assert [call.agent for call in run.trace.calls] == ["writer"]
