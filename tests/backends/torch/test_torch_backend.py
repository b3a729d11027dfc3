"""Continuous batching equals the plain model, for any other requests in the batch and any cache contents."""

from __future__ import annotations

import asyncio
import math
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from lightning_core.backends.backend import Delta, SamplingParams
from lightning_core.backends.torch.engine import SampledModel, TorchBackend
from lightning_core.errors import InfrastructureError, PolicyRequestError
from lightning_core.model.compute import choose_path
from lightning_core.model.source import load_model
from tests.engine_stats import stats_of

pytestmark = pytest.mark.numeric

GREEDY = SamplingParams(max_tokens=6, temperature=0)


def make_backend(folder: Path, **options: object) -> TorchBackend:
    model = load_model(folder, torch.float32)
    sampled = SampledModel(model=model, path=choose_path(model))
    return TorchBackend(
        {"policy": sampled}, **{"max_context": 512, "max_batch": 64, "gather_ms": 20.0, "seed": 0, **options}
    )  # type: ignore[arg-type]


@pytest.fixture
def backend(tiny_model: Path) -> Iterator[TorchBackend]:
    backend = make_backend(tiny_model)
    yield backend
    backend.close()


@pytest.fixture
def plain(tiny_model: Path) -> torch.nn.Module:
    return load_model(tiny_model, torch.float32)


def reference_logprobs(
    model: torch.nn.Module, prompt: list[int], response: list[int], temperature: float = 1.0
) -> torch.Tensor:
    with torch.no_grad():
        logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits / temperature, -1).gather(1, torch.tensor(response)[:, None])[:, 0]


async def collect(
    backend: TorchBackend, prompt: list[int], params: SamplingParams, *, stream: bool = False, model: str = "policy"
) -> Delta:
    deltas = [delta async for delta in backend.generate(prompt, params, model=model, stream=stream)]
    assert [delta.finish_reason for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
    return Delta(
        token_ids=[token for delta in deltas for token in delta.token_ids],
        logprobs=[logprob for delta in deltas for logprob in delta.logprobs],
        version=deltas[-1].version,
        finish_reason=deltas[-1].finish_reason,
    )


def assert_equals_plain(model: torch.nn.Module, prompt: list[int], delta: Delta, temperature: float = 1.0) -> None:
    expected = reference_logprobs(model, prompt, list(delta.token_ids), temperature)
    torch.testing.assert_close(torch.tensor(delta.logprobs), expected, atol=1e-4, rtol=0)


def tokens(seed: int, count: int) -> list[int]:
    return random.Random(seed).choices(range(256), k=count)


def test_greedy_equals_plain_generate(backend: TorchBackend, plain: torch.nn.Module) -> None:
    prompt = tokens(1, 30)
    delta = asyncio.run(collect(backend, prompt, GREEDY))
    expected = plain.generate(torch.tensor([prompt]), max_new_tokens=6, do_sample=False, eos_token_id=None)  # type: ignore[operator]
    assert list(delta.token_ids) == expected[0, 30:].tolist()
    assert_equals_plain(plain, prompt, delta)


def test_prefixes_shared_by_groups(backend: TorchBackend, plain: torch.nn.Module) -> None:
    """A common prefix, three questions, four samples of each, at the same time: computed once, and correct for each row."""
    shared = tokens(1, 40)
    prompts = [shared + tokens(question, 10 + question) for question in range(3) for _ in range(4)]
    params = SamplingParams(max_tokens=7, temperature=0.7)

    async def run() -> list[Delta]:
        return await asyncio.gather(*(collect(backend, prompt, params) for prompt in prompts))

    for prompt, delta in zip(prompts, asyncio.run(run()), strict=True):
        assert_equals_plain(plain, prompt, delta, temperature=0.7)
    stats = stats_of(backend)
    assert stats.prompt_tokens == sum(map(len, prompts))
    # The prefix once, each question once, and each prompt's last token, which starts its row.
    assert stats.prompt_tokens_computed == 40 + (9 + 10 + 11) + 12
    assert stats.sampled_tokens == 12 * 7


def test_multi_turn_reuses_prompt_and_response(backend: TorchBackend, plain: torch.nn.Module) -> None:
    prompt = tokens(1, 50)
    for turn in range(4):
        before = stats_of(backend).prompt_tokens_computed
        delta = asyncio.run(collect(backend, prompt, SamplingParams(max_tokens=9)))
        assert_equals_plain(plain, prompt, delta)
        if turn:  # the last sampled token was never an input, then comes the observation of 11 tokens
            assert stats_of(backend).prompt_tokens_computed - before == 1 + 11
        prompt = prompt + list(delta.token_ids) + tokens(100 + turn, 11)


@pytest.mark.parametrize(
    ("tiny_model", "own_cost"),
    [
        ("llama", 4),
        ("qwen2", 0),
        *(pytest.param("llama", cost, marks=pytest.mark.long) for cost in (0, math.inf)),
        *(pytest.param("qwen2", cost, marks=pytest.mark.long) for cost in (4, math.inf)),
    ],
    indirect=["tiny_model"],
)
def test_staggered_arrival_and_departure(tiny_model: Path, plain: torch.nn.Module, own_cost: float) -> None:
    """Rows join and leave a running batch at any time; a small cache forces eviction, long runs force compaction."""
    backend = make_backend(tiny_model, max_batch=5, cached_tokens=100, gather_ms=0.0)
    backend._lanes["policy"]._cascade._own_cost = own_cost
    rng = random.Random(0)
    roots = [tokens(seed, 30) for seed in range(3)]

    async def one(index: int) -> None:
        await asyncio.sleep(rng.random() * 0.1)
        prompt = rng.choice(roots)[: rng.randint(1, 30)] + tokens(1000 + index % 7, rng.randint(0, 40))
        for _ in range(rng.randint(1, 3)):
            delta = await collect(
                backend, prompt, SamplingParams(max_tokens=rng.randint(1, 30)), stream=rng.random() < 0.5
            )
            assert_equals_plain(plain, prompt, delta)
            prompt = prompt + list(delta.token_ids) + tokens(index, rng.randint(0, 5))

    async def run() -> None:
        await asyncio.gather(*(one(index) for index in range(40)))

    asyncio.run(run())
    backend.close()


def test_a_seed_repeats_its_response_in_any_company(backend: TorchBackend) -> None:
    prompt = tokens(1, 20)
    params = SamplingParams(max_tokens=20, temperature=1.2, top_p=0.9, seed=7)

    async def with_others() -> Delta:
        others = [collect(backend, tokens(i, 15 + i), SamplingParams(max_tokens=20)) for i in range(5)]
        return (await asyncio.gather(collect(backend, prompt, params), *others))[0]

    alone = asyncio.run(collect(backend, prompt, params))
    assert asyncio.run(with_others()).token_ids == alone.token_ids
    other_seed = SamplingParams(max_tokens=20, temperature=1.2, seed=8)
    assert asyncio.run(collect(backend, prompt, other_seed)).token_ids != alone.token_ids


def test_stop_token_ends_the_response_and_is_part_of_it(backend: TorchBackend) -> None:
    prompt = tokens(1, 20)
    free = list(asyncio.run(collect(backend, prompt, GREEDY)).token_ids)
    params = SamplingParams(max_tokens=6, temperature=0, stop_token_ids=frozenset({free[2]}))
    stopped = asyncio.run(collect(backend, prompt, params, stream=True))
    assert list(stopped.token_ids) == free[: free.index(free[2]) + 1]
    assert stopped.finish_reason == "stop"


def test_a_response_that_cannot_fit_is_refused(backend: TorchBackend) -> None:
    with pytest.raises(PolicyRequestError, match="512"):
        backend.generate(tokens(1, 500), SamplingParams(max_tokens=13), model="policy")
    with pytest.raises(PolicyRequestError, match="unknown model 'gpt'"):
        backend.generate([1], GREEDY, model="gpt")


def test_closing_the_generator_aborts_the_response(backend: TorchBackend) -> None:
    async def run() -> None:
        generator = backend.generate(tokens(1, 10), SamplingParams(max_tokens=500), model="policy", stream=True)
        await anext(generator)
        await generator.aclose()
        await collect(backend, tokens(2, 10), GREEDY)

    asyncio.run(run())
    assert stats_of(backend).sampled_tokens < 400
    with backend.pause():
        assert not backend._lanes["policy"].rows


def test_a_step_that_hangs_ends_the_engine_and_holds_up_nobody(tiny_model: Path) -> None:
    backend, released = make_backend(tiny_model), threading.Event()
    backend._watch.limit = 0.2
    network = backend._models["policy"].model
    network.register_forward_pre_hook(lambda *_: released.wait() and None)
    network.get_input_embeddings().register_forward_pre_hook(lambda *_: released.wait() and None)
    try:
        for _ in range(2):
            with pytest.raises(InfrastructureError, match=r"has not finished a step in 0\.2 s; resume the run"):
                asyncio.run(collect(backend, [1, 2], GREEDY))
        with backend.pause():  # the weights can be saved
            pass
        backend.close()
        assert backend._thread.is_alive(), "it is left behind"
    finally:
        released.set()
        backend._thread.join(10)


def test_a_failing_step_fails_the_requests_and_not_the_engine(backend: TorchBackend) -> None:
    lane = backend._lanes["policy"]
    step, lane.step = lane.step, lambda: 1 / 0  # type: ignore[method-assign,assignment]
    with pytest.raises(InfrastructureError, match="ZeroDivisionError"):
        asyncio.run(collect(backend, tokens(1, 10), GREEDY))
    lane.step = step  # type: ignore[method-assign]
    assert len(asyncio.run(collect(backend, tokens(1, 10), GREEDY)).token_ids) == 6


def test_close_releases_those_who_wait(tiny_llama: Path) -> None:
    backend = make_backend(tiny_llama)

    async def run() -> None:
        task = asyncio.create_task(collect(backend, tokens(1, 10), SamplingParams(max_tokens=400)))
        await asyncio.sleep(0.1)
        backend.close()
        with pytest.raises(InfrastructureError, match="closed"):
            await task

    asyncio.run(run())


def test_running_rows_start_over_when_weights_change(tiny_llama: Path) -> None:
    """Tokens after the update are sampled from the new weights only, and each delta has its version."""
    backend = make_backend(tiny_llama)
    model = backend._lanes["policy"]._model
    prompt = tokens(1, 30)

    async def run() -> list[Delta]:
        deltas: list[Delta] = []
        async for delta in backend.generate(prompt, SamplingParams(max_tokens=300), model="policy", stream=True):
            deltas.append(delta)
            if len(deltas) == 5:
                with backend.pause():
                    backend.forget("policy")
                    model.model.layers[0].mlp.down_proj.weight.data *= 1.5
                    backend.versions["policy"] = 1
        return deltas

    deltas = asyncio.run(run())
    assert {delta.version for delta in deltas} == {0, 1}
    response = [token for delta in deltas for token in delta.token_ids]
    late = [logprob for delta in deltas if delta.version == 1 for logprob in delta.logprobs]
    new = load_model(tiny_llama, torch.float32)
    new.model.layers[0].mlp.down_proj.weight.data *= 1.5
    expected = reference_logprobs(new, prompt, response)[-len(late) :]
    torch.testing.assert_close(torch.tensor(late), expected, atol=1e-4, rtol=0)
    backend.close()
