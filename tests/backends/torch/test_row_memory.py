"""The memory of running rows is bounded: rows wait, or wait again, and their responses stay the same."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_core.backends.backend import Delta, SamplingParams
from lightning_core.backends.torch.engine import SampledModel, TorchBackend
from lightning_core.backends.torch.kv_pool import cached
from lightning_core.backends.torch.ragged_cache import RaggedBatch
from lightning_core.backends.torch.rows import ActiveRow
from lightning_core.backends.torch.waiting_order import WaitingOrder
from lightning_core.errors import InfrastructureError
from lightning_core.model.compute import choose_path, plain_path
from lightning_core.model.memory import steady_bytes
from lightning_core.model.source import load_model

pytestmark = pytest.mark.numeric

TOKEN = 2 * 2 * 2 * 16 * 4
"""Bytes of the keys and values of a token of the tiny model."""

Response = tuple[list[int], list[float]]


def tokens(seed: int, count: int) -> list[int]:
    return random.Random(seed).choices(range(256), k=count)


class Watched:
    """An engine whose steps are noted: the numbers of the running rows, and the bytes that they hold."""

    def __init__(self, folder: Path, *, row_tokens: int | None = None, plain: bool = False, **options: Any) -> None:
        """``row_tokens``: tokens that running rows may hold; None for no bound."""
        self.network: Any = load_model(folder, torch.float32)
        path = plain_path(self.network, "it is a test", attention="sdpa") if plain else choose_path(self.network)
        row_bytes = None if row_tokens is None else row_tokens * TOKEN * 3 // 2
        self.most = None if row_bytes is None else steady_bytes(row_bytes)
        self.engine = TorchBackend(
            {"policy": SampledModel(model=self.network, path=path)},
            **{"max_context": 2048, "max_batch": 64, "gather_ms": 20.0, "seed": 0, "row_bytes": row_bytes} | options,
        )
        self.steps: list[list[int]] = []
        self.held: list[int] = []
        self.lane: Any = self.engine._lanes["policy"]
        step = self.lane.step

        def noted() -> None:
            step()
            self.steps.append(sorted(row.number for row in self.lane.rows))
            self.held.append(self.lane.held_bytes)

        self.lane.step = noted

    def attempt(self, prompts: Sequence[list[int]], **params: Any) -> list[Response | BaseException]:
        """The responses to ``prompts``, which arrive together, or their errors."""

        async def one(number: int, prompt: list[int]) -> Response:
            ids, logprobs = list[int](), list[float]()
            options = SamplingParams(**{"max_tokens": 10, "seed": number} | params)
            async for delta in self.engine.generate(prompt, options, model="policy"):
                ids += delta.token_ids
                logprobs += delta.logprobs
            return ids, logprobs

        async def run() -> list[Response | BaseException]:
            responses = asyncio.gather(*(one(*item) for item in enumerate(prompts)), return_exceptions=True)
            return await asyncio.wait_for(responses, 120)

        return asyncio.run(run())

    def sample(self, prompts: Sequence[list[int]], **params: Any) -> list[Response]:
        """As `attempt`, but without errors."""
        found = self.attempt(prompts, **params)
        assert all(isinstance(response, tuple) for response in found), found
        return found  # type: ignore[return-value]

    def interrupted(self) -> set[int]:
        """Numbers of the rows that ran, did not run, and ran again."""
        began: dict[int, int] = {}
        ended: dict[int, int] = {}
        for step, rows in enumerate(self.steps):
            for number in rows:
                began.setdefault(number, step)
                ended[number] = step
        return {n for n in began if sum(n in rows for rows in self.steps) < ended[n] - began[n] + 1}


@contextmanager
def watched(folder: Path, **options: Any) -> Iterator[Watched]:
    found = Watched(folder, **options)
    try:
        yield found
    finally:
        found.engine.close()


def assert_same(found: Sequence[Response], expected: Sequence[Response]) -> None:
    assert [ids for ids, _ in found] == [ids for ids, _ in expected]
    for (_, logprobs), (_, same) in zip(found, expected, strict=True):
        torch.testing.assert_close(torch.tensor(logprobs), torch.tensor(same), atol=1e-4, rtol=0)


def mixed_prompts() -> list[list[int]]:
    """A group of three with one prompt, and two prompts of their own, of different lengths."""
    return [*[tokens(1, 150)] * 3, tokens(2, 80), tokens(3, 120)]


@pytest.mark.parametrize(
    ("path", "cached_tokens"),
    [
        ("tree", 16384),
        ("deterministic", 0),
        ("plain", 16384),
        ("plain", 0),
        pytest.param("tree", 0, marks=pytest.mark.long),
        pytest.param("deterministic", 16384, marks=pytest.mark.long),
    ],
)
def test_responses_are_the_same_in_little_memory(tiny_llama: Path, path: str, cached_tokens: int):
    deterministic = path == "deterministic"
    options = {"deterministic": deterministic, "plain": path == "plain", "cached_tokens": cached_tokens}
    with watched(tiny_llama, **options) as free:
        expected = free.sample(mixed_prompts(), max_tokens=260)
    with watched(tiny_llama, row_tokens=1000, **options) as bound:
        found = bound.sample(mixed_prompts(), max_tokens=260)
    assert bound.most is not None
    assert max(bound.held) <= bound.most < max(free.held)
    assert bound.interrupted()
    assert not free.interrupted()
    assert bound.lane.preempted >= len(bound.interrupted())
    if deterministic:
        assert found == expected
    else:
        assert_same(found, expected)


@pytest.mark.parametrize("plain", [False, True])
def test_memory_is_used_before_rows_wait(tiny_llama: Path, plain: bool):
    """Twenty rows of 100 tokens of their own and 10 sampled ones, and room for ten of them."""
    with watched(tiny_llama, row_tokens=1200, gather_ms=300, plain=plain) as bound:
        bound.sample([tokens(number, 100) for number in range(20)])
        assert max(map(len, bound.steps)) == 10
        assert not bound.interrupted()


def test_a_prompt_of_several_responses_is_kept_once(tiny_llama: Path):
    with watched(tiny_llama, row_tokens=1200, gather_ms=300) as bound:
        bound.sample([tokens(1, 100)] * 20)
        assert max(map(len, bound.steps)) == 20


@pytest.mark.parametrize("plain", [False, True])
def test_rows_start_in_the_order_of_their_arrival(tiny_llama: Path, plain: bool):
    """A long row does not fit beside the first ones; short ones after it would, but wait for it."""
    lengths = [200, 200, 700, 10, 10, 10]
    with watched(tiny_llama, row_tokens=1000, plain=plain) as bound:
        bound.sample([tokens(number, length) for number, length in enumerate(lengths)], max_tokens=30)
        starts = [next(step for step, rows in enumerate(bound.steps) if number in rows) for number in range(6)]
    assert starts == sorted(starts)
    assert starts[1] < starts[2]


@pytest.mark.parametrize("path", ["tree", "deterministic", "plain"])
def test_a_row_that_is_longer_than_the_bound_runs_alone(tiny_llama: Path, path: str):
    prompts = [tokens(number, 900 if number == 3 else 50) for number in range(6)]
    options = {"deterministic": path == "deterministic", "plain": path == "plain"}
    with watched(tiny_llama, **options) as free:
        expected = free.sample(prompts)
    with watched(tiny_llama, row_tokens=600, **options) as bound:
        assert_same(bound.sample(prompts), expected)
        assert [rows for rows in bound.steps if 3 in rows] == [[3]] * 10
        assert max(bound.held) > (bound.most or 0)
        assert max(h for h, rows in zip(bound.held, bound.steps, strict=True) if rows != [3]) <= (bound.most or 0)


@pytest.mark.parametrize("plain", [False, True])
def test_rows_that_outgrow_the_bound_end_one_after_another(tiny_llama: Path, plain: bool):
    with watched(tiny_llama, row_tokens=400 if plain else 300, plain=plain) as bound:
        found = bound.sample([tokens(number, 5) for number in range(3)], max_tokens=200)
        assert [len(ids) for ids, _ in found] == [200] * 3
        assert 1 in bound.interrupted()
        last = [max(step for step, rows in enumerate(bound.steps) if number in rows) for number in range(3)]
        assert last == sorted(last)
        assert max(h for h, rows in zip(bound.held, bound.steps, strict=True) if len(rows) > 1) <= (bound.most or 0)


def test_tokens_of_a_row_that_waits_again_have_the_version_that_sampled_them(tiny_llama: Path):
    with watched(tiny_llama, row_tokens=500, cached_tokens=0) as bound:
        engine = bound.engine
        sampled: dict[int, int] = {}

        async def one(number: int) -> list[Delta]:
            params = SamplingParams(max_tokens=200, seed=number)
            return [d async for d in engine.generate(tokens(number, 30), params, model="policy")]

        async def update() -> None:
            while True:
                with engine.pause():
                    if any(row.tokens for row in bound.lane.waiting):
                        sampled.update({r.number: len(r.tokens) for r in (*bound.lane.waiting, *bound.lane.rows)})
                        engine.forget("policy")
                        engine.versions["policy"] = 1
                        return
                await asyncio.sleep(0.002)

        async def run() -> list[list[Delta]]:
            return (await asyncio.gather(*map(one, range(4)), update()))[:4]  # type: ignore[return-value]

        for number, deltas in enumerate(asyncio.run(run())):
            old = sum(len(delta.token_ids) for delta in deltas if delta.version == 0)
            assert old == sampled.get(number, 200)
            assert sum(len(delta.token_ids) for delta in deltas) == 200


Fails = Callable[[Watched, torch.Tensor], bool]


def fail_when(one: Watched, fails: Fails) -> None:
    """Passes for which ``fails`` is true find no memory."""

    def check(_: Any, arguments: tuple[torch.Tensor]) -> None:
        if fails(one, arguments[0]):
            raise RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory\nstack")

    one.network.get_input_embeddings().register_forward_pre_hook(check)


@pytest.mark.parametrize("plain", [False, True])
def test_rows_for_which_memory_is_missing_wait(tiny_llama: Path, plain: bool):
    """Passes of more than two rows fail."""
    prompts = [tokens(number, 20 + number) for number in range(8)]
    with watched(tiny_llama, plain=plain) as free:
        expected = free.sample(prompts, temperature=0.8)
    with watched(tiny_llama, plain=plain, gather_ms=300) as short:
        fail_when(short, lambda one, _: len(one.lane.rows) > 2)
        assert_same(short.sample(prompts, temperature=0.8), expected)
        assert max(map(len, short.steps)) == 2  # half of half of eight
        with short.engine.pause():  # after the last step
            assert not short.engine._most_rows, "once the engine is idle, it tries again"


@pytest.mark.parametrize("plain", [False, True])
def test_only_a_row_that_does_not_fit_alone_fails(tiny_llama: Path, plain: bool):
    """The pass over a prompt of 400 tokens fails in any company."""
    prompts = [tokens(number, 400 if number == 2 else 20) for number in range(4)]
    with watched(tiny_llama, plain=plain) as free:
        expected = free.sample(prompts)
    with watched(tiny_llama, plain=plain, gather_ms=300) as short:
        fail_when(short, lambda _, inputs: inputs.numel() > 300)
        found = short.attempt(prompts)
        again = short.sample(prompts[:2])
    failure = found.pop(2)
    assert isinstance(failure, InfrastructureError)
    assert "DefaultCPUAllocator: can't allocate memory, with no other response beside it; it has 400 tokens" in str(
        failure
    )
    assert "lower policy.max_context" in str(failure)
    assert_same(found, [*expected[:2], *expected[3:]])  # type: ignore[arg-type]
    assert_same(again, expected[:2])


@pytest.mark.parametrize("plain", [False, True])
def test_an_allocation_that_fails_while_a_row_is_preempted_changes_no_response(
    tiny_llama: Path, plain: bool, monkeypatch: Any
):
    prompts = [tokens(number, 5) for number in range(8)]
    options = {"plain": True} if plain else {"deterministic": True}
    with watched(tiny_llama, row_tokens=800, **options) as free:
        expected = free.sample(prompts, max_tokens=200)
    with watched(tiny_llama, row_tokens=800, **options) as short:
        cache, keep = (short.lane._prefixes, "add") if plain else (short.lane._pool, "insert")
        insert, failed = getattr(cache, keep), list[bool]()

        def fail_once(*arguments: Any) -> None:
            if not failed and short.lane.preempted and len(short.lane.rows) > 3:
                failed.append(True)
                raise MemoryError
            insert(*arguments)

        monkeypatch.setattr(cache, keep, fail_once)
        assert_same(short.sample(prompts, max_tokens=200), expected)
        assert failed
        assert all(len(set(rows)) == len(rows) for rows in short.steps)


def test_a_context_for_which_memory_is_missing_leaves_no_request_behind(tiny_llama: Path, monkeypatch: Any):
    context, calls = ActiveRow.context, list[int]()

    def fail_once(row: ActiveRow) -> Any:
        if row.number == 2 and not calls:
            calls.append(1)
            raise MemoryError
        return context(row)

    monkeypatch.setattr(ActiveRow, "context", fail_once)
    with watched(tiny_llama, plain=True, gather_ms=300, cached_tokens=0) as short:
        assert len(short.sample([tokens(number, 5) for number in range(4)])) == 4
        assert calls


def test_an_allocation_that_fails_between_two_batches_changes_no_response(tiny_llama: Path, monkeypatch: Any):
    prompts = [tokens(0, 1900), *(tokens(number, 5) for number in range(1, 7))]
    monkeypatch.setattr("lightning_core.backends.torch.plain_lane._PADDED", 0)  # the long one gets a batch of its own
    with watched(tiny_llama, plain=True, gather_ms=300) as free:
        expected = free.sample(prompts, max_tokens=20)
    add, calls = RaggedBatch.add, list[int]()

    def fail_second(*arguments: Any, **options: Any) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise MemoryError
        add(*arguments, **options)

    with watched(tiny_llama, plain=True, gather_ms=300) as short:
        monkeypatch.setattr(RaggedBatch, "add", fail_second)
        assert_same(short.sample(prompts, max_tokens=20), expected)
        assert len(calls) > 2
        assert all(len(set(rows)) == len(rows) for rows in short.steps)


def test_an_allocation_that_fails_while_a_token_is_drawn_changes_no_response(tiny_llama: Path, monkeypatch: Any):
    from lightning_core.backends.torch import rows

    prompts = [tokens(number, 20) for number in range(4)]
    with watched(tiny_llama, deterministic=True) as one:
        expected = one.sample(prompts)
        draw, calls = rows.sample_tokens, iter(range(1000))

        def failing(*arguments: Any) -> Any:
            if next(calls) == 4:
                raise MemoryError
            return draw(*arguments)

        monkeypatch.setattr(rows, "sample_tokens", failing)
        assert one.sample(prompts) == expected


def test_the_cache_holds_no_more_than_its_tokens(tiny_llama: Path):
    """A long context of which only the beginning stays, because other prompts share it."""
    with watched(tiny_llama, cached_tokens=120) as one:
        long = tokens(1, 600)
        one.sample([long])
        for number in range(3):
            one.sample([long[:40] + tokens(10 + number, 20)])
        with one.engine.pause():  # after the last step, which also removes from the cache
            memory = {
                tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
                for tensor in itertools.chain.from_iterable(cached(list(one.lane._pool.nodes())))
            }
        assert 0 < sum(memory.values()) <= 120 * TOKEN


def conversations(found: Watched, *, count: int, turns: int, turn: int) -> list[int]:
    """Hold conversations at the same time, with ``turn`` new tokens a turn; returns the numbers of the requests in which they end."""
    ends: list[int] = []

    async def one(number: int) -> None:
        prompt = tokens(number, turn)
        for index in range(turns):
            options = SamplingParams(max_tokens=4, seed=number)
            parts = [delta.token_ids async for delta in found.engine.generate(prompt, options, model="policy")]
            prompt = [*prompt, *itertools.chain(*parts), *tokens(1000 * number + index, turn)]
        ends.append(number)

    async def all_of_them() -> None:
        await asyncio.wait_for(asyncio.gather(*map(one, range(count))), 120)

    asyncio.run(all_of_them())
    return ends


@pytest.mark.parametrize("plain", [False, True])
def test_conversations_that_do_not_fit_together_are_not_computed_again(tiny_model: Path, plain: bool) -> None:
    """The contexts of half of the conversations fit. In the order of arrival nearly all of them would be dropped before the next turn, and
    twice as many tokens would be computed."""
    count, turns, turn = 16, 5, 60
    room: dict[str, Any] = {"plain": True, "max_batch": 3} if plain else {"row_tokens": 3 * turns * turn}
    with watched(tiny_model, cached_tokens=count * turns * turn // 2, **room) as found:
        ends = conversations(found, count=count, turns=turns, turn=turn)
        computed, least = found.lane.prompt_tokens_computed, count * turns * turn
    assert sorted(ends) == list(range(count))
    assert computed < 1.5 * least, f"{computed} tokens were computed, {least} are different"


def test_a_request_without_a_cached_context_does_not_wait_forever(tiny_model: Path) -> None:
    """Other requests with a cached context come without end."""
    with watched(tiny_model, row_tokens=300, max_batch=2, cached_tokens=2000) as found:
        common = tokens(0, 100)
        found.sample([common])

        async def run() -> int:
            others, done = 0, asyncio.Event()

            async def other(number: int) -> None:
                nonlocal others
                while not done.is_set():
                    await drain([*common, *tokens(number, 2)])
                    others += 1

            async def drain(prompt: list[int]) -> None:
                async for _ in found.engine.generate(prompt, SamplingParams(max_tokens=2, seed=0), model="policy"):
                    pass

            busy = [asyncio.create_task(other(number)) for number in range(8)]
            while others < 4:
                await asyncio.sleep(0.01)
            before = others
            await asyncio.wait_for(drain(tokens(99, 50)), 120)
            done.set()
            await asyncio.gather(*busy)
            return others - before

        assert asyncio.run(run()) < 60


def test_one_in_four_rows_that_start_is_the_oldest() -> None:
    """Also if many start at once. Interrupted responses come first, aborted ones not at all."""

    def row(number: int, cached: int, **state: Any) -> ActiveRow:
        return ActiveRow(prompt=np.arange(cached + 1), params=SamplingParams(max_tokens=1), number=number, **state)

    def known(tokens: Any, adapter: str | None) -> int:
        return len(tokens)

    order, waiting = WaitingOrder(), deque([row(number, 0) for number in range(8)])
    waiting.extend(row(number, number) for number in range(8, 40))
    waiting.append(row(40, 5, tokens=[1]))
    waiting.append(row(41, 99, aborted=True))
    waiting[1].aborted = True
    started: list[int] = []
    for size in (1, 16, 3, 12):
        order.arrange(waiting, 0, known)
        started += [waiting.popleft().number for _ in range(size)]
        order.started(size)
    assert started[0] == 40
    assert started[3::4] == [0, 2, 3, 4, 5, 6, 7, 8]
    others = [number for place, number in enumerate(started[1:], 2) if place % 4]
    assert others == sorted(others, reverse=True)
    assert not {1, 41} & {*started, *(left.number for left in waiting)}
