"""Structured output: only tokens that the schema allows are sampled, and training uses the same distribution."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
import torch
from agents import (
    Agent,
    MaxTurnsExceeded,
    ModelBehaviorError,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    RunConfig,
    Runner,
    function_tool,
)
from pydantic import BaseModel

from lightning_core.backends.backend import Delta, SamplingParams
from lightning_core.capture import rollout
from lightning_core.chat.chat import Chat
from lightning_core.endpoint.server import PolicyEndpoint, Routing
from lightning_core.errors import ConstraintError
from lightning_core.model.constraint import Constraints
from lightning_core.model.source import load_model
from lightning_core.trainers.torch.factory import open_trainer
from lightning_core.trainers.torch.trainer import TorchTrainer
from lightning_core.transitions import Row, trace_to_transitions, transitions_to_rows
from tests.trainers.sections import parts

pytestmark = pytest.mark.numeric

SCHEMA = {
    "type": "object",
    "properties": {"verdict": {"enum": ["right", "wrong"]}, "points": {"type": "integer", "minimum": 0, "maximum": 20}},
    "required": ["verdict", "points"],
    "additionalProperties": False,
}


STOP_TOOL: Any = {"type": "function", "function": {"name": "stop"}}


@pytest.fixture(scope="module")
def trainer(tiny_llama: Path) -> Iterator[TorchTrainer]:
    trainer = open_trainer(**parts(model=str(tiny_llama), dtype="float32", learning_rate=1e-2, gather_ms=2.0))
    yield trainer
    trainer.close()


def sample(trainer: TorchTrainer, prompt: list[int], params: SamplingParams) -> Delta:
    async def run() -> Delta:
        return [delta async for delta in trainer.backend.generate(prompt, params, model="policy")][-1]

    return asyncio.run(run())


def test_a_random_model_writes_only_what_the_schema_allows(trainer: TorchTrainer) -> None:
    chat = Chat(trainer.model.tokenizer)
    answers: set[str] = set()
    for seed in range(20):
        params = SamplingParams(
            max_tokens=60, seed=seed, stop_token_ids=chat.stop_token_ids, json_schema=json.dumps(SCHEMA)
        )
        delta = sample(trainer, [1, 2, 3, seed], params)
        assert delta.finish_reason == "stop"
        text = chat.text(delta.token_ids)
        value = json.loads(text)
        assert list(value) == ["verdict", "points"]
        assert value["verdict"] in ("right", "wrong")
        assert 0 <= value["points"] <= 20
        answers.add(text)
    assert len(answers) > 5


def test_a_schema_without_finite_values_fails_its_own_response_only(trainer: TorchTrainer) -> None:
    endless = {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"], "additionalProperties": False}
    constrained = SamplingParams(max_tokens=60, stop_token_ids=frozenset({258}), json_schema=json.dumps(endless))

    async def run() -> list[Delta | BaseException]:
        async def one(params: SamplingParams) -> Delta:
            return [delta async for delta in trainer.backend.generate([1, 2, 3], params, model="policy")][-1]

        return await asyncio.gather(one(SamplingParams(max_tokens=60)), one(constrained), return_exceptions=True)

    other, failed = asyncio.run(run())
    assert isinstance(other, Delta)
    assert len(other.token_ids) == 60
    assert isinstance(failed, ConstraintError)
    assert "the response cannot follow the JSON schema" in str(failed)
    assert len(str(failed)) < 400


def test_logprobs_are_those_among_the_allowed_tokens(trainer: TorchTrainer, tiny_llama: Path) -> None:
    params = SamplingParams(
        max_tokens=60, temperature=0.7, seed=3, stop_token_ids=frozenset({258}), json_schema=json.dumps(SCHEMA)
    )
    prompt = [1, 2, 3]
    delta = sample(trainer, prompt, params)
    plain = load_model(tiny_llama, torch.float32)
    with torch.no_grad():
        logits = plain(torch.tensor([[*prompt, *delta.token_ids]])).logits[0, len(prompt) - 1 : -1]
    assert params.constraint is not None
    allowed = Constraints(trainer.model.tokenizer, logits.shape[1]).allowed(params.constraint, delta.token_ids)
    for at, allowed_V in enumerate(allowed):
        among = torch.log_softmax(logits[at].masked_fill(torch.from_numpy(~allowed_V), -torch.inf) / 0.7, -1)
        assert float(among[delta.token_ids[at]]) == pytest.approx(delta.logprobs[at], abs=1e-4)


def test_a_trained_agent_with_structured_output_from_request_to_update(trainer: TorchTrainer) -> None:
    """The trainer computes the sampler's logprobs, for constrained and free responses in one batch."""
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "verdict", "schema": SCHEMA}}
    rows: list[Row] = []
    with PolicyEndpoint(trainer.backend, Chat(trainer.model.tokenizer)) as endpoint:
        for number in range(4):
            key = endpoint.new_key()
            with rollout("judge") as run:
                endpoint.open(key, run.address, Routing(trained=frozenset({"judge"}), max_tokens=60), seed=number)
                headers = {**run.address.to_headers(), "lightning-agent": "judge"}
                with openai.OpenAI(
                    base_url=endpoint.url, api_key=key, default_headers=headers, max_retries=0
                ) as client:
                    messages: list[Any] = [{"role": "user", "content": "judge"}]
                    judged = client.chat.completions.create(model="x", messages=messages, response_format=wanted)
                    client.chat.completions.create(model="x", messages=messages, max_tokens=5)
                    asked: dict[str, Any] = {"model": "x", "messages": messages, "tools": [STOP_TOOL]}
                    forced = client.chat.completions.create(**asked, tool_choice="required")
                    client.chat.completions.create(**asked, parallel_tool_calls=False, max_tokens=5)
                endpoint.close(key)
            assert json.loads(judged.choices[0].message.content or "")["verdict"] in ("right", "wrong")
            transitions = trace_to_transitions(run.trace, agents={"judge"})
            assert [t.constraint is None for t in transitions] == [False, True, False, False]
            assert forced.choices[0].message.tool_calls
            rows += transitions_to_rows(transitions, {t.call: 1.0 if number % 2 else -1.0 for t in transitions})
    metrics = trainer.step(rows)
    assert metrics["logprob_difference_max"] < 1e-4
    assert metrics["grad_norm"] > 0


class Verdict(BaseModel):
    """The typed output of an agent."""

    verdict: Literal["right", "wrong"]
    points: Literal[1, 2, 3]


def test_an_agent_with_tools_and_a_typed_output_does_both(trainer: TorchTrainer) -> None:
    """A random model of the OpenAI Agents SDK: each of its responses is a tool call or the typed output, and trains."""
    looked: list[str] = []

    @function_tool
    def look_up(topic: Literal["law", "case"]) -> str:
        """Look up a topic."""
        looked.append(topic)
        return "found"

    verdicts: list[Verdict] = []
    rows: list[Row] = []
    with PolicyEndpoint(trainer.backend, Chat(trainer.model.tokenizer)) as endpoint:
        for number, api in enumerate([OpenAIChatCompletionsModel, OpenAIResponsesModel] * 2):
            key = endpoint.new_key()
            with rollout("judge") as run:
                endpoint.open(key, run.address, Routing(trained=frozenset({"judge"}), max_tokens=200), seed=number)
                headers = {**run.address.to_headers(), "lightning-agent": "judge"}

                async def judge(key: str = key, headers: dict[str, str] = headers, api: Any = api) -> Any:
                    async with openai.AsyncOpenAI(
                        base_url=endpoint.url, api_key=key, default_headers=headers, max_retries=0
                    ) as client:
                        agent = Agent("judge", model=api("x", client), tools=[look_up], output_type=Verdict)
                        return await Runner.run(
                            agent, "judge", max_turns=3, run_config=RunConfig(tracing_disabled=True)
                        )

                # The SDK raises ModelBehaviorError for a response that was cut after its first call.
                with suppress(MaxTurnsExceeded, ModelBehaviorError):
                    verdicts.append(asyncio.run(judge()).final_output)
                endpoint.close(key)
            transitions = trace_to_transitions(run.trace, agents={"judge"})
            rows += transitions_to_rows(transitions, {t.call: 1.0 if number % 2 else -1.0 for t in transitions})
    assert looked
    assert verdicts
    assert all(isinstance(verdict, Verdict) for verdict in verdicts)
    assert trainer.step(rows)["logprob_difference_max"] < 1e-4


PATTERN = {"type": "object", "properties": {"a": {"type": "string", "pattern": "(("}}, "required": ["a"]}
ONE_OF = {"type": "array", "items": {"oneOf": [{"type": "string"}, {"type": "string", "minLength": 2}]}}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("schema", "tools", "field", "why"),
    [
        ({"type": "strin"}, None, "response_format", "response_format: this JSON schema is not supported: "),
        ({"not": {"type": "object"}}, None, "response_format", "response_format: this JSON schema is not supported: "),
        (PATTERN, None, "response_format", r"in properties.a, regex parse error: \(\( error: unclosed group. Rewrite this part"),
        (ONE_OF, None, "response_format", "in items, oneOf constraints are not supported. Use anyOf in place of oneOf. Rewrite"),
        ({"type": "integer", "maximum": 2**64}, None, "response_format", "response_format: this JSON schema is not supported: .*Rewrite"),
        ({"type": "object", "properties": {"a": None}}, None, "response_format", "not supported: in properties.a, .*Rewrite"),
        ({"anyOf": [None]}, None, "response_format", "response_format: this JSON schema is not supported: .*Rewrite"),
        ({"$ref": "#"}, None, "response_format", "response_format: .*: no text satisfies it. Check that values of a finite size"),
        ({}, {"type": "object", "properties": 5}, "tools", "tools|the tool 'g'"),
        ({}, PATTERN, "tools", "the parameters of the tool 'g': .* in properties.a, regex parse error"),
    ],
)  # fmt: skip
def test_an_unsupported_schema_is_a_400_that_names_its_place(
    trainer: TorchTrainer, schema: dict[str, Any], tools: Any, field: str, why: str, stream: bool
) -> None:
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    functions = [{"type": "function", "function": {"name": n, "parameters": p}} for n, p in (("f", {}), ("g", tools))]
    with PolicyEndpoint(trainer.backend, Chat(trainer.model.tokenizer)) as endpoint, rollout("t") as run:
        key = endpoint.new_key()
        endpoint.open(key, run.address, Routing(trained=frozenset({"a"})))
        headers = {**run.address.to_headers(), "lightning-agent": "a"}
        with openai.OpenAI(base_url=endpoint.url, api_key=key, default_headers=headers, max_retries=0) as client:
            body: Any = {"messages": [{"role": "user", "content": "hi"}], "response_format": wanted, "stream": stream}
            with pytest.raises(openai.BadRequestError, match=why) as raised:
                client.chat.completions.create(model="x", **body, **({"tools": functions} if tools else {}))
        assert raised.value.param == field
        endpoint.close(key)
    assert not run.infrastructure


def test_a_backend_without_a_tokenizer_refuses_to_constrain(tiny_llama: Path) -> None:
    from tests.backends.torch.test_torch_backend import make_backend

    backend = make_backend(tiny_llama)
    try:
        with pytest.raises(ConstraintError, match=r"does not support structured output"):
            backend.check(SamplingParams(max_tokens=5, json_schema="{}"))
    finally:
        backend.close()
