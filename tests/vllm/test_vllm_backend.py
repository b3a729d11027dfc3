"""Tokens, logprobs and versions from a real vLLM server equal those of the weights."""

from __future__ import annotations

import asyncio
import json
import re
from contextlib import aclosing, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from lightning_core.backends.backend import Delta, SamplingParams
from lightning_core.backends.vllm.backend import VllmBackend
from lightning_core.chat.chat import Chat, Memory
from lightning_core.chat.output_grammar import AllowedCalls
from lightning_core.errors import InfrastructureError, PolicyRequestError
from lightning_core.model.source import load_tokenizer
from lightning_core.trace import POLICY
from tests.vllm.reference import Reference, collect, join, sample, tokens

END = 256
"""The tiny model's end of turn."""


def metric(server: str, backend: VllmBackend, name: str) -> float:
    """The server's counter, after some requests: it may be seconds behind otherwise."""
    sample(backend, [1], SamplingParams(max_tokens=1))
    return float(re.findall(rf"^vllm:{name}{{.*}} (.*)$", httpx.get(f"{server}/metrics").text, re.MULTILINE)[0])


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_logprobs_are_those_of_the_distribution_that_sampled(backend: VllmBackend, model: Path, stream: bool):
    """At the same time, so that settings are mixed in one batch."""
    settings = [(0.0, 1.0), (0.7, 1.0), (1.0, 1.0), (1.3, 1.0), (1.0, 0.8), (0.7, 0.5)]
    params = [SamplingParams(max_tokens=40, temperature=t, top_p=p, seed=7) for t, p in settings for _ in range(2)]
    prompts = [tokens(i, 5 + 7 * i) for i in range(len(params))]

    async def run() -> list[list[Delta]]:
        pairs = zip(prompts, params, strict=True)
        return await asyncio.gather(*(collect(backend.generate(p, s, model="policy", stream=stream)) for p, s in pairs))

    reference = Reference(model)
    for prompt, setting, deltas in zip(prompts, params, asyncio.run(run()), strict=True):
        response = join(deltas)
        assert len(response.token_ids) == 40
        assert response.finish_reason == "length"
        assert (len(deltas) > 1) == stream
        assert {d.version for d in deltas} == {0}
        reference.assert_logprobs(prompt, response.token_ids, response.logprobs, setting)


SCHEMA = {
    "type": "object",
    "properties": {"verdict": {"enum": ["right", "wrong"]}, "points": {"type": "integer", "minimum": 0, "maximum": 20}},
    "required": ["verdict", "points"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "grade", "parameters": SCHEMA}}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_constraint_is_followed_with_the_logprobs_that_the_trainer_computes(
    backend: VllmBackend, model: Path, stream: bool
):
    """A schema, a required call and at most one call, beside responses without constraints."""
    chat = Chat(load_tokenizer(model), stop_token_ids={10})
    prompt = chat.render([{"role": "user", "content": "judge"}], [TOOL], Memory())
    kinds: list[dict[str, Any]] = [{}, {"json_schema": json.dumps(SCHEMA)}]
    for required in (True, False):
        calls = AllowedCalls(tools=[TOOL], required=required, one=True)
        kinds.append({"grammar": chat.output_grammar(None, calls, prompt.text)})
    params = [
        SamplingParams(max_tokens=90, temperature=t, seed=seed, stop_token_ids=chat.stop_token_ids, **kind)
        for kind in kinds
        for t, seed in ((0.0, 1), (0.7, 2))
    ]

    async def run() -> list[list[Delta]]:
        asked = (backend.generate(prompt.ids, p, model="policy", stream=stream) for p in params)
        return await asyncio.gather(*map(collect, asked))

    reference = Reference(model)
    for setting, deltas in zip(params, asyncio.run(run()), strict=True):
        backend.check(setting)
        response = join(deltas)
        reference.assert_logprobs(prompt.ids, response.token_ids, response.logprobs, setting)
        message = chat.parse(response.token_ids, tools=True, declared=[TOOL])
        if setting.json_schema is not None:
            assert json.loads(message["content"])["verdict"] in ("right", "wrong")
        elif setting.grammar == kinds[2].get("grammar"):
            assert [call["function"]["name"] for call in message["tool_calls"]] == ["grade"]


def test_a_seed_repeats_its_response(backend: VllmBackend):
    params = SamplingParams(max_tokens=20, temperature=1.2, top_p=0.9, seed=(1 << 62) + 3)
    first = sample(backend, tokens(1, 20), params)
    assert sample(backend, tokens(1, 20), params, stream=True).token_ids == first.token_ids
    other = SamplingParams(max_tokens=20, temperature=1.2, top_p=0.9, seed=8)
    assert sample(backend, tokens(1, 20), other).token_ids != first.token_ids


def test_any_of_several_stop_tokens_ends_the_response_and_is_part_of_it(backend: VllmBackend):
    free = list(sample(backend, tokens(1, 20), SamplingParams(max_tokens=12, temperature=0)).token_ids)
    for stop in {free[0], free[4]}:
        stops = frozenset({stop, next(i for i in range(256) if i not in free)})
        params = SamplingParams(max_tokens=12, temperature=0, stop_token_ids=stops)
        for stream in (False, True):
            response = sample(backend, tokens(1, 20), params, stream=stream)
            assert list(response.token_ids) == free[: free.index(stop) + 1]
            assert response.finish_reason == "stop"


def test_the_models_own_end_token_does_not_stop_a_response_unless_requested(backend: VllmBackend):
    async def run() -> list[list[Delta]]:
        params = [SamplingParams(max_tokens=120, temperature=2.0, seed=seed) for seed in range(16)]
        return await asyncio.gather(*(collect(backend.generate([1, 2], p, model="policy")) for p in params))

    responses = [join(deltas) for deltas in asyncio.run(run())]
    assert [len(r.token_ids) for r in responses] == [120] * 16
    assert any(END in r.token_ids for r in responses)


def test_closing_the_generator_aborts_the_response(backend: VllmBackend, server: str):
    async def run(*, stream: bool) -> None:
        params = SamplingParams(max_tokens=4000)
        deltas = backend.generate(tokens(1, 10), params, model="policy", stream=stream)
        response = asyncio.ensure_future(anext(deltas))
        if stream:
            await response
        else:
            beside = backend.generate(tokens(2, 10), params, model="policy", stream=True)
            await anext(beside)
            await beside.aclose()
            response.cancel()
            await asyncio.wait([response])
        await deltas.aclose()

    for stream in (True, False):
        before = metric(server, backend, "generation_tokens_total")
        asyncio.run(run(stream=stream))
        while metric(server, backend, "num_requests_running") > 0:
            pass
        sampled = metric(server, backend, "generation_tokens_total") - before
        assert sampled < 3900, "it was aborted, not sampled to its end"


def test_what_cannot_be_sampled_is_refused(backend: VllmBackend):
    assert backend.max_context == 4096
    with pytest.raises(PolicyRequestError, match="4096"):
        backend.generate(tokens(1, 4000), SamplingParams(max_tokens=97), model="policy")
    with pytest.raises(PolicyRequestError, match="unknown model 'base'"):
        backend.generate([1], SamplingParams(max_tokens=1), model="base")
    with pytest.raises(PolicyRequestError, match=r"temperature is 0\.005"):
        backend.check(SamplingParams(max_tokens=1, temperature=0.005))
    with pytest.raises(PolicyRequestError, match="this JSON schema is not supported"):
        backend.check(SamplingParams(max_tokens=1, json_schema='{"not": {"type": "object"}}'))


def test_a_request_that_the_server_refuses_is_an_infrastructure_error(backend: VllmBackend):
    for stream in (False, True):
        with pytest.raises(InfrastructureError, match="out of vocabulary"):
            sample(backend, [100_000], SamplingParams(max_tokens=1), stream=stream)


def test_pushed_weights_are_those_that_sample(backend: VllmBackend, model: Path, other_model: Path):
    for version, folder in enumerate([other_model, model, other_model], start=1):
        backend.push(folder, version)
        assert backend.version == version
        params = SamplingParams(max_tokens=30, temperature=0.7)
        response = sample(backend, tokens(3, 200), params)  # the same prompt: no value may come from a cache
        assert response.version == version
        Reference(folder).assert_logprobs(tokens(3, 200), response.token_ids, response.logprobs, params)


def test_responses_under_way_live_through_a_push(backend: VllmBackend, model: Path, other_model: Path, server: str):
    """More requests than the server runs at once, some streamed: each continues under the new weights."""
    weights = [model, other_model, model]
    references = [Reference(folder) for folder in weights]
    params = SamplingParams(max_tokens=600, temperature=1.0, seed=5)

    async def run() -> list[list[Delta]]:
        deltas = [backend.generate(tokens(i, 30), params, model="policy", stream=i % 5 == 0) for i in range(1, 20)]
        others = [asyncio.create_task(collect(d)) for d in deltas]
        # This response shows when the server is active, and under which weights. It cannot end before a slow push.
        pushes: list[asyncio.Task[None]] = []
        first: list[Delta] = []
        long = replace(params, max_tokens=4000)
        async with aclosing(backend.generate(tokens(0, 30), long, model="policy", stream=True)) as response:
            async for delta in response:
                first.append(delta)
                # Tokens, because a busy server sends many of them in one delta.
                if sum(len(d.token_ids) for d in first if d.version == len(pushes)) < 20:
                    continue
                version = len(pushes) + 1
                if version == len(weights):
                    break
                pushes.append(asyncio.create_task(asyncio.to_thread(backend.push, weights[version], version)))
        await asyncio.gather(*pushes)
        return [first, *await asyncio.gather(*others)]

    versions: list[set[int]] = []
    for i, deltas in enumerate(asyncio.run(run())):
        response = join(deltas)
        assert i == 0 or len(response.token_ids) == 600
        assert [d.version for d in deltas] == sorted(d.version for d in deltas)
        versions.append({d.version for d in deltas})
        end = 0
        for version in sorted(versions[-1]):
            logprobs = [p for d in deltas if d.version == version for p in d.logprobs]
            start, end = end, end + len(logprobs)
            references[version].assert_logprobs(tokens(i, 30), response.token_ids[:end], logprobs, params, start=start)
    assert versions[0] == {0, 1, 2}
    assert sum(len(v) > 1 for v in versions) >= 4


@pytest.mark.parametrize("seconds", [60, 0])
def test_a_constrained_response_is_of_one_version(
    backend: VllmBackend, model: Path, other_model: Path, monkeypatch: pytest.MonkeyPatch, seconds: int
):
    """The server follows a constraint from the first token of a request on, so a push waits for the response; not for ever."""
    monkeypatch.setattr("lightning_core.backends.vllm.backend.WHOLE_SECONDS", seconds)
    # An interrupted response must not end before a slow push.
    length = 120 if seconds else 2000
    schema = json.dumps({"type": "string", "minLength": length})
    constrained = SamplingParams(max_tokens=length, seed=5, json_schema=schema, stop_token_ids=frozenset({END}))

    async def run() -> list[Delta]:
        other = backend.generate(tokens(1, 30), constrained, model="policy", stream=False)
        whole, push = asyncio.create_task(collect(other)), None
        deltas: list[Delta] = []
        with nullcontext() if seconds else pytest.raises(InfrastructureError, match="interrupted by new weights"):
            async for delta in backend.generate(tokens(0, 30), constrained, model="policy", stream=True):
                deltas.append(delta)
                if push is None:
                    push = asyncio.create_task(asyncio.to_thread(backend.push, other_model, 1))
        assert push is not None
        await push
        assert {delta.version for delta in deltas} == {0}
        if seconds:
            response = join(deltas)
            Reference(model).assert_logprobs(tokens(0, 30), response.token_ids, response.logprobs, constrained)
        return await whole

    (delta,) = asyncio.run(run())
    assert delta.version == (0 if seconds else 1)
    assert len(delta.token_ids) == length
    weights = Reference(model if seconds else other_model)
    weights.assert_logprobs(tokens(1, 30), delta.token_ids, delta.logprobs, constrained)


def test_an_abort_by_another_program_is_an_error_and_not_a_shorter_response(backend: VllmBackend, server: str):
    async def run() -> None:
        deltas = backend.generate(tokens(1, 10), SamplingParams(max_tokens=4000), model="policy", stream=True)
        await anext(deltas)
        async with httpx.AsyncClient(base_url=server) as client:
            await client.post("/pause", params={"mode": "abort"})
            with pytest.raises(InfrastructureError, match="another program paused it"):
                await collect(deltas)
            await client.post("/resume")

    asyncio.run(run())


def test_a_server_that_another_run_left_paused_is_resumed(server: str):
    httpx.post(f"{server}/pause", timeout=20).raise_for_status()
    assert len(sample(VllmBackend(server, model=POLICY), tokens(1, 9), SamplingParams(max_tokens=3)).token_ids) == 3


def test_a_closed_backend_refuses(backend: VllmBackend):
    backend.close()
    with pytest.raises(InfrastructureError, match="closed"):
        sample(backend, [1], SamplingParams(max_tokens=1))
