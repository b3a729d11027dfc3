"""The memory of the plain path: which batches rows are added to, and when blocks are copied."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from lightning_core.backends.backend import SamplingParams
from lightning_core.backends.torch.cache_check import CachedPasses, bytes_per_token, check_cache
from lightning_core.backends.torch.plain_lane import PlainLane
from lightning_core.backends.torch.ragged_cache import RaggedBatch, emptied
from lightning_core.backends.torch.rows import ActiveRow
from lightning_core.model.memory import steady_bytes
from lightning_core.model.source import load_model
from tests.model.families import FAMILIES, make_family

pytestmark = pytest.mark.numeric

BATCHED = ["llama", "gpt_oss", "qwen3_5_text"]
"""Full attention, sliding windows, recurrent states."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Models that no test changes, so each is checked once."""
    folders = {name: make_family(FAMILIES[name], tmp_path_factory.mktemp(name)) for name in BATCHED}
    return {name: load_model(folder, torch.float32) for name, folder in folders.items()}


def lane_for(model: Any, *, row_tokens: int | None = None) -> PlainLane:
    """``row_tokens``: tokens that running rows may hold; None for no bound."""
    lane = PlainLane(model, check_cache(model, "past_key_values"), cache="past_key_values")
    if row_tokens is not None:
        lane.bound(row_tokens * bytes_per_token(model, "past_key_values") * 3 // 2)
    return lane


def add_rows(lane: PlainLane, *lengths: int, first: int = 0, max_tokens: int = 100) -> list[ActiveRow]:
    """Let rows with prompts of ``lengths`` tokens wait, and start those that fit. ``first``: the number of the first."""
    rows = [
        ActiveRow(
            prompt=np.asarray(random.Random(number).choices(range(3, 250), k=length)),
            params=SamplingParams(max_tokens=max_tokens),
            number=number,
            random=random.Random(number),
        )
        for number, length in enumerate(lengths, first)
    ]
    lane.waiting.extend(rows)
    lane.admit(rows=64, tokens=100_000)
    return rows


def finish(lane: PlainLane) -> None:
    """Step until all running rows are complete."""
    while lane.rows:
        lane.step()
        lane.drop(lambda row: row.finish_reason() is not None)


def test_short_rows_share_a_batch_beside_long_ones_that_fill_the_memory(models: dict[str, Any]) -> None:
    """They can be padded to the long ones, but a fourth long one does not fit."""
    model, passes = models["llama"], list[int]()

    def sample(row_tokens: int | None) -> tuple[list[ActiveRow], int]:
        """The rows, and the number of passes of a step with all of them."""
        lane = lane_for(model, row_tokens=row_tokens)
        rows = add_rows(lane, *[400] * 3, max_tokens=10)
        lane.step()
        lane.admit(rows=64, tokens=100_000)  # their contexts do not fit twice at the same time
        assert len(lane.rows) == 3
        lane.step()
        rows += add_rows(lane, *[20] * 8, first=3, max_tokens=10)
        assert len(lane.rows) == 11
        passes.clear()
        lane.step()
        count = len(passes)
        finish(lane)
        return rows, count

    hook = model.get_input_embeddings().register_forward_hook(lambda *_: passes.append(1))
    try:
        with torch.inference_mode():
            (expected, alone), (found, count) = sample(None), sample(1620)
    finally:
        hook.remove()
    assert (alone, count) == (1, 2)
    for row, same in zip(found, expected, strict=True):
        assert row.tokens == same.tokens
        torch.testing.assert_close(row.logprobs, same.logprobs, atol=1e-4, rtol=0)


def resizes(lane: PlainLane, steps: int) -> int:
    """How often the bytes that rows hold change in so many steps. Each change is a copy."""
    changes, held = 0, lane.held_bytes
    for _ in range(steps):
        for advance in (lambda: lane.admit(rows=64, tokens=100_000), lane.step):
            advance()
            changes += lane.held_bytes != held
            held = lane.held_bytes
    return changes


@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_a_row_that_does_not_fit_causes_no_copies(name: str, models: dict[str, Any]) -> None:
    with torch.inference_mode():
        lane = lane_for(models[name], row_tokens=1100)
        add_rows(lane, *[100] * 4)
        undisturbed = resizes(lane, 90)
        lane = lane_for(models[name], row_tokens=1100)
        add_rows(lane, *[100] * 4)
        (waits,) = add_rows(lane, 400, first=4)
        assert resizes(lane, 90) == undisturbed <= 3
        assert list(lane.waiting) == [waits]
        waits.aborted = True
        add_rows(lane, 5, first=5, max_tokens=5)
        assert len(lane.rows) == 5
        assert not lane.waiting


def test_a_row_that_does_not_fit_starts_once_another_has_left(models: dict[str, Any]) -> None:
    with torch.inference_mode():
        lane = lane_for(models["llama"], row_tokens=1050)
        add_rows(lane, *[200] * 3)
        lane.step()
        (waits,) = add_rows(lane, 300, first=3)
        assert len(lane.rows) == 3
        assert list(lane.waiting) == [waits]
        lane.drop(lambda row: row.number == 1)
        lane.admit(rows=64, tokens=100_000)
        assert waits in lane.rows


def test_room_of_rows_that_have_left_counts_before_the_next_step(
    models: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is given up once the blocks grow, but the rows of another batch start before that."""
    monkeypatch.setattr("lightning_core.backends.torch.plain_lane._PADDED", 0)
    tokens = 1640
    with torch.inference_mode():
        lane = lane_for(models["llama"], row_tokens=tokens)
        add_rows(lane, *[300] * 4)
        for _ in range(2):
            lane.step()
            lane.admit(rows=64, tokens=100_000)
        assert len(lane.rows) == 4
        lane.drop(lambda row: row.number > 0)
        add_rows(lane, *[5] * 14, first=4, max_tokens=5)
        assert len(lane.rows) == 15
        assert lane.held_bytes <= steady_bytes(tokens * bytes_per_token(models["llama"], "past_key_values") * 3 // 2)


@pytest.mark.parametrize(("tight", "compact"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("name", BATCHED)
def test_a_forecast_is_the_most_that_a_batch_comes_to_hold(
    name: str, tight: bool, compact: bool, models: dict[str, Any]
) -> None:
    """With rows that are shorter and longer than a sliding window, one of which has left."""
    lengths, new = (3, 7, 31, 5), 50
    with torch.inference_mode():
        passes = CachedPasses(models[name], "past_key_values")
        caches = [passes.run(torch.tensor([list(range(3, 3 + length))]), None)[1] for length in lengths]
        rows = [ActiveRow(prompt=np.arange(3, 3 + n), params=SamplingParams(max_tokens=new)) for n in lengths]
        batch = RaggedBatch(emptied(caches[0]))
        batch.add(rows[:3], caches[:3], lengths[:3])
        batch.remove(1)
        batch.add(rows[3:], caches[3:], lengths[3:], tight=tight)
        held: list[int] = []
        forecast = batch.forecast([], new, tight=tight, compact=compact)
        if compact:
            batch.compact()
        for _ in range(new):
            batch.reserve(tight=tight)
            passes.step(torch.full((len(batch.rows), 1), 5), batch)
            held.append(batch.nbytes)
    assert forecast * 3 // 4 <= max(held) <= forecast


def test_states_of_rows_that_have_left_count(models: dict[str, Any]) -> None:
    """A batch keeps them until it is copied, so rows of another batch do not fit beside them."""
    with torch.inference_mode():
        lane = lane_for(models["qwen3_5_text"], row_tokens=100_000)
        add_rows(lane, *[5] * 30, max_tokens=9)
        lane.step()
        lane.drop(lambda row: row.number > 0)
        (batch,) = lane._batches
        held = lane.held_bytes
        assert batch.forecast([], 1) >= held
        compacted = batch.forecast([], 1, compact=True)
        batch.compact()
        assert compacted == batch.forecast([], 1) == lane.held_bytes < held / 4
