"""A run's results as console output: the summary table, estimates, the verdict."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table

from lightning_core.records.intervals import MIN_TASKS, Comparison, Estimate
from lightning_core.records.progress import format_seconds
from lightning_core.records.report import Summary


def make_summary(summary: Summary) -> Group:
    """The comparison on the held-out tasks, if there is one, and the run's totals."""
    parts: list[RenderableType] = []
    if summary.eval is not None:
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
        for title in ("held-out reward", "tasks", "before", "after", "improvement"):
            table.add_column(title, overflow="fold")
        for name, comparison in {"all": summary.eval, **summary.splits}.items():
            table.add_row(
                name,
                str(comparison.tasks),
                format_mean(comparison.eval_reward_before, comparison.eval_ci95_before),
                format_mean(comparison.eval_reward_after, comparison.eval_ci95_after),
                format_mean(comparison.improvement, comparison.improvement_ci95, sign="+"),
            )
        parts += [table, "", f"In brackets: 95% intervals. {format_verdict(summary.eval)}", ""]
    parts.append(
        f"{summary.steps:,} steps, {summary.rollouts:,} rollouts, {summary.tokens_sampled:,} tokens sampled, "
        f"{summary.tokens_trained:,} trained, {format_seconds(summary.wall_seconds)}, seed {summary.seed}"
    )
    if summary.stopped is not None:
        parts.append(f"Stopped early: {summary.stopped}.")
    if summary.best_step is not None:
        parts.append(f"The best held-out reward is that of step {summary.best_step}: checkpoints/best.")
    return Group(*parts)


def format_estimate(estimate: Estimate, *, sign: str = "") -> str:
    """``0.500 [0.300, 0.700]``."""
    return format_mean(estimate.mean, estimate.interval, sign=sign)


def format_mean(mean: float, interval: tuple[float, float] | None, *, sign: str = "", digits: int = 3) -> str:
    """``0.500 [0.300, 0.700]``; ``sign``: ``+`` for a sign before positive numbers too."""
    ends = "too few tasks" if interval is None else ", ".join(f"{end:{sign}.{digits}f}" for end in interval)
    return f"{mean:{sign}.{digits}f} [{ends}]"


def format_verdict(comparison: Comparison) -> str:
    """Whether the improvement is significant, in one sentence."""
    if comparison.improvement_ci95 is None:
        return f"Too few tasks for an interval: {comparison.tasks}, expected {MIN_TASKS} or more."
    low, high = comparison.improvement_ci95
    if low > 0:
        return "Significant improvement: the 95% interval lies above 0."
    if high < 0:
        return "Significant decrease: the 95% interval lies below 0."
    return "Not significant: the 95% interval includes 0."
