"""A typed output that is cut or does not parse is the failure of the model: the SDK's error ends the rollout with reward 0."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from agents import Agent, OpenAIChatCompletionsModel, OpenAIResponsesModel, RunConfig, Runner
from anthropic import Anthropic
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel

from lightning_core.capture import current_address, current_rollout, scope
from lightning_core.endpoint.server import PolicyEndpoint
from lightning_core.transitions import trace_to_transitions
from tests.endpoint.serving import HI, WRITER, serve
from tests.rollouts.executor_runs import numbered, run


class Verdict(BaseModel):
    """The typed output."""

    verdict: str


@pytest.fixture
def endpoint() -> Iterator[PolicyEndpoint]:
    """Answers with half a document."""
    with serve(lambda prompt: '{"verdict": "ri') as endpoint:
        yield endpoint


def connection() -> dict[str, Any]:
    current = current_rollout()
    assert current is not None
    with scope("writer"):
        address = current_address()
    assert address is not None
    return {
        "base_url": current.endpoint,
        "api_key": current.api_key,
        "default_headers": address.to_headers(),
        "max_retries": 0,
    }


def by_chat_completions() -> Any:
    return OpenAI(**connection()).chat.completions.parse(model="m", messages=HI, response_format=Verdict, max_tokens=8)


def by_responses() -> Any:
    return OpenAI(**connection()).responses.parse(model="m", input="hi", text_format=Verdict).output_parsed


def by_messages() -> Any:
    settings = connection()
    client = Anthropic(**{**settings, "base_url": settings["base_url"].removesuffix("/v1")})
    return client.messages.parse(model="m", max_tokens=64, messages=HI, output_format=Verdict).parsed_output


def by_agents_sdk(api: Any) -> Any:
    agent = Agent("writer", model=api("m", AsyncOpenAI(**connection())), output_type=Verdict)
    return Runner.run_sync(agent, "hi", run_config=RunConfig(tracing_disabled=True)).final_output


@pytest.mark.parametrize(
    ("ask", "error"),
    [
        (by_chat_completions, "LengthFinishReasonError"),
        (by_responses, "ValidationError"),
        (by_messages, "ValidationError"),
        (lambda: by_agents_sdk(OpenAIChatCompletionsModel), "ModelBehaviorError"),
        (lambda: by_agents_sdk(OpenAIResponsesModel), "ModelBehaviorError"),
    ],
    ids=["chat", "responses", "messages", "agents-chat", "agents-responses"],
)
def test_an_error_of_an_sdk_over_its_typed_output_is_reward_0_and_trained(
    endpoint: PolicyEndpoint, ask: Callable[[], Any], error: str
) -> None:
    def solve(task: Any) -> float:
        ask()
        return 1.0

    (rollout,) = run(endpoint, solve, numbered(1), settings={"concurrency": 1}, routing=WRITER, retries=2)
    assert (rollout.status, rollout.reward, rollout.attempt) == ("failed", 0.0, 0)
    assert error in (rollout.error or "")
    assert len(trace_to_transitions(rollout.trace, agents={"writer"})) == 1
