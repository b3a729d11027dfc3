"""The playground: rollouts of an agent against a scripted model; all patches are removed at the end."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import httpx
import openai
import pytest

from lightning_core import Trace, trace_to_transitions, trainable
from lightning_core.backends.scripted import ScriptedBackend
from lightning_core.capture import current_rollout, scope
from lightning_core.capture.integration import active_integrations, discover
from lightning_core.errors import InfrastructureError
from lightning_core.testing import open_playground, playground, tool_call

ADD: list[Any] = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


def ask(text: str, *, model: str = "gpt-4o-mini", **options: Any) -> Any:
    """One model call with a client for the provider; returns the message of the response."""
    with openai.OpenAI(api_key="sk-own", max_retries=0) as client:
        messages: list[Any] = [{"role": "user", "content": text}]
        return client.chat.completions.create(model=model, messages=messages, **options).choices[0].message


@trainable("writer")
def write(text: str) -> str:
    return ask(text).content


@trainable("writer")
async def write_async(text: str) -> str:
    async with openai.AsyncOpenAI(api_key="sk-own", max_retries=0) as client:
        answer = await client.chat.completions.create(model="m", messages=[{"role": "user", "content": text}])
    return answer.choices[0].message.content or ""


def prompts(trace: Trace) -> list[str]:
    return [call.messages[-1]["content"] for call in trace.calls]


def test_a_marked_agent_is_trained_and_the_others_are_answered_under_the_model_they_name() -> None:
    with playground(["one", "two"], train=["writer"], task={"id": "t"}, integrations=()) as run:
        assert write("a") == "one"
        assert ask("b", model="gpt-5").content == "two"
    assert [(call.agent, call.model) for call in run.trace.calls] == [("writer", "policy"), (None, "gpt-5")]
    assert run.task_id == "t"
    (transition,) = trace_to_transitions(run.trace, agents={"writer"})
    assert bytes(transition.output_ids[:-1].tolist()) == b"one"


def test_a_script_may_be_a_function_of_the_prompt_and_call_tools() -> None:
    def script(prompt: str) -> str:
        return tool_call("add", a=1, b="ü") if "sum" in prompt else "no"

    with playground(script, train=[], integrations=()):
        (call,) = ask("the sum", tools=ADD).tool_calls
        assert (call.function.name, call.function.arguments) == ("add", '{"a": 1, "b": "ü"}')
        assert ask("else", tools=ADD).content == "no"


def test_an_async_agent() -> None:
    async def work() -> Trace:
        with playground(["one"], train=["writer"], integrations=()) as run:
            assert await write_async("a") == "one"
        return run.trace

    assert [call.agent for call in asyncio.run(work()).calls] == ["writer"]


def test_several_rollouts_one_after_the_other_and_at_once() -> None:
    together = threading.Barrier(2)

    with open_playground(lambda prompt: "yes", integrations=()) as opened:
        with opened.rollout(train=["writer"]) as first:
            write("first")
        with opened.rollout() as second:
            write("second")

        def attempt(name: str) -> Trace:
            with opened.rollout(train=["writer"]) as run:
                together.wait(10)
                write(name)
                write(name)
            return run.trace

        with ThreadPoolExecutor(2) as pool:
            left, right = pool.map(attempt, ["left", "right"])
    assert prompts(first.trace) == ["first"]
    assert prompts(second.trace) == ["second"]
    assert first.trace.calls[0].model == "policy"
    assert second.trace.calls[0].model == "gpt-4o-mini"
    assert (prompts(left), prompts(right)) == (["left"] * 2, ["right"] * 2)


def attributes() -> list[tuple[str, int]]:
    """Attributes of the patched classes by identity: a wrapper compares equal to the function that it wraps."""
    patched = (httpx.Client, httpx.AsyncClient, threading.Thread, ThreadPoolExecutor)
    return [(name, id(value)) for owner in patched for name, value in vars(owner).items()]


@pytest.mark.parametrize("error", [None, ValueError("the agent's own")])
def test_everything_is_undone_at_the_end(error: Exception | None) -> None:
    before, threads, integrations = attributes(), threading.enumerate(), active_integrations()
    with (
        pytest.raises(ValueError, match="own") if error else nullcontext(),
        playground(["one"], train=["writer"]) as run,
    ):
        assert attributes() != before
        assert active_integrations() == frozenset(discover()) - {"langchain"}
        write("a")
        if error is not None:
            raise error
    assert attributes() == before
    assert active_integrations() == integrations
    assert set(threading.enumerate()) <= set(threads)  # those of earlier tests may end meanwhile
    assert current_rollout() is None
    assert run.trace.error == (None if error is None else "ValueError: the agent's own")
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{run.endpoint}/models")


def test_only_the_named_integrations_are_installed() -> None:
    with open_playground([], integrations=["openai-agents"]):
        assert active_integrations() == {"openai-agents"}


def test_an_exhausted_script_reports_its_length_and_the_prompt() -> None:
    expected = "no more answers after 1; the prompt of this request ends with .*why"
    with playground(["one"], train=["writer"], integrations=(), strict=False):
        write("a")
        with pytest.raises(openai.InternalServerError, match=expected):
            write("why?")


def test_an_error_that_the_agent_swallows_is_raised_at_the_end() -> None:
    with (
        pytest.raises(InfrastructureError, match=r"a model request of the agent failed: .*no more answers after 0"),
        playground([], train=["writer"], integrations=()) as run,
        pytest.raises(openai.InternalServerError),
    ):
        write("a")
    with playground([], train=["writer"], integrations=(), strict=False) as run, pytest.raises(openai.APIError):
        write("a")
    assert len(run.infrastructure) == 1


def test_a_value_that_is_not_a_script_is_rejected() -> None:
    with pytest.raises(TypeError, match="found a string: put it into a list"), open_playground("yes", integrations=()):
        pass
    with pytest.raises(TypeError, match=r"pass train=\['writer'\]"), playground(["a"], train="writer", integrations=()):
        pass
    with (
        pytest.raises(TypeError, match=r"pass chats=Chat\(tokenizer\)"),
        open_playground(ScriptedBackend([]), integrations=()),
    ):
        pass


def test_a_rollout_has_the_settings_of_its_trained_agents() -> None:
    with playground(["abcdef"], train=["writer"], max_tokens=3, integrations=()) as run, scope("writer"):
        assert ask("a", max_tokens=50).content == "abc"
    assert run.trace.calls[0].finish_reason == "length"


def test_importing_it_needs_neither_pytest_nor_torch_nor_a_framework_and_the_contract_names_what_to_install() -> None:
    heavy = {"pytest", "torch", "transformers", "openai", "langchain_core"}
    program = f"""
import sys, lightning_core.testing
print({heavy} & set(sys.modules) or "none")
sys.modules["pytest"] = None
try:
    import lightning_core.testing.contract
except ModuleNotFoundError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "none\nlightning_core.testing.contract requires pytest: pip install pytest\n"
