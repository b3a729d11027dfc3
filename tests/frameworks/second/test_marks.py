"""Frameworks without agents of their own, or without names for them: the functions that call them are marked."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any, ClassVar

import dspy
import instructor
import litellm
import openai
import pytest
from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel
from pydantic import BaseModel

from lightning_core import trainable
from lightning_core.capture.elsewhere import CONNECTION
from lightning_core.testing import Playground, tool_call
from lightning_core.trace import REASON
from tests.frameworks.naming import Naming, question, request


class Marked(Naming):
    """Two marked functions, each of which gets a prompt."""

    tools = False

    @staticmethod
    def ask(prompt: str) -> Any:
        raise NotImplementedError

    @staticmethod
    async def aask(prompt: str) -> Any:
        raise NotImplementedError

    def run(self, number: int) -> None:
        trainable("calculator")(self.ask)(question(number))
        trainable("writer")(self.ask)(request(number))

    async def arun(self, number: int) -> None:
        await trainable("calculator")(self.aask)(question(number))
        await trainable("writer")(self.aask)(request(number))


class TestLiteLLM(Marked):
    @staticmethod
    def ask(prompt: str) -> Any:
        return litellm.completion("openai/gpt-5-mini", [{"role": "user", "content": prompt}])

    @staticmethod
    async def aask(prompt: str) -> Any:
        return await litellm.acompletion("openai/gpt-5-mini", [{"role": "user", "content": prompt}])


class Answer(BaseModel):
    text: str


class TestInstructor(Marked):
    script: ClassVar[Callable[[str], str]] = staticmethod(lambda prompt: tool_call("Answer", text="done"))

    @staticmethod
    def ask(prompt: str) -> Any:
        client = instructor.from_openai(openai.OpenAI())
        return client.chat.completions.create(
            model="gpt-5-mini", response_model=Answer, messages=[{"role": "user", "content": prompt}]
        )

    @staticmethod
    async def aask(prompt: str) -> Any:
        client = instructor.from_openai(openai.AsyncOpenAI())
        return await client.chat.completions.create(
            model="gpt-5-mini", response_model=Answer, messages=[{"role": "user", "content": prompt}]
        )


class TestMiniSweAgent(Marked):
    script: ClassVar[Callable[[str], str]] = staticmethod(
        lambda prompt: tool_call("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; echo done")
    )

    @staticmethod
    def ask(prompt: str) -> Any:
        agent = DefaultAgent(
            LitellmModel(model_name="openai/gpt-5-mini", cost_tracking="ignore_errors"),
            LocalEnvironment(),
            system_template="You use bash.",
            instance_template="{{task}}",
        )
        outcome = agent.run(prompt)
        assert outcome["submission"] == "done\n"

    @staticmethod
    async def aask(prompt: str) -> Any:
        await asyncio.to_thread(TestMiniSweAgent.ask, prompt)


def lm(**settings: Any) -> dspy.LM:
    return dspy.LM("openai/gpt-5-mini", cache=False, num_retries=0, **settings)


class TestDSPy(Marked):
    """With LiteLLM as its engine, which the program chooses."""

    script: ClassVar[Callable[[str], str]] = staticmethod(lambda prompt: "[[ ## answer ## ]]\ndone")

    @staticmethod
    def ask(prompt: str) -> Any:
        with dspy.context(lm=lm(engine="litellm")):
            assert dspy.Predict("question -> answer")(question=prompt).answer == "done"

    @staticmethod
    async def aask(prompt: str) -> Any:
        with dspy.context(lm=lm(engine="litellm")):
            assert (await dspy.Predict("question -> answer").acall(question=prompt)).answer == "done"


def test_the_own_engine_of_dspy_is_counted_as_elsewhere(playground: Playground) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with playground.rollout() as run, pytest.raises(Exception, match=r"(?i)refused"):
        lm(api_base=f"http://127.0.0.1:{port}/v1")("hello")
    assert not run.trace.calls
    (event,) = [event for event in run.trace.events if event.kind == "elsewhere"]
    assert (event.name, event.attributes[REASON]) == (f"127.0.0.1:{port}", CONNECTION)
