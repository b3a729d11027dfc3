"""The result of a run in one sentence, which the console and the viewer show first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lightning_core.errors import plural
from lightning_core.records.report import Summary
from lightning_core.records.statistics.intervals import MIN_TASKS


@dataclass(frozen=True, slots=True)
class Headline:
    """A sentence, and how it is to be read."""

    text: str
    kind: Literal["good", "warn", "plain"]
    """``good``: a significant improvement. ``warn``: a significant decrease, an improvement of form only, or a run that trained nothing."""


def headline(summary: Summary) -> Headline:
    """The held-out result of ``summary``, with its significance first."""
    if (single := summary.evaluation) is not None:
        solved = f"{single.solved:,} of {plural(single.tasks, 'held-out task')} solved"
        return Headline(f"Held-out reward {single.reward:.3f}: {solved}.", "plain")
    if (found := summary.eval) is None:
        return Headline("No result was measured: set tasks.eval to evaluate on held-out tasks.", "plain")
    missing = summary.eval_tasks_left_out
    change = (
        f"held-out reward {found.eval_reward_before:.3f} → {found.eval_reward_after:.3f} ({found.improvement:+.3f}) "
        f"on {plural(found.tasks, 'task')}{f' ({missing} more left out)' if missing else ''}"
    )
    if summary.steps and not summary.tokens_trained:
        return Headline(f"Nothing was trained: {change}, with the same weights before and after.", "warn")
    if found.improvement_ci95 is None:
        return Headline(f"Too few tasks for an interval: {change}, expected {MIN_TASKS} or more.", "plain")
    low, high = found.improvement_ci95
    if summary.is_form_only and (constant := summary.constant_answer) is not None:
        least = "at least " if constant.source == "recorded" else ""
        beaten = f"it is not shown to beat the best constant answer, {least}{constant.reward:.3f}"
        return Headline(f"Improvement of form only: {change}; {beaten}.", "warn")
    if low > 0:
        return Headline(f"Significant improvement: {change}; the 95% interval lies above 0.", "good")
    if high < 0:
        return Headline(f"Significant decrease: {change}; the 95% interval lies below 0.", "warn")
    return Headline(f"Not significant: {change}; the 95% interval includes 0.", "plain")
