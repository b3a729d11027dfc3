"""The policy endpoint in front of vLLM, with the real openai client."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from lightning_core.backends.backend import SamplingParams
from lightning_core.backends.vllm.backend import VllmBackend
from lightning_core.capture import ActiveRollout, current_address, rollout, scope
from lightning_core.chat.chat import Chat
from lightning_core.endpoint.server import PolicyEndpoint, Routing
from lightning_core.model.source import load_tokenizer
from tests.vllm.reference import Reference

HI: list[Any] = [{"role": "user", "content": "hi"}]
TOOLS: list[Any] = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
TEMPERATURE = 0.7


@pytest.fixture
def endpoint(backend: VllmBackend, model: Path) -> Iterator[PolicyEndpoint]:
    with PolicyEndpoint(backend, Chat(load_tokenizer(model))) as endpoint:
        yield endpoint


@pytest.fixture
def run(endpoint: PolicyEndpoint) -> Iterator[ActiveRollout]:
    key = endpoint.new_key()
    with rollout({"id": "t"}, endpoint=endpoint.url, api_key=key) as run:
        routing = Routing(trained=frozenset({"writer"}), temperature=TEMPERATURE, max_tokens=48)
        endpoint.open(key, run.address, routing, seed=3)
        yield run
        endpoint.close(key)


@pytest.fixture
def client(run: ActiveRollout, endpoint: PolicyEndpoint) -> Iterator[OpenAI]:
    with scope("writer"):
        address = current_address()
        assert address is not None
        assert run.api_key is not None
        headers = address.to_headers()
        with OpenAI(base_url=endpoint.url, api_key=run.api_key, max_retries=0, default_headers=headers) as client:
            yield client


def assert_recorded_tokens_are_those_of_the_weights(run: ActiveRollout, folder: Path, *, calls: int) -> None:
    reference = Reference(folder)
    assert len(run.trace.calls) == calls
    for call in run.trace.calls:
        assert call.prompt_ids is not None
        assert call.output_ids is not None
        assert call.logprobs is not None
        assert (call.model, call.policy_version, call.temperature) == ("policy", 0, TEMPERATURE)
        params = SamplingParams(max_tokens=48, temperature=TEMPERATURE)
        reference.assert_logprobs(call.prompt_ids.tolist(), call.output_ids.tolist(), call.logprobs.tolist(), params)


def test_whole_streamed_and_several_choices(client: OpenAI, run: ActiveRollout, model: Path):
    answer = client.chat.completions.create(model="gpt", messages=HI, logprobs=True)
    choice = answer.choices[0]
    assert choice.logprobs is not None
    assert answer.usage is not None
    assert len(choice.logprobs.content or ()) == answer.usage.completion_tokens
    chunks = list(client.chat.completions.create(model="gpt", messages=HI, stream=True))
    assert len(chunks) > 3
    said = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    many = client.chat.completions.create(model="gpt", messages=HI, n=2)
    assert len({c.message.content for c in many.choices}) == 2
    calls = run.trace.calls
    assert calls[0].response == {"role": "assistant", "content": choice.message.content}
    assert calls[1].response == {"role": "assistant", "content": said}
    assert_recorded_tokens_are_those_of_the_weights(run, model, calls=4)


def test_tools_and_a_second_turn_continue_the_tokens(client: OpenAI, run: ActiveRollout, model: Path):
    first = client.chat.completions.create(model="gpt", messages=HI, tools=TOOLS).choices[0].message
    turn = [*HI, {"role": "assistant", "content": first.content}, {"role": "user", "content": "and?"}]
    client.chat.completions.create(model="gpt", messages=turn, tools=TOOLS)
    one, two = run.trace.calls
    assert one.prompt_ids is not None
    assert one.output_ids is not None
    assert two.prompt_ids is not None
    so_far = [*one.prompt_ids, *one.output_ids]
    assert two.prompt_ids.tolist()[: len(so_far)] == so_far
    assert two.context == "clean"
    assert '"name": "add"' in load_tokenizer(model).decode(one.prompt_ids.tolist())
    assert_recorded_tokens_are_those_of_the_weights(run, model, calls=2)


def test_a_stop_string_cuts_the_text_and_ends_the_sampling(
    endpoint: PolicyEndpoint, client: OpenAI, run: ActiveRollout, model: Path
):
    """The run has no seed here, so the request's seed makes the text repeatable."""
    routing = Routing(trained=frozenset({"writer"}), temperature=TEMPERATURE, max_tokens=48)
    endpoint.open(run.api_key or "", run.address, routing)
    free = client.chat.completions.create(model="gpt", messages=HI, seed=5).choices[0].message.content or ""
    stop = next(c for c in free[3:] if c.isascii() and c.isprintable())
    cut = client.chat.completions.create(model="gpt", messages=HI, seed=5, stop=[stop]).choices[0]
    assert cut.message.content == free[: free.index(stop)]
    assert cut.finish_reason == "stop"
    whole, ended = (len(call.output_ids) for call in run.trace.calls if call.output_ids is not None)
    assert ended < whole
    assert_recorded_tokens_are_those_of_the_weights(run, model, calls=2)


def test_a_client_that_hangs_up_ends_the_sampling(endpoint: PolicyEndpoint, client: OpenAI, run: ActiveRollout):
    routing = Routing(trained=frozenset({"writer"}), temperature=TEMPERATURE, max_tokens=3000)
    endpoint.open(run.api_key or "", run.address, routing, seed=3)
    stream = client.chat.completions.create(model="gpt", messages=HI, stream=True)
    next(iter(stream))
    stream.close()
    deadline = time.monotonic() + 60
    while not run.trace.calls:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    (call,) = run.trace.calls
    assert call.error is not None
    assert "the client closed the connection" in call.error


def test_clients_see_no_error_while_weights_change(
    endpoint: PolicyEndpoint, client: OpenAI, run: ActiveRollout, backend: VllmBackend, other_model: Path
):
    # The most likely tokens repeat in cycles, so that no response ends by chance before the push.
    routing = Routing(trained=frozenset({"writer"}), temperature=0, max_tokens=1500)
    endpoint.open(run.api_key or "", run.address, routing, seed=4)
    reasons: list[str | None] = []
    begun = threading.Event()

    def ask(i: int) -> None:
        if i:
            answer = client.chat.completions.create(model="gpt", messages=HI, seed=i)
            reasons.append(answer.choices[0].finish_reason)
        else:
            stream = client.chat.completions.create(model="gpt", messages=HI, seed=i, stream=True)
            chunks = [next(stream)]
            begun.set()
            chunks += stream
            reasons.append(chunks[-1].choices[0].finish_reason)

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    assert begun.wait(60)
    backend.push(other_model, 1)
    for thread in threads:
        thread.join(60)
    assert [reason in ("stop", "length") for reason in reasons] == [True] * 4
    assert [c.error for c in run.trace.calls] == [None] * 4
    assert 1 in {c.policy_version for c in run.trace.calls}
