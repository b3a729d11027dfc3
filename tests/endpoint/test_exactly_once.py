"""Random programs of agents over real HTTP: every sampled token reaches the loss exactly once, with its own logprob.

A program grows a tree of conversations: it continues an earlier one (a branch, if that was continued before), repeats a request, requests
several responses, alternates between agents, sends changed responses back, and is cut off. Each sampled token has a unique logprob, which
identifies it in the loss.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_core import rollout, trace_to_transitions, transitions_to_rows
from lightning_core.backends.backend import Delta, SamplingParams
from lightning_core.backends.scripted import ByteTokenizer
from lightning_core.capture import ActiveRollout
from lightning_core.chat.chat import Chat
from lightning_core.endpoint.server import PolicyEndpoint, Routing
from lightning_core.trainers.torch.packing import pack_rows
from lightning_core.trainers.torch.proof import prove_batch, prove_once


class TwoEndsTokenizer(ByteTokenizer):
    """A response ends with either of two tokens, as with models whose template and tokenizer name different ones."""

    eos_token = "<|im_start|>"


class LoggingBackend:
    """Samples from a seeded generator, and records the samples."""

    models = ("policy", "base")
    max_context = 1 << 16

    def __init__(self) -> None:
        self.tokenizer = TwoEndsTokenizer()
        self.policy_sampled: list[tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...]]] = []
        self._numbers = itertools.count(1)
        self._random = random.Random(0)

    def start_over(self, seed: int) -> None:
        self.policy_sampled.clear()
        self._numbers = itertools.count(1)
        self._random = random.Random(seed)

    def check(self, params: SamplingParams) -> None:
        pass

    async def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, *, model: str, stream: bool = False
    ) -> AsyncGenerator[Delta]:
        assert params.stop_token_ids == {256, 257}
        letters = self._random.choices(b"ab \n", k=self._random.randint(0, 5))
        ids = [*letters, self._random.choice([256, 257])][: params.max_tokens]
        logprobs = [-next(self._numbers) / 1024 for _ in ids]  # exact in float32
        parts = [slice(i, i + 1) for i in range(len(ids))] if stream else [slice(None)]
        handed_over = 0
        try:
            for part in parts:
                last = part == parts[-1]
                finish = ("stop" if ids[-1] >= 256 else "length") if last else None
                handed_over += len(ids[part])
                version = 7 if model == "policy" else None
                yield Delta(token_ids=ids[part], logprobs=logprobs[part], version=version, finish_reason=finish)
        finally:  # a stop string ends a response early
            if model == "policy":
                sampled = (tuple(prompt_ids), tuple(ids[:handed_over]), tuple(logprobs[:handed_over]))
                self.policy_sampled.append(sampled)


@dataclass(frozen=True)
class Ask:
    """One request: the agent, the conversation that it continues, and the API."""

    agent: str
    continues: int
    again: bool
    edit: bool
    text: str
    n: int
    max_tokens: int
    stop: tuple[str, ...]
    stream: bool


asks = st.builds(
    Ask,
    agent=st.sampled_from(["writer", "writer", "critic", "bystander"]),
    continues=st.integers(0, 20),
    again=st.booleans(),
    edit=st.sampled_from([False, False, True]),
    text=st.sampled_from(["x", "y", "<|im_end|>"]),
    n=st.sampled_from([1, 1, 3]),
    max_tokens=st.sampled_from([2, 64]),
    stop=st.sampled_from([(), (), ("b",)]),
    stream=st.booleans(),
)


@pytest.fixture(scope="module")
def backend() -> LoggingBackend:
    return LoggingBackend()


@pytest.fixture(scope="module")
def endpoint(backend: LoggingBackend) -> Iterator[PolicyEndpoint]:
    with PolicyEndpoint(backend, Chat(backend.tokenizer)) as served:
        yield served


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    with httpx.Client() as client:
        yield client


def play(program: list[Ask], endpoint: PolicyEndpoint, http: httpx.Client) -> ActiveRollout:
    routing = Routing(trained=frozenset({"writer", "critic"}), temperature=1.0, max_tokens=64)
    key = endpoint.new_key()
    conversations: list[list[dict[str, Any]]] = [[]]
    with rollout("program") as run:
        endpoint.open(key, run.address, routing)
        for ask in program:
            messages = conversations[ask.continues % len(conversations)]
            if ask.edit and messages:
                messages = [*messages[:-1], {**messages[-1], "content": messages[-1]["content"].strip()}]
            messages = [*messages, {"role": "user", "content": ask.text}]
            body = {"model": "base", "messages": messages, "n": ask.n, "max_tokens": ask.max_tokens, "stop": ask.stop}
            headers = {**run.address.to_headers(), "lightning-agent": ask.agent, "authorization": f"Bearer {key}"}
            for _ in range(1 + ask.again):
                url = f"{endpoint.url}/chat/completions"
                if ask.stream:
                    http.post(url, json={**body, "stream": True}, headers=headers).raise_for_status()
                    continue
                answer = http.post(url, json=body, headers=headers).raise_for_status().json()
                conversations += [[*messages, choice["message"]] for choice in answer["choices"]]
        endpoint.close(key)
    return run


@pytest.mark.parametrize("examples", [20, pytest.param(80, marks=pytest.mark.long)])
def test_every_sampled_token_reaches_the_loss_once(
    backend: LoggingBackend, endpoint: PolicyEndpoint, http: httpx.Client, examples: int
) -> None:
    @given(program=st.lists(asks, min_size=1, max_size=10), seed=st.integers(0, 1000), budget=st.integers(1, 200))
    @settings(max_examples=examples, deadline=None, derandomize=True)
    def prove(program: list[Ask], seed: int, budget: int) -> None:
        prove_program(backend, endpoint, http, program, seed, budget)

    prove()


def prove_program(
    backend: LoggingBackend, endpoint: PolicyEndpoint, http: httpx.Client, program: list[Ask], seed: int, budget: int
) -> None:
    backend.start_over(seed)
    run = play(program, endpoint, http)

    transitions = trace_to_transitions(run.trace, agents={"writer", "critic"})
    found = [(tuple(t.prompt_ids), tuple(t.output_ids), tuple(t.logprobs)) for t in transitions]
    assert sorted(found) == sorted(backend.policy_sampled)
    if not transitions:
        return
    rows = transitions_to_rows(transitions, {t.call: 1.0 for t in transitions})
    sampled = [logprob for _, _, logprobs in backend.policy_sampled for logprob in logprobs]
    assert sum(int(row.mask.sum()) for row in rows) == len(sampled)

    prove_once(rows)
    trained: list[float] = []
    for batch in pack_rows(rows, range(len(rows)), budget=budget):
        logprobs_E = batch.gather([row.logprobs for row in rows])
        prove_batch(rows, batch, logprobs_E)
        trained += logprobs_E.tolist()
    assert sorted(trained) == sorted(sampled)
