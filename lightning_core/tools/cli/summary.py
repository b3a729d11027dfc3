"""A run's results as console output: the summary table, estimates, the verdict."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from lightning_core.errors import plural
from lightning_core.observers.monitors.gradient import LEVERS, MANY_FAILED
from lightning_core.observers.progress import format_seconds
from lightning_core.records.report import Summary
from lightning_core.records.statistics.headline import headline
from lightning_core.records.statistics.intervals import Comparison, format_mean
from lightning_core.records.statistics.summary import Answers, RaisedMonitor
from lightning_core.tools.cli.console import Column, FirstThatFits, make_table

_MUCH_WASTE = 0.5
"""Share of the groups without a gradient from which on the summary has advice."""
_SOLVED = 0.9
_ENDINGS = {
    "failed": "failed (scored with the reward so far, or 0)",
    "max_calls": "reached rollouts.max_calls",
    "left_out": "were left out",
}
"""`HeldOutEnding.ending` in words."""


def make_summary(summary: Summary) -> Group:
    """The result in one sentence, the comparison on the held-out tasks if there is one, and the run's totals."""
    parts: list[RenderableType] = [headline(summary).text, ""]
    if summary.eval is not None:
        found = {"all": summary.eval, **summary.splits}
        parts += [FirstThatFits(_wide(found), _narrow(found)), "", "In brackets: 95% intervals."]
        parts += _held_out_endings(summary)
        parts += [*_constant_answer(summary), *_same_responses(summary), *_solved(summary), *_pass_rates(summary)]
        parts += ["", *_answers(summary.answers)]
    parts.append(
        f"{plural(summary.steps, 'step')}, {plural(summary.rollouts, 'rollout')}, {summary.tokens_sampled:,} tokens sampled, "
        f"{summary.tokens_trained:,} trained, {format_seconds(summary.wall_seconds)}, seed {summary.seed}"
    )
    parts += _waste(summary)
    if summary.stopped is not None:
        parts.append(f"Stopped early: {summary.stopped}.")
    if summary.best_step is not None:
        parts.append(f"The best held-out reward was reached at step {summary.best_step}: checkpoints/best.")
    parts += _monitors(summary.monitors)
    return Group(*parts)


def _means(comparison: Comparison) -> Mapping[str, str]:
    return {
        "before": format_mean(comparison.eval_reward_before, comparison.eval_ci95_before),
        "after": format_mean(comparison.eval_reward_after, comparison.eval_ci95_after),
        "improvement": format_mean(comparison.improvement, comparison.improvement_ci95, sign="+"),
    }


def _wide(found: Mapping[str, Comparison]) -> RenderableType:
    """A row for each of the ``found`` comparisons, by split."""
    columns = [Column(title) for title in ("held-out reward", "tasks", "before", "after", "improvement")]
    return make_table(columns, [[name, str(c.tasks), *_means(c).values()] for name, c in found.items()])


def _narrow(found: Mapping[str, Comparison]) -> RenderableType:
    """A table for each, which has room for intervals on a narrow terminal."""
    titles = {name: "held-out reward" if name == "all" else f"held-out reward: {name}" for name in found}
    return Group(
        *(
            make_table([Column(titles[name], cut=True), Column(plural(c.tasks, "task"))], _means(c).items())
            for name, c in found.items()
        )
    )


def _held_out_endings(summary: Summary) -> Iterator[Text]:
    """``4 of 8 held-out rollouts before training failed (scored with the reward so far, or 0); the first: …``"""
    for e in summary.held_out_endings:
        of = f"{e.number:,} of {plural(e.rollouts, 'held-out rollout')} {e.evaluation} training"
        yield Text(f"{of} {_ENDINGS[e.ending]}{'' if e.error is None else f'; the first: {e.error}'}")
    if missing := summary.eval_tasks_left_out:
        are, their = ("is", "its") if missing == 1 else ("are", "their")
        yield Text(
            f"{plural(missing, 'held-out task')} {are} excluded: all {their} rollouts were left out in one of the evaluations"
        )


def _constant_answer(summary: Summary) -> Iterator[RenderableType]:
    """How many answers differ, and whether the agent earns more than the best of them would if every task got it."""
    if (d := summary.distinct_answers) is not None:
        before = f"{d.before} in {plural(d.rollouts_before, 'held-out rollout')} before"
        yield f"Different answers: {before}, {d.after} in {d.rollouts_after} after."
    if (constant := summary.constant_answer) is not None:
        least, how = "", f"by the reward function, the best of {plural(constant.compared, 'answer')}"
        if constant.source == "recorded":
            least, how = "at least ", f"by the rewards of {constant.known} of {plural(constant.tasks, 'task')}"
        yield (
            f"Best constant answer: {least}{constant.reward:.3f} with {constant.answer!r} for every task ({how}). "
            f"After training: {format_mean(constant.lead, constant.lead_ci95, sign='+')}."
        )
    if summary.constant_answer_problem is not None:
        what = "Best constant answer not computed" if constant is None else "The reward function was not used for it"
        yield Text(f"{what}: {summary.constant_answer_problem}.")


def _same_responses(summary: Summary) -> Iterator[Text]:
    """The agents whose first response became the same, unless nearly all tasks are solved with it."""
    if summary.solved is not None and summary.solved.after >= _SOLVED * summary.solved.tasks:
        return
    for found in summary.same_responses:
        yield Text(
            f"Agent {found.agent} begins {found.same} of {plural(found.rollouts, 'held-out rollout')} with {found.response!r}. Before "
            f"training, the most frequent first response had {found.same_before} of {found.rollouts_before}."
        )


def _solved(summary: Summary) -> Iterator[str]:
    """``Solved: 3 of 20 held-out tasks (15%) before, 5 (25%) after.``"""
    solved = summary.solved
    if solved is not None and solved.tasks:
        before, after = (f"({count / solved.tasks:.0%})" for count in (solved.before, solved.after))
        yield f"Solved: {solved.before} of {plural(solved.tasks, 'held-out task')} {before} before, {solved.after} {after} after."


def _pass_rates(summary: Summary) -> Iterator[str]:
    """``pass@4: 0.700 before, 0.900 after; pass^4: 0.200 before, 0.500 after.``"""
    before, after = ({rate.k: rate for rate in r} for r in (summary.pass_rates_before, summary.pass_rates_after))
    if common := before.keys() & after.keys():
        k = max(common)
        first, last = before[k], after[k]
        one = f"pass@{k}: {first.at_least_one:.3f} before, {last.at_least_one:.3f} after"
        yield f"{one}; pass^{k}: {first.all:.3f} before, {last.all:.3f} after."


def _answers(answers: Sequence[Answers]) -> Iterator[RenderableType]:
    """The answers to some tasks before and after training, side by side."""
    if not answers:
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for title in ("held-out task", "reward", "answer before", "answer after"):
        table.add_column(title, overflow="fold")
    for entry in answers:
        change = f"{entry.reward_before:.3f} → {entry.reward_after:.3f}"
        # Texts, because square brackets in a string would be parsed as markup.
        table.add_row(
            Text(entry.task), change, *(Text("(none)" if a is None else a) for a in (entry.before, entry.after))
        )
    yield from (table, "")


def _waste(summary: Summary) -> Iterator[str]:
    """Groups without a gradient, and rollouts that failed, reached ``rollouts.max_calls`` or were left out."""
    if summary.groups_wasted:
        share = summary.groups_wasted / summary.groups
        groups = f"{summary.groups_wasted:,} of {summary.groups:,} groups ({share:.0%})"
        advice = "" if share < _MUCH_WASTE or _is_explained(summary) else f" {LEVERS}."
        yield f"No gradient from rewards in {groups}: all their advantages were 0.{advice}"
    if summary.groups_replaced:
        yield f"Replaced by rollouts.refill: {plural(summary.groups_replaced, 'further group')} without a gradient."
    for number, what, key in (
        (summary.rollouts_failed, "failed", "failed"),
        (summary.rollouts_max_calls, "reached rollouts.max_calls", "max_calls"),
        (summary.rollouts_left_out, "were left out", "left_out"),
    ):
        if number:
            error = summary.first_errors.get(key)
            yield f"{number:,} of {plural(summary.rollouts, 'rollout')} {what}{'' if error is None else f'; the first: {error}'}"


def _is_explained(summary: Summary) -> bool:
    """Whether a monitor explains the waste, or failures do, or the tasks are solved."""
    if summary.rollouts_failed >= MANY_FAILED * summary.rollouts:
        return True
    solved = summary.solved
    is_solved = solved is not None and solved.after >= _SOLVED * solved.tasks
    return is_solved or any(m.monitor in ("no_gradient", "wasted_groups") for m in summary.monitors)


def _monitors(monitors: Sequence[RaisedMonitor]) -> Iterator[str]:
    """The monitors that were raised, each with its message."""
    for m in monitors:
        policy = "" if m.policy is None else f" of policy {m.policy}"
        steps = f"step {m.first_step}" if m.steps == 1 else f"{m.steps} steps, {m.first_step} to {m.last_step}"
        yield f"Monitor {m.monitor}{policy} ({steps}): {m.message}."
