"""When held-out rewards end a run, and which checkpoint is the best."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from lightning_core.config.sections import EarlyStop
from lightning_core.config.trainer import TrainerSection
from lightning_core.errors import ConfigError
from lightning_core.observers.early_stop import budget_stop, expected_steps, stop_reason
from lightning_core.records.run_folder.checkpoints import best_checkpoint, checkpoints, choose_checkpoint, mark_best
from tests.empty_checkpoint import make_empty_checkpoint

TARGET = EarlyStop(reward=0.8)
PATIENT = EarlyStop(patience=2)
DEMANDING = EarlyStop(patience=2, min_improvement=0.1)


@pytest.mark.parametrize(
    ("rule", "before", "rewards", "expected"),
    [
        (None, 0.0, [1.0], None),
        (TARGET, 0.9, [], None),
        (TARGET, 0.0, [0.5, 0.79], None),
        (TARGET, 0.0, [0.5, 0.8], "the held-out reward 0.800 reached eval.early_stop.reward = 0.8"),
        (PATIENT, 0.5, [0.4], None),
        (PATIENT, 0.5, [0.4, 0.5], "the held-out reward has not risen above 0.500 for 2 evaluations"),
        (PATIENT, None, [0.5, 0.4], None),
        (PATIENT, None, [0.5, 0.4, 0.5], "the held-out reward has not risen above 0.500 for 2 evaluations"),
        (PATIENT, 0.1, [0.2, 0.1, 0.3, 0.2], None),
        (DEMANDING, 0.5, [0.55, 0.59], "the held-out reward has not risen above 0.500 for 2 evaluations"),
        (DEMANDING, 0.5, [0.55, 0.65], None),
        (EarlyStop(reward=0.8, patience=1), 0.9, [0.8], "the held-out reward 0.800 reached"),
    ],
)
def test_a_run_ends_at_its_target_or_without_improvement(
    rule: EarlyStop | None, before: float | None, rewards: list[float], expected: str | None
) -> None:
    found = stop_reason(rule, rewards, before=before)
    assert found is None if expected is None else found is not None and found.startswith(expected)


def test_the_best_checkpoint_is_a_link_that_moves(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no checkpoint yet"):
        choose_checkpoint(tmp_path)
    for step in (2, 10):
        make_empty_checkpoint(tmp_path, step)
    older, newest = checkpoints(tmp_path)
    assert best_checkpoint(tmp_path) is None
    with pytest.raises(ConfigError, match=r"kept no best checkpoint \(trainer.keep_best\); it has \['step-000002'"):
        choose_checkpoint(tmp_path, "best")
    for best in (newest, older):
        mark_best(best)
        assert best_checkpoint(tmp_path) == choose_checkpoint(tmp_path, "best") == best
    assert choose_checkpoint(tmp_path) == newest, "the newest without a name"
    assert choose_checkpoint(tmp_path, "step-000002") == older
    assert checkpoints(tmp_path) == [older, newest], "the link is not listed"
    with pytest.raises(ConfigError, match=r"--checkpoint 'step-3': the run .* has \['step-000002', 'step-000010'\]"):
        choose_checkpoint(tmp_path, "step-3")
    shutil.rmtree(older)
    assert best_checkpoint(tmp_path) is None


@pytest.mark.parametrize(
    ("budget", "expected"),
    [(None, None), (151, None), (150, "150 tokens were sampled (trainer.token_budget = 150)"), (1, "150 tokens")],
)
def test_a_budget_of_tokens_counts_rollouts_and_forks(budget: int | None, expected: str | None) -> None:
    limits = TrainerSection(token_budget=budget)
    found = budget_stop(limits, [{"tokens_sampled": 60}, {"tokens_sampled": 70, "tokens_forked": 20}])
    assert found is None if expected is None else found is not None and found.startswith(expected)


@pytest.mark.parametrize(
    ("total", "budget", "expected"),
    [(1000, None, 1000), (1000, 750, 10), (1000, 751, 11), (7, 750, 7), (1000, 100, 2)],
)
def test_a_budget_shortens_the_steps_that_are_expected(total: int, budget: int | None, expected: int) -> None:
    """Two steps sampled 150 tokens, so ten sample 750."""
    steps = [{"tokens_sampled": 60}, {"tokens_sampled": 70, "tokens_forked": 20}]
    limits = TrainerSection(token_budget=budget)
    assert expected_steps(total, limits, steps) == expected
    assert expected_steps(total, limits, []) == total


def test_a_budget_of_minutes_counts_rollouts_and_updates() -> None:
    steps = [{"seconds_rollouts": 40.0, "seconds_update": 20.0}, {"seconds_rollouts": 50.0, "seconds_update": 10.0}]
    assert budget_stop(TrainerSection(minutes=2.1), steps) is None
    assert budget_stop(TrainerSection(minutes=2), steps) == "the steps took 2.0 minutes (trainer.minutes = 2)"
    assert expected_steps(1000, TrainerSection(minutes=10), steps) == 10
    assert expected_steps(1000, TrainerSection(minutes=10, token_budget=1), steps) == 10, "no tokens are counted yet"
