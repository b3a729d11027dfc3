"""Checks of the sections ``trainer`` and ``eval`` that apply to every trainer."""

from __future__ import annotations

from collections.abc import Iterator

from lightning_core.config.sections import Sections
from lightning_core.config.source import KeyPath


def check_trainer(c: Sections) -> Iterator[tuple[KeyPath, str]]:
    """Yield settings of the schedule, the mini-batches and the evaluation that have no effect or do not fit."""
    t, rollouts = c.trainer, c.rollouts.tasks_per_step * c.rollouts.group_size
    if t.schedule == "constant" and t.min_learning_rate_ratio:
        yield (
            ("trainer", "min_learning_rate_ratio"),
            "goes with schedule: linear | cosine, but trainer.schedule is 'constant'",
        )
    if t.schedule != "constant" and t.warmup_steps >= t.steps:
        yield (
            ("trainer", "warmup_steps"),
            f"found {t.warmup_steps}, expected less than trainer.steps = {t.steps}: schedule {t.schedule!r} starts after warm-up",
        )
    if c.algorithm.mini_batches > rollouts:
        yield (
            ("algorithm", "mini_batches"),
            f"found {c.algorithm.mini_batches}, expected at most the {rollouts} rollouts of a step "
            "(tasks_per_step · group_size)",
        )
    yield from _check_evaluation(c)


def _check_evaluation(c: Sections) -> Iterator[tuple[KeyPath, str]]:
    every, steps, stop = c.eval.every, c.trainer.steps, c.eval.early_stop
    if stop is not None and stop.reward is None and stop.patience is None:
        yield ("eval", "early_stop"), "without reward or patience the run never stops early; set one of them"
    if stop is not None and stop.patience is None and stop.min_improvement:
        yield ("eval", "early_stop", "min_improvement"), "goes with patience, which is not set"
    for path, used in ((("trainer", "keep_best"), c.trainer.keep_best), (("eval", "early_stop"), stop)):
        if used and not every:
            yield path, "requires evaluations during training; set eval.every, such as 5"
        elif used and every >= steps:
            yield path, f"there is no evaluation during training: eval.every is {every} and trainer.steps {steps}"
