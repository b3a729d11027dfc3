"""Every Runnable of langchain_core runs as the agent that its name selects."""

from __future__ import annotations

import importlib
import pkgutil
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any, cast

import langchain_core
import pytest
from langchain_core.chat_history import InMemoryChatMessageHistory
from langchain_core.language_models import BaseChatModel, BaseLLM
from langchain_core.output_parsers import (
    BaseGenerationOutputParser,
    BaseOutputParser,
    BaseTransformOutputParser,
    StrOutputParser,
)
from langchain_core.prompts import BasePromptTemplate, PromptTemplate
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import (
    ConfigurableField,
    RouterRunnable,
    Runnable,
    RunnableAssign,
    RunnableBinding,
    RunnableBranch,
    RunnableGenerator,
    RunnableLambda,
    RunnableParallel,
    RunnablePassthrough,
    RunnablePick,
    RunnableSequence,
    RunnableWithFallbacks,
    RunnableWithMessageHistory,
)
from langchain_core.runnables.base import RunnableBindingBase, RunnableEachBase
from langchain_core.runnables.configurable import DynamicRunnable
from langchain_core.runnables.retry import RunnableRetry
from langchain_core.tools import BaseTool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import SecretStr

from lightning_core.testing import Playground
from lightning_core.testing.contract import run_async, user_message
from lightning_langchain._trainable import RUNS
from tests.integrations.combinations import combined

INTEGRATION = "langchain"
pytestmark = pytest.mark.usefixtures("installed")
llm = ChatOpenAI(model="policy", api_key=SecretStr("sk-of-the-agent"), max_retries=0)


def ask(text: Any) -> str:
    return llm.invoke(str(text)).text


async def aask(text: Any) -> str:
    return (await llm.ainvoke(str(text))).text


class AskingParser(BaseOutputParser[str]):
    def parse(self, text: str) -> str:
        return ask(text)


class AskingGenerationParser(BaseGenerationOutputParser[str]):
    def parse_result(self, result: Any, *, partial: bool = False) -> str:
        return ask(result[0].text)


class AskingTransformParser(BaseTransformOutputParser[str]):
    def parse(self, text: str) -> str:
        return ask(text)


class AskingPrompt(PromptTemplate):
    def format(self, **kwargs: Any) -> str:
        return ask(super().format(**kwargs))


class AskingRetriever(BaseRetriever):
    def _get_relevant_documents(self, query: str, *, run_manager: Any) -> list[Any]:
        ask(query)
        return []


def generate(chunks: Any) -> Any:
    yield ask("".join(str(chunk) for chunk in chunks))


async def agenerate(chunks: Any) -> Any:
    yield await aask("".join([str(chunk) async for chunk in chunks]))


def with_history() -> Runnable[Any, Any]:
    history = InMemoryChatMessageHistory()
    return RunnableWithMessageHistory(llm, lambda: history, history_factory_config=[])


asking = RunnableLambda(ask, aask)

BUILDERS: dict[type[Any], tuple[Callable[[], Runnable[Any, Any]], Any]] = {
    BaseChatModel: (lambda: llm, "hello"),
    BaseLLM: (lambda: OpenAI(model="policy", api_key=SecretStr("sk-of-the-agent"), max_retries=0), "hello"),
    BaseOutputParser: (AskingParser, "hello"),
    BaseGenerationOutputParser: (AskingGenerationParser, "hello"),
    BaseTransformOutputParser: (AskingTransformParser, "hello"),
    BasePromptTemplate: (lambda: AskingPrompt.from_template("{x}"), {"x": "hello"}),
    BaseRetriever: (AskingRetriever, "hello"),
    RunnableBindingBase: (lambda: llm.bind(stop=["x"]), "hello"),
    RunnableBinding: (lambda: llm.with_config(tags=["t"]), "hello"),
    RunnableEachBase: (lambda: asking.map(), ["hello"]),
    RunnableGenerator: (lambda: RunnableGenerator[Any, Any](generate, cast(Any, agenerate)), "hello"),
    RunnableLambda: (lambda: asking, "hello"),
    RunnableParallel: (lambda: RunnableParallel(answer=asking), "hello"),
    RunnableSequence: (lambda: asking | StrOutputParser(), "hello"),
    RunnableBranch: (lambda: RunnableBranch((lambda _: True, asking), asking), "hello"),
    DynamicRunnable: (lambda: llm.configurable_fields(temperature=ConfigurableField("temperature")), "hello"),
    RunnableWithFallbacks: (lambda: asking.with_fallbacks([asking]), "hello"),
    RunnableWithMessageHistory: (with_history, "hello"),
    RunnableAssign: (lambda: RunnablePassthrough.assign(answer=lambda d: ask(d["x"])), {"x": "hello"}),
    RunnablePassthrough: (lambda: RunnablePassthrough(cast(Any, ask), cast(Any, aask)), "hello"),
    RunnableRetry: (lambda: asking.with_retry(), "hello"),
    RouterRunnable: (lambda: RouterRunnable({"ask": asking}), {"key": "ask", "input": "hello"}),
}
"""How to build a Runnable that calls a model, and an input for it, for each class that defines how Runnables run."""

WITHOUT_MODELS = {"DictPromptTemplate", "FakeListChatModel", "FakeStreamingListLLM", RunnablePick.__name__}
"""Classes that define it and never send a request."""


def classes_of_langchain() -> Iterator[type[Any]]:
    """The classes of langchain_core that define how Runnables run, except Runnable itself and tools."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for module in pkgutil.walk_packages(langchain_core.__path__, "langchain_core."):
            importlib.import_module(module.name)
    waiting, seen = [Runnable], set[type[Any]]()
    while waiting:
        for cls in waiting.pop().__subclasses__():
            if cls not in seen:
                seen.add(cls)
                waiting.append(cls)
                if (
                    cls.__module__.startswith("langchain_core.")
                    # Marked runnables of other tests have classes of their own.
                    and vars(sys.modules[cls.__module__]).get(cls.__name__) is cls
                    and not issubclass(cls, BaseTool)
                    and set(RUNS) & set(vars(cls))
                ):
                    yield cls


def test_the_table_has_every_class_that_defines_how_it_runs() -> None:
    found = {cls.__name__ for cls in classes_of_langchain()}
    assert found - {cls.__name__ for cls in BUILDERS} - WITHOUT_MODELS == set()
    assert found >= WITHOUT_MODELS


def run_named(runnable: Any, how: str, input: Any, config: Any) -> None:
    async def consume(stream: Any) -> None:
        assert [chunk async for chunk in stream]

    match how:
        case "invoke":
            runnable.invoke(input, config)
        case "ainvoke":
            run_async(runnable.ainvoke(input, config))
        case "stream":
            assert list(runnable.stream(input, config))
        case "astream":
            run_async(consume(runnable.astream(input, config)))
        case "transform":
            assert list(runnable.transform(iter([input]), config))
        case "atransform":

            async def inputs() -> Any:
                yield input

            run_async(consume(runnable.atransform(inputs(), config)))
        case "batch":
            runnable.batch([input], config)
        case "abatch":
            run_async(runnable.abatch([input], config))
        case "batch_as_completed":
            assert list(runnable.batch_as_completed([input], config))
        case "abatch_as_completed":
            run_async(consume(runnable.abatch_as_completed([input], config)))
        case "astream_events":
            run_async(consume(runnable.astream_events(input, config, version="v2")))
        case _:
            run_async(consume(runnable.astream_log(input, config)))


def give_name(runnable: Any, how: str) -> tuple[Any, Any]:
    """``runnable`` and a configuration, one of them with the name ``writer``."""
    if how == "with_config":
        return runnable.with_config(run_name="writer"), None
    if how == "name":
        # As LangChain does; ``get_name`` is what its traces show.
        named = runnable.model_copy() if hasattr(runnable, "model_copy") else runnable
        named.name = "writer"
        return named, None
    return runnable, {"run_name": "writer"}


WAYS = [
    *(("config", how) for how in (*RUNS, "astream_events", "astream_log")),
    *(("with_config", how) for how in ("invoke", "ainvoke", "stream", "astream")),
]


def is_supported(way: tuple[str, str], cls: type[Any]) -> bool:
    """LangChain has no events of a Runnable that runs another on each item."""
    return cls is not RunnableEachBase or way[1] != "astream_events"


@pytest.mark.parametrize(("way", "cls"), combined(WAYS, list(BUILDERS), where=is_supported))
def test_a_run_name_selects(playground: Playground, cls: type[Any], way: tuple[str, str]) -> None:
    named, how = way
    build, input = BUILDERS[cls]
    runnable = build()
    assert isinstance(runnable, cls)
    runnable, config = give_name(runnable, named)
    with playground.rollout(train=["writer"]) as run:
        run_named(runnable, how, input, config)
        ask("unnamed")
    assert [call.agent for call in run.trace.calls] == ["writer", None]
    assert [event.kind for event in run.trace.events if event.name == "writer"] == ["agent"]


NAMED = [
    *(BaseChatModel, RunnableLambda, RunnableSequence),
    *(RunnableBranch, RunnableAssign, RunnableParallel, RunnableGenerator),
]


@pytest.mark.parametrize(("how", "cls"), combined(["invoke", "ainvoke", "stream", "astream"], NAMED))
def test_a_name_selects(playground: Playground, cls: type[Any], how: str) -> None:
    build, input = BUILDERS[cls]
    runnable, config = give_name(build(), "name")
    with playground.rollout(train=["writer"]) as run:
        run_named(runnable, how, input, config)
    assert [call.agent for call in run.trace.calls] == ["writer"]


# A shared history would put earlier inputs into a call; the input of ``map`` is a list itself.
BATCHES = [cls for cls in BUILDERS if cls not in (RunnableWithMessageHistory, RunnableEachBase)]


@pytest.mark.parametrize(
    ("train", "how", "cls"), combined([["a", "b"], ["b"]], [how for how in RUNS if "batch" in how], BATCHES)
)
def test_every_input_of_a_batch_has_its_own_name(
    playground: Playground, cls: type[Any], how: str, train: list[str]
) -> None:
    build, example = BUILDERS[cls]
    runnable: Any = build()
    names = ["a", "b", "c"]
    inputs = [change(example, f"I am {name}") for name in names]
    configs = [{"run_name": name} for name in names]

    async def acompleted() -> list[Any]:
        return [item async for item in runnable.abatch_as_completed(inputs, configs)]

    with playground.rollout(train=train) as run:
        match how:
            case "batch":
                results = list(enumerate(runnable.batch(inputs, configs)))
            case "abatch":
                results = list(enumerate(run_async(runnable.abatch(inputs, configs))))
            case "batch_as_completed":
                results = list(runnable.batch_as_completed(inputs, configs))
            case _:
                results = run_async(acompleted())
    assert sorted(index for index, _ in results) == [0, 1, 2]
    speakers = {line_of(call): call.agent for call in run.trace.calls}
    assert speakers == {f"I am {name}": name if name in train else None for name in names}


def change(example: Any, text: str) -> Any:
    if isinstance(example, dict):
        return {key: text if value == "hello" else value for key, value in example.items()}
    return text


def line_of(call: Any) -> str:
    """The line of the input that a call sends, with other text around it for some Runnables."""
    return next(line for line in ("I am a", "I am b", "I am c") if line in user_message(call))
