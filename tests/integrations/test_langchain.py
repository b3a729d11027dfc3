"""LangChain: the contract suite, and tests of Runnables."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_core.load import dumps
from langchain_core.messages import HumanMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.runnables import (
    ConfigurableField,
    Runnable,
    RunnableGenerator,
    RunnableLambda,
    RunnableParallel,
    RunnablePassthrough,
    RunnableSequence,
)
from langchain_core.tools import BaseTool, tool
from langchain_openai import ChatOpenAI
from pydantic import ValidationError

from lightning_core import trainable
from lightning_core.capture.integration import installed as installed_globally
from lightning_core.errors import ConfigError
from lightning_core.testing import Playground
from lightning_core.testing.contract import ADD_PROMPT, AgentSpec, HostAdapter, IntegrationContract, ancestors
from lightning_langchain import LightningCallbackHandler
from lightning_langchain._trainable import RUNS
from tests.integrations.combinations import combined
from tests.integrations.runnables import add, chat_model, run_runnable

INTEGRATION = "langchain"


class LangChainAdapter(HostAdapter):
    """Every part is a chain, prompt | model | the rest; a program is a sequence of them, or a RunnableParallel."""

    integration = "langchain"
    host = "langchain_core"

    def build(self, parts: Sequence[AgentSpec], *, parallel: bool = False, base_url: str | None = None) -> Any:
        chains = {part.name: self.make_chain(part, base_url) for part in parts}
        if parallel:
            return RunnableParallel(chains)
        return RunnableSequence(RunnableLambda(lambda x: x), *chains.values())

    def make_chain(self, part: AgentSpec, base_url: str | None) -> Runnable[Any, Any]:
        model: Any = chat_model(base_url)
        messages = [HumanMessage(part.text)]
        if part.tool:
            model = create_agent(model, [add])
        inner = self.build([part.inner], base_url=base_url) if part.inner else None

        def rest(result: Any) -> Any:
            if inner is not None:
                inner.invoke(result)
            if part.error is not None:
                raise part.error
            return result

        async def arest(result: Any) -> Any:
            if inner is not None:
                await inner.ainvoke(result)
            if part.error is not None:
                raise part.error
            return result

        prompt = RunnableLambda(lambda _: {"messages": messages} if part.tool else messages)
        chain = prompt | model | RunnableLambda(rest, arest)
        return trainable(chain, name=part.name) if part.marked else chain.with_config(run_name=part.name)

    def run(self, program: Any) -> None:
        program.invoke("start")

    async def arun(self, program: Any) -> None:
        await program.ainvoke("start")

    def stream(self, program: Any) -> None:
        assert list(program.stream("start"))

    async def astream(self, program: Any) -> None:
        assert [chunk async for chunk in program.astream("start")]

    def patched_call(self) -> tuple[Any, str]:
        return RunnableSequence, "invoke"


class TestLangChain(IntegrationContract):
    distribution = "lightning-rl"
    adapter = LangChainAdapter()


# Objects derived from a marked one stay marked


def test_a_marked_model_is_still_that_model(playground: Playground) -> None:
    model = chat_model()
    marked = trainable(model, name="writer")
    assert marked is not model
    assert isinstance(marked, ChatOpenAI)
    assert type(marked).__name__ == "ChatOpenAI"
    assert marked.root_client is model.root_client
    assert dumps(marked) == dumps(model)
    assert marked.temperature == marked.model_copy().temperature
    with playground.rollout() as run:
        model.invoke("unmarked")
        marked.invoke("marked")
        marked.model_copy(update={"temperature": 0.1}).invoke("marked")
    assert [call.agent for call in run.trace.calls] == [None, "writer", "writer"]


DERIVED: dict[str, Callable[[Any], Any]] = {
    "itself": lambda model: model,
    "bind": lambda model: model.bind(stop=["x"]),
    "bind_tools": lambda model: model.bind_tools([add]),
    "with_config": lambda model: model.with_config(tags=["t"]),
    "with_retry": lambda model: model.with_retry(),
    "with_fallbacks": lambda model: model.with_fallbacks([chat_model()]),
    "pipe": lambda model: model | StrOutputParser(),
    "in a sequence": lambda model: RunnableLambda(lambda x: x) | model | StrOutputParser(),
    "pick and assign": lambda model: RunnablePassthrough.assign(y=lambda _: "z") | (lambda d: d["y"]) | model,
    "with_listeners": lambda model: model.with_listeners(),
    "configurable": lambda model: model.configurable_fields(temperature=ConfigurableField("temperature")),
}


HOWS = ["invoke", "ainvoke", "stream", "astream", "batch", "abatch"]


@pytest.mark.parametrize(("how", "derive"), combined([*HOWS, "astream_events"], list(DERIVED)))
def test_derived_from_a_marked_model(playground: Playground, derive: str, how: str) -> None:
    runnable = DERIVED[derive](trainable(chat_model(), name="writer"))
    message: Any = {"x": "hello"} if derive == "pick and assign" else [HumanMessage("hello")]
    with playground.rollout() as run:
        run_runnable(runnable, how, message)
    assert [call.agent for call in run.trace.calls] == ["writer"] * (2 if "batch" in how else 1)
    agents = [event for event in run.trace.events if event.kind == "agent"]
    assert len(agents) == len(run.trace.calls)


def make_runnables() -> dict[str, Runnable[Any, Any]]:
    model = chat_model()

    def answer(chunks: Iterator[Any]) -> Iterator[Any]:
        for chunk in chunks:
            yield model.invoke(chunk)

    return {
        "lambda": RunnableLambda(lambda x: model.invoke(x), lambda x: model.ainvoke(x)),
        "sequence": RunnableLambda(lambda x: x) | model,
        "long sequence": RunnableLambda(lambda x: x) | model | StrOutputParser(),
        "binding": model.bind(stop=["x"]),
        "parallel": RunnableParallel(answer=model),
        "generator": RunnableGenerator(answer),
    }


@pytest.mark.parametrize(
    ("how", "kind"),
    combined(HOWS, list(make_runnables()), where=lambda how, kind: kind != "generator" or not how.startswith("a")),
)
def test_marked_runnables(playground: Playground, kind: str, how: str) -> None:
    marked = trainable(make_runnables()[kind], name="writer")
    assert isinstance(marked, Runnable)
    with playground.rollout() as run:
        run_runnable(marked, how, "hello")
        run_runnable(marked | (lambda x: x), how, "hello")
    assert {call.agent for call in run.trace.calls} == {"writer"}
    assert len(run.trace.calls) == (4 if "batch" in how else 2)


def test_two_agents_share_one_model(playground: Playground) -> None:
    model = chat_model()
    writer, critic = trainable(model, name="writer"), trainable(model, name="critic")
    with playground.rollout() as run:
        RunnableParallel(a=writer, b=critic, c=model).invoke("hello")
    assert sorted(str(call.agent) for call in run.trace.calls) == ["None", "critic", "writer"]


def test_parts_of_a_parallel_and_of_a_sequence(playground: Playground) -> None:
    model = chat_model()
    parallel = trainable(RunnableParallel(writer=model, critic=model), agents=["writer"])
    sequence = trainable(
        RunnableSequence(RunnableLambda(lambda x: model.invoke(x).text, name="first"), model), agents=["first"]
    )
    with playground.rollout() as run:
        parallel.invoke("hello")
        sequence.invoke([HumanMessage("hello")])
    assert sorted(str(call.agent) for call in run.trace.calls) == ["None", "None", "first", "writer"]
    with pytest.raises(ConfigError, match="no part named 'second'"):
        trainable(RunnableSequence(model, model), agents=["second"])
    with pytest.raises(ConfigError, match="expected a graph"):
        trainable(model, agents=["writer"])


# Selected by name


# The callback handler


@pytest.mark.parametrize(
    ("integration", "how"), combined([None, "langchain", "langgraph"], ["invoke", "ainvoke", "stream", "astream"])
)
def test_callback_handler(playground: Playground, how: str, integration: str | None) -> None:
    agent = create_agent(chat_model(), [add])
    with installed_globally(integration) if integration else nullcontext(), playground.rollout() as run:
        config: Any = {"callbacks": [LightningCallbackHandler()]}
        run_runnable(agent.with_config(config), how, {"messages": [HumanMessage(ADD_PROMPT)]})
        run_runnable(agent.with_config(config), how, {"messages": [HumanMessage('use:add {"a": 2, "b": -3}')]})
    tools = [event for event in run.trace.events if event.kind == "tool"]
    assert [tool.name for tool in tools] == ["add", "add"]
    assert tools[0].attributes["gen_ai.tool.call.arguments"] == '{"a": 2, "b": 3}'
    assert tools[0].attributes["gen_ai.tool.call.result"] == "5"
    assert tools[0].error is None
    assert tools[1].error == "b is negative"
    if integration is None or integration == "langgraph":
        nodes = [event.name for event in run.trace.events if event.kind == "node"]
        assert nodes == ["model", "tools", "model"] * 2
        assert ancestors(run.trace, tools[0]) == ["add", "tools", "rollout"]


def test_callback_handler_records_errors_and_passes_them_on(playground: Playground) -> None:
    error = RuntimeError("broken")

    @tool
    def broken() -> str:
        """Raise."""
        raise error

    handler = LightningCallbackHandler()
    with playground.rollout() as run, pytest.raises(RuntimeError) as caught:
        broken.invoke({}, {"callbacks": [handler]})
    assert caught.value is error
    assert run.trace.events[-1].error == "RuntimeError: broken"
    with pytest.raises(RuntimeError):
        broken.invoke({}, {"callbacks": [handler]})
    assert not handler._spans


# Tools


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("how", ["invoke", "ainvoke"])
def test_tools_outside_any_agent(playground: Playground, how: str) -> None:
    with playground.rollout() as run:
        assert run_runnable(add, how, {"a": 1, "b": 2}) == 3
        with pytest.raises(ValidationError):
            run_runnable(add, how, {"a": "one", "b": 2})
    first, second = [event for event in run.trace.events if event.kind == "tool"]
    assert first.attributes["gen_ai.tool.call.result"] == "3"
    assert second.error is not None
    assert second.error.startswith("ValidationError")


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("result", "text"),
    [({"ä": [1]}, '{"ä": [1]}'), ({(1, 2): 3}, "{(1, 2): 3}"), (None, "null"), ({1, 2}, '"{1, 2}"')],
)
def test_results_of_any_type(playground: Playground, result: Any, text: str) -> None:
    @tool
    def anything() -> Any:
        """Do anything."""
        return result

    with playground.rollout() as run:
        assert anything.invoke({}) == result
    assert run.trace.events[-1].attributes["gen_ai.tool.call.result"] == text


@pytest.mark.usefixtures("installed")
def test_what_cannot_be_recorded_is_counted(playground: Playground) -> None:
    class Odd(BaseTool):
        name: str = "odd"
        description: str = "odd"

        @property
        def args(self) -> Any:
            raise RuntimeError("no arguments today")

        def _run(self, x: int) -> int:
            return x + 1

    with playground.rollout(strict=False) as run:
        assert Odd().invoke({"x": 1}) == 2
    assert run.trace.counters == {"langchain.tool": 1}
    assert [event.name for event in run.trace.events] == ["rollout", "odd"]


def test_public_api() -> None:
    """The wrapped public functions, and the ways to run a Runnable, are complete."""
    for method in RUNS:
        assert callable(getattr(Runnable, method))
    for name in ("run", "arun"):
        assert next(iter(inspect.signature(getattr(BaseTool, name)).parameters.values())).name == "self"
        assert list(inspect.signature(getattr(BaseTool, name)).parameters)[1] == "tool_input"
