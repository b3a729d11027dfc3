"""LangChain: model calls of code around an agent are not the agent's."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.output_parsers import BaseOutputParser, StrOutputParser
from langchain_core.runnables import RunnableBranch, RunnableLambda, RunnableParallel
from langchain_openai import ChatOpenAI
from pydantic import SecretStr

from lightning_core import trainable
from lightning_core.testing import Playground
from lightning_core.testing.contract import user_message
from lightning_core.trace import DECLARED_AGENTS
from tests.integrations.combinations import combined
from tests.integrations.runnables import run_runnable

INTEGRATION = "langchain"
pytestmark = pytest.mark.usefixtures("installed")
llm = ChatOpenAI(model="policy", api_key=SecretStr("sk-of-the-agent"), max_retries=0)


class FixingParser(BaseOutputParser[str]):
    """As LangChain's OutputFixingParser: what it cannot parse it sends back to a model."""

    def parse(self, text: str) -> str:
        try:
            return json.loads(text)
        except ValueError:
            return llm.invoke("fix").text


class Counter(BaseCallbackHandler):
    def on_chat_model_start(self, serialized: Any, messages: Any, **kwargs: Any) -> None:
        if "observe" not in str(messages):
            llm.invoke("observe start")

    def on_llm_end(self, response: Any, **kwargs: Any) -> None:
        if "observe" not in str(response):
            llm.invoke("observe end")


def fails(_: Any) -> str:
    raise ValueError("not today")


writer = trainable(llm, name="writer")
named = llm.with_config(run_name="writer")

PROGRAMS: dict[str, tuple[Callable[[Any], Any], dict[str, str | None]]] = {
    "parser": (lambda w: w | FixingParser(), {"hello": "writer", "fix": None}),
    "parser after a parser": (lambda w: w | StrOutputParser() | FixingParser(), {"hello": "writer", "fix": None}),
    "fallback of another": (
        lambda w: (
            (RunnableLambda(fails).with_fallbacks([RunnableLambda(lambda _: llm.invoke("fallback").text)]))
            | (lambda _: "hello")
            | w
        ),
        {"fallback": None, "hello": "writer"},
    ),
    "retry": (lambda w: w.with_retry() | (lambda _: llm.invoke("after").text), {"hello": "writer", "after": None}),
    "condition": (
        lambda w: RunnableBranch((lambda _: bool(llm.invoke("which").text), w), w),
        {"which": None, "hello": "writer"},
    ),
    "beside": (
        lambda w: RunnableParallel(a=w, b=lambda _: llm.invoke("beside").text),
        {"hello": "writer", "beside": None},
    ),
    "callbacks": (
        lambda w: w.with_config(callbacks=[Counter()]),
        {"observe start": "Counter", "hello": "writer", "observe end": "Counter"},
    ),
}


@pytest.mark.parametrize(
    ("marked", "how", "kind"),
    combined([True, False], ["invoke", "ainvoke", "stream", "astream"], list(PROGRAMS)),
)
def test_what_is_around_an_agent_does_not_speak_for_it(
    playground: Playground, kind: str, how: str, marked: bool
) -> None:
    build, expected = PROGRAMS[kind]
    program = build(writer if marked else named)
    with playground.rollout(train=[] if marked else ["writer"]) as run:
        run_runnable(program, how, "hello")
    assert {user_message(call): call.agent for call in run.trace.calls} == expected


@pytest.mark.parametrize("how", ["invoke", "ainvoke", "stream", "astream"])
def test_a_path_of_run_names(playground: Playground, how: str) -> None:
    red, blue = ((named | (lambda m: m.text)).with_config(run_name=team) for team in ("red", "blue"))
    with playground.rollout(train=["blue/writer"]) as run:
        run_runnable(red | blue, how, "hello")
    assert [call.agent for call in run.trace.calls] == [None, "blue/writer"]
    assert "blue" in run.trace.events[0].attributes[DECLARED_AGENTS]


def test_names_of_branches_that_were_not_taken_are_declared(playground: Playground) -> None:
    other = (RunnableLambda(lambda x: x) | llm).with_config(run_name="other")
    program = RunnableBranch((lambda _: True, named), other) | StrOutputParser()
    with playground.rollout(train=["other"]) as run:
        program.invoke("hello")
    assert {"writer", "other"} <= set(run.trace.events[0].attributes[DECLARED_AGENTS])
    assert [call.agent for call in run.trace.calls] == [None]
