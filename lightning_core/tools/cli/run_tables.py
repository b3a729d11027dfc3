"""Runs as console output: the list, and the comparison of several."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from lightning_core.errors import ConfigError, RecordError, plural, shorten, visible
from lightning_core.records.run_folder.configs import config_differences
from lightning_core.records.run_folder.runs import RunInfo
from lightning_core.records.statistics.intervals import MIN_TASKS, format_mean
from lightning_core.records.statistics.measured import EvaluationSummary
from lightning_core.records.statistics.prices import Prices
from lightning_core.tools.cli.console import Column, FirstThatFits, make_table
from lightning_core.tools.cli.measured import EVALUATION_ROWS
from lightning_core.tools.runs.compare import (
    EvaluationPoint,
    HeldOutDifference,
    held_out_difference,
    measure_held_out,
)

_NOTHING = "–"
_MOST_SHOWN = 400
"""Characters of a setting: prompts are settings too."""


def make_run_table(runs: Sequence[RunInfo]) -> RenderableType:
    """A table of ``runs``, one per line, and the names of their damaged files. A narrow terminal has no room for intervals."""
    table = FirstThatFits(*(_run_table(runs, intervals=shown) for shown in (True, False)))
    damaged = [visible(str(run.folder / name), lines=False) for run in runs for name in run.damaged]
    return Group(table, "", f"damaged, or not complete: {', '.join(damaged)}") if damaged else table


def _run_table(runs: Sequence[RunInfo], *, intervals: bool) -> RenderableType:
    columns = (
        Column("name", cut=True),
        Column("state"),
        Column("started"),
        Column("model", cut=True),
        Column("steps", "right"),
        Column("reward", "right"),
        Column("held-out", cut=intervals),
        Column("tags", cut=True),
    )
    return make_table(columns, [_run_row(run, intervals=intervals) for run in runs])


def run_document(run: RunInfo) -> dict[str, Any]:
    """``run`` as plain data."""
    return {
        "name": run.name,
        "folder": str(run.folder),
        "state": run.state,
        "started": datetime.fromtimestamp(run.started, UTC).isoformat(timespec="seconds"),
        "model": run.model,
        "steps": run.steps,
        "total_steps": run.total_steps,
        "reward": run.reward,
        "tags": list(run.tags),
        "summary": None if run.summary is None else asdict(run.summary),
        "damaged": list(run.damaged),
    }


def make_comparison(runs: Sequence[RunInfo], tasks: int, prices: Prices) -> Group:
    """Held-out rewards of each run compared with the first, last evaluations, settings and metrics that differ.

    ``tasks``: how many of the tasks that differ most are listed. ``prices``: of models, for the costs.
    """
    labels = _labels(runs)
    parts: list[RenderableType] = []
    for label, run in zip(labels[1:], runs[1:], strict=True):
        try:
            difference = held_out_difference(runs[0].folder, run.folder)
        except (ConfigError, RecordError) as error:  # a damaged store
            parts += [_line(f"held-out reward of {labels[0]} and {label}: cannot be compared: {error}"), ""]
        else:
            parts += [*_held_out(labels[0], label, difference, tasks), ""]
    parts += _evaluation_table(labels, runs, prices)
    differences = config_differences({label: run.config for label, run in zip(labels, runs, strict=True)})
    settings = ([d.key, *(_value(d.values, label) for label in labels)] for d in differences)
    parts += [_table("setting", labels, settings) if differences else "all settings are equal", ""]
    rows = list(_metric_rows(runs))
    if differing := [row for row in rows if not _is_equal(row)]:
        parts += [_table("metric", labels, iter(differing)), ""]
    if equal := [f"{name} {value}" for name, value, *_ in filter(_is_equal, rows)]:
        parts.append(f"metrics that are equal: {', '.join(equal)}")
    return Group(*parts)


def _is_equal(row: Sequence[str]) -> bool:
    """Whether the cells after the title are equal."""
    return len(set(row[1:])) == 1


def _evaluation_table(labels: Sequence[str], runs: Sequence[RunInfo], prices: Prices) -> Iterator[RenderableType]:
    """The last held-out evaluation of each run; nothing if no run has one."""
    found: list[EvaluationSummary | None] = []
    for run in runs:
        try:
            found.append(measure_held_out(run, prices))
        except (ConfigError, RecordError):  # a damaged store; the comparison of rewards shows the error
            found.append(None)
    rows = [(title, [_NOTHING if e is None else cell(e) for e in found]) for title, cell in EVALUATION_ROWS]
    shown = [(title, *cells) for title, cells in rows if set(cells) != {_NOTHING}]
    if shown:
        yield from (_table("last held-out evaluation", labels, iter(shown)), "")


def _run_row(run: RunInfo, *, intervals: bool) -> Sequence[str]:
    steps = str(run.steps) if run.total_steps is None else f"{run.steps}/{run.total_steps}"
    held_out = _NOTHING
    if run.summary is not None and (single := run.summary.evaluation) is not None:
        held_out = format_mean(single.reward, single.reward_ci95, digits=2) if intervals else f"{single.reward:.2f}"
    elif run.summary is not None and (e := run.summary.eval) is not None:
        held_out = f"{e.eval_reward_before:.2f} → {e.eval_reward_after:.2f}"
        if intervals:
            before = format_mean(e.eval_reward_before, e.eval_ci95_before, digits=2)
            held_out = f"{before} → {format_mean(e.eval_reward_after, e.eval_ci95_after, digits=2)}"
    started = datetime.fromtimestamp(run.started).strftime("%Y-%m-%d %H:%M")
    return (
        run.name,
        run.state,
        started,
        run.model or _NOTHING,
        steps,
        _number(run.reward),
        held_out,
        ", ".join(run.tags),
    )


def _labels(runs: Sequence[RunInfo]) -> list[str]:
    """The runs' names, or their folders if a name is not unique."""
    names = [run.name for run in runs]
    return names if len(set(names)) == len(names) else [str(run.folder) for run in runs]


def _table(title: str, labels: Sequence[str], rows: Iterator[Sequence[str]]) -> RenderableType:
    return make_table([Column(title), *(Column(label, cut=True) for label in labels)], rows)


def _value(values: Mapping[str, Any], label: str) -> str:
    if label not in values:
        return _NOTHING
    value = values[label]
    return shorten(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str), _MOST_SHOWN)


def _metric_rows(runs: Sequence[RunInfo]) -> Iterator[Sequence[str]]:
    """The state of each run, its best step, and all metrics of its last step."""
    steps = [run.metrics for run in runs]
    last = [lines[-1] if lines else {} for lines in steps]
    yield "state", *(run.state for run in runs)
    yield "steps", *(str(run.steps) for run in runs)
    yield "reward, best step", *(_best(lines) for lines in steps)
    names = dict.fromkeys(key for metrics in last for key, value in metrics.items() if isinstance(value, (int, float)))
    for name in names:
        if name != "step":
            label = "reward, last step" if name == "reward" else name
            yield label, *(_number(metrics.get(name)) for metrics in last)


def _best(metrics: Sequence[Mapping[str, Any]]) -> str:
    rewards = {line["step"]: line["reward"] for line in metrics if line.get("reward") is not None}
    if not rewards:
        return _NOTHING
    step = max(rewards, key=lambda step: rewards[step])
    return f"{rewards[step]:.3f} (step {step})"


def _held_out(first: str, second: str, d: HeldOutDifference | None, tasks: int) -> Iterator[RenderableType]:
    if d is None:
        yield _line(f"held-out reward of {first} and {second}: no task was evaluated in both")
        return
    yield _line(
        f"held-out reward on {plural(d.tasks, 'common task')}: {first} {d.first_reward:.3f} ({_where(d.first)}), "
        f"{second} {d.second_reward:.3f} ({_where(d.second)})"
    )
    yield f"difference, paired by task: {d.difference.text(sign='+')} (95% interval). {_verdict(d, second)}"
    if d.not_compared:
        was = "was" if d.not_compared == 1 else "were"
        yield _line(f"{plural(d.not_compared, 'task')} {was} evaluated in one run only")
    changed = [change for change in d.changes if change.change][:tasks]
    if changed:
        rows = ((c.task_id, f"{c.first:.3f}", f"{c.second:.3f}", f"{c.change:+.3f}") for c in changed)
        yield make_table(
            [Column("task", cut=True, bounded=True), *(Column(t, "right") for t in (first, second, "change"))], rows
        )


def _verdict(d: HeldOutDifference, second: str) -> str:
    interval = d.difference.interval
    if interval is None:
        return f"Too few tasks for an interval: expected {MIN_TASKS} or more."
    low, high = interval
    return f"{second} is higher." if low > 0 else f"{second} is lower." if high < 0 else "Not significant."


def _where(held_out: EvaluationPoint) -> str:
    return f"{held_out.phase} after {plural(held_out.step, 'step')}"


def _number(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, (int, float)) else _NOTHING


def _line(text: str) -> Text:
    return Text(text, overflow="fold")
