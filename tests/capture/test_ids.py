"""Ids of rollouts and spans do not depend on the program's random numbers."""

from __future__ import annotations

import random

from lightning_core import rollout
from lightning_core.capture import scope


def test_two_live_rollouts_that_seed_random_have_different_ids() -> None:
    random.seed(0)
    with rollout() as first, scope("writer"):
        random.seed(0)
        with rollout() as second, scope("writer"):
            pass
    assert first.rollout != second.rollout
    spans = [span.span_id for span in (*first.spans, *second.spans)]
    assert len(set(spans)) == len(spans) == 4


def test_ids_are_not_taken_from_the_program_s_random_numbers() -> None:
    random.seed(0)
    expected = random.random()
    random.seed(0)
    with rollout(), scope("writer"):
        pass
    assert random.random() == expected
