"""The proof detects every change between sampling and the loss, and accepts correct steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_core.config.algorithm import Algorithm
from lightning_core.errors import ProofError
from lightning_core.trainers.torch.factory import open_trainer
from lightning_core.trainers.torch.packing import PackedBatch, pack_rows
from lightning_core.trainers.torch.proof import prove_batch, prove_once
from lightning_core.transitions import Row
from tests.trainers.rows import make_row
from tests.trainers.sections import parts

pytestmark = pytest.mark.numeric


def step_rows() -> list[Row]:
    """Two turns with an observation in between, a sibling that shares the prompt, and a greedily sampled call."""
    return [
        make_row(([1, 2], False), ([3, 4], True), ([5], False), ([6, 7], True), logprobs=[-1, -2, -3, -4]),
        make_row(([1, 2], False), ([3, 9], True), logprobs=[-1, -5], rollout="r1", temperature=0.5),
        make_row(([1, 2], False), ([3], True), logprobs=[-1], rollout="r2", temperature=0.0),
    ]


def prove(rows: list[Row], batch: PackedBatch | None = None) -> None:
    prove_once(rows)
    batch = batch or pack_rows(rows, range(len(rows)), budget=100)[0]
    prove_batch(rows, batch, batch.gather([row.logprobs for row in rows]))


def test_what_was_sampled_is_proved() -> None:
    prove(step_rows())


def changed(field: str, index: int, value: float) -> Callable[[Row], Row]:
    def change(row: Row) -> Row:
        values = getattr(row, field).copy()
        values[index] = value
        return replace(row, **{field: values})

    return change


def with_segment(**changes: Any) -> Callable[[Row], Row]:
    return lambda row: replace(row, segments=(replace(row.segments[0], **changes), *row.segments[1:]))


@pytest.mark.parametrize(
    "change",
    [
        changed("token_ids", 3, 8),  # a sampled token
        changed("token_ids", 0, 8),  # a prompt token
        changed("token_ids", 4, 8),  # an observation between two turns
        changed("logprobs", 2, -1.0000001),  # one unit in the last place
        changed("logprobs", 6, -4.5),
        changed("temperatures", 2, 0.5),
        changed("mask", 3, False),
        changed("mask", 4, True),
        with_segment(version=1),
        with_segment(start=1),
        with_segment(stop=3),
        with_segment(constraint="{}"),
        with_segment(digest="0" * 32),
        with_segment(digest=None),
        lambda row: replace(row, segments=row.segments[1:]),
    ],
)
def test_a_row_that_is_not_what_was_sampled_is_noticed(change: Callable[[Row], Row]) -> None:
    row, *others = step_rows()
    with pytest.raises(ProofError):
        prove([change(row), *others])


def test_a_call_that_would_be_trained_twice_is_noticed() -> None:
    row = step_rows()[0]
    with pytest.raises(ProofError, match=r"would be trained 2 times"):
        prove_once([row, replace(row, rollout="copy")])


@pytest.mark.parametrize(
    "field", ["token_ids_S", "position_ids_S", "places_P", "source_E", "targets_E", "temperatures_P"]
)
def test_a_batch_that_is_packed_wrongly_is_noticed(field: str) -> None:
    rows = step_rows()
    (batch,) = pack_rows(rows, range(3), budget=100)
    for index in range(len(getattr(batch, field))):
        values = getattr(batch, field).copy()
        # There are few positions; any other one is wrong.
        values[index] = (values[index] + 1) % len(batch.places_P) if field == "source_E" else values[index] + 1
        with pytest.raises(ProofError):
            prove(rows, replace(batch, **{field: values}))


def test_logprobs_that_stand_at_other_tokens_are_noticed() -> None:
    rows = step_rows()
    (batch,) = pack_rows(rows, range(3), budget=100)
    with pytest.raises(
        ProofError, match=r"its tokens, logprobs, temperature or version are not those that were sampled"
    ):
        prove_batch(rows, batch, np.roll(batch.gather([row.logprobs for row in rows]), 1))


def test_a_step_stops_before_the_weights_change(tiny_llama: Path) -> None:
    algorithm = Algorithm(updates_per_step=2)
    trainer = open_trainer(**parts(model=str(tiny_llama), dtype="float32", algorithm=algorithm))
    before = {name: weight.clone() for name, weight in trainer.model.tuning.masters.items()}
    good, other, _ = step_rows()
    try:
        # Separate micro-batches: the first of them is correct.
        trainer.model.memory = replace(trainer.model.memory, micro_batch_tokens=1)
        with pytest.raises(ProofError, match=r"Nothing was trained"):
            trainer.step([good, changed("token_ids", 2, 8)(other)])
        assert trainer.version == 0
        assert all(weight.equal(before[name]) for name, weight in trainer.model.tuning.masters.items())
        trainer.step([good, other])
        assert trainer.version == 1
    finally:
        trainer.close()
