"""When a rollout gives its slot to another one."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import AsyncExitStack, suppress
from typing import Any

from lightning_core.endpoint.activity import Silence
from lightning_core.rollouts.concurrency import ConcurrencyLimit, Slot


async def usual_rollouts(limit: ConcurrencyLimit, *, seconds: float, before: float = 0.0, after: float = 0.0) -> None:
    """Ten rollouts of ``seconds`` that end well, with these longest silences."""
    for _ in range(10):
        async with limit.hold() as slot:
            slot.begin(lambda: Silence(True, 0.0, (before, after)), lambda: None)
            slot.began -= seconds
            limit.ended_well(slot)


async def given_up(limit: ConcurrencyLimit, *silences: Silence) -> tuple[list[bool], list[bool]]:
    """Of rollouts with ``silences``: which give up their slots, and which get a lower priority."""
    watch = asyncio.ensure_future(limit.watch())
    async with AsyncExitStack() as stack:
        slots: list[Slot] = []
        for silence in silences:
            slot = await stack.enter_async_context(limit.hold())
            slot.begin(lambda silence=silence: silence, lambda: None)
            slots.append(slot)
        await asyncio.sleep(0.3)
        found = [slot.given_up for slot in slots], [slot.slow for slot in slots]
    watch.cancel()
    with suppress(asyncio.CancelledError):
        await watch
    return found


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(work)


def test_a_silence_is_long_by_the_time_of_a_usual_rollout() -> None:
    async def main() -> None:
        short, long = ConcurrencyLimit(4), ConcurrencyLimit(4)
        await usual_rollouts(short, seconds=0.1)
        await usual_rollouts(long, seconds=1.0)
        silences = Silence(True, 0.03), Silence(True, 0.2)
        assert await given_up(short, *silences) == ([True, True], [False, False])
        assert await given_up(long, *silences) == ([False, True], [False, False])

    run(main())


def test_a_silence_is_compared_with_usual_ones_of_the_same_part() -> None:
    """A worker that is new is silent for longer before its first call, and a slow tool after it."""

    async def main() -> None:
        limit = ConcurrencyLimit(4)
        await usual_rollouts(limit, seconds=0.1, before=0.3, after=0.02)
        assert await given_up(limit, Silence(False, 0.4), Silence(True, 0.04), Silence(True, 0.02)) == (
            [False, True, False],
            [False, False, False],
        )
        assert await given_up(limit, Silence(False, 0.8), Silence(True, 0.3)) == ([True, True], [False, True])

    run(main())


def test_nothing_is_long_before_rollouts_have_ended_nor_with_one_slot() -> None:
    async def main() -> None:
        assert await given_up(ConcurrencyLimit(4), Silence(True, 100.0)) == ([False], [False])
        one = ConcurrencyLimit(1)
        await usual_rollouts(one, seconds=0.1)
        assert await given_up(one, Silence(True, 100.0)) == ([False], [True])

    run(main())


def test_at_most_three_times_the_slots_are_given_up() -> None:
    async def main() -> None:
        limit = ConcurrencyLimit(2)
        await usual_rollouts(limit, seconds=0.1)
        given, _ = await given_up(limit, *[Silence(True, 100.0)] * 8)
        assert sum(given) == 6

    run(main())
