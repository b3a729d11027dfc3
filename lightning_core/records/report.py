"""What a run amounts to: the summary, the table for the terminal, the metrics of each step, the curve."""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

from lightning_core.capture.integration import discover, requirements_of_extra
from lightning_core.errors import MissingExtra
from lightning_core.records.intervals import MIN_TASKS, Comparison, Estimate

_PACKAGES = ("lightning-rl", "torch", "transformers", "numpy")


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """A run in numbers; ``summary.json``. The comparison's fields are null where there were no held-out tasks."""

    eval: Comparison | None
    splits: Mapping[str, Comparison] = field(default_factory=dict[str, Comparison])
    """The comparison for each ``split`` that tasks carry."""
    steps: int
    rollouts: int
    """Rollouts that were trained on or left out of it; evaluations are not among them."""
    tokens_sampled: int
    tokens_trained: int
    wall_seconds: float
    seed: int
    versions: Mapping[str, str] = field(default_factory=lambda: installed_versions())

    @property
    def improved(self) -> bool | None:
        """Whether the improvement's interval lies above 0; None without an evaluation."""
        return None if self.eval is None else self.eval.improved

    def write(self, path: Path) -> None:
        """Write ``summary.json``: the comparison's fields on the top level, then the rest."""
        data = asdict(self)
        comparison = data.pop("eval") or dict.fromkeys(f.name for f in fields(Comparison))
        comparison["eval_tasks"] = comparison.pop("tasks")
        _replace(path, json.dumps({**comparison, **data}, indent=2, ensure_ascii=False) + "\n")


def read_summary(path: Path) -> Summary:
    """What `Summary.write` wrote."""
    data = json.loads(path.read_text(encoding="utf-8"))
    data["tasks"] = data.pop("eval_tasks")
    comparison = {key: data.pop(key) for key in (f.name for f in fields(Comparison))}
    splits = {name: _comparison(values) for name, values in data.pop("splits").items()}
    return Summary(eval=None if comparison["tasks"] is None else _comparison(comparison), splits=splits, **data)


def _comparison(data: Mapping[str, Any]) -> Comparison:
    values: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in data.items()}
    return Comparison(**values)


def _replace(path: Path, text: str) -> None:
    # Renamed into place, so that a reader never sees half a file.
    scratch = path.with_name(f".{path.name}.new")
    scratch.write_text(text, encoding="utf-8")
    scratch.replace(path)


def installed_versions() -> dict[str, str]:
    """Versions of Python, of our packages, and of the frameworks that integrations support, as far as they are installed."""
    versions = {"python": platform.python_version()}
    for package in (*_PACKAGES, *_integrated_distributions()):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions


def _integrated_distributions() -> list[str]:
    """The distributions that announce integrations, and those that they require for each of them."""
    found: list[str] = []
    for name, entry in discover().items():
        if entry.dist is not None:
            found += [entry.dist.name, *(requirement.name for requirement in requirements_of_extra(entry.dist, name))]
    return found


def format_summary(summary: Summary) -> str:
    """A plain table for the terminal."""
    lines: list[str] = []
    if summary.eval is not None:
        groups = {"all": summary.eval, **summary.splits} if summary.splits else {"all": summary.eval}
        rows = [("held-out reward", "tasks", "before", "after", "improvement")]
        for name, c in groups.items():
            before = _mean(c.eval_reward_before, c.eval_ci95_before)
            after = _mean(c.eval_reward_after, c.eval_ci95_after)
            rows.append((name, str(c.tasks), before, after, _mean(c.improvement, c.improvement_ci95, sign="+")))
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        lines += ["", f"In brackets: 95 % intervals. {_verdict(summary.eval)}", ""]
    lines.append(
        f"{summary.steps:,} steps, {summary.rollouts:,} rollouts, {summary.tokens_sampled:,} tokens sampled, "
        f"{summary.tokens_trained:,} trained, {format_seconds(summary.wall_seconds)}, seed {summary.seed}"
    )
    return "\n".join(lines)


def format_estimate(estimate: Estimate) -> str:
    """``0.500 [0.300, 0.700]``."""
    return _mean(estimate.mean, estimate.interval)


def _mean(mean: float, interval: tuple[float, float] | None, *, sign: str = "") -> str:
    ends = "too few tasks" if interval is None else f"{interval[0]:{sign}.3f}, {interval[1]:{sign}.3f}"
    return f"{mean:{sign}.3f} [{ends}]"


def _verdict(comparison: Comparison) -> str:
    if comparison.improvement_ci95 is None:
        return f"No claim can be made from {comparison.tasks} tasks; use {MIN_TASKS} or more."
    if comparison.improved:
        return "The improvement is beyond chance."
    return "This is no proof of an improvement: its interval reaches 0."


def format_seconds(seconds: float) -> str:
    """``95`` as ``1m35s``, ``8000`` as ``2h13m``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02}m"


class MetricsLog:
    """``metrics.jsonl``: one JSON object a step, flushed when `append` returns.

    ``keep_steps`` is for a resumed run: lines of later steps, and a line cut short by a crash, are dropped on opening.
    """

    def __init__(self, path: Path, *, keep_steps: int = 0) -> None:
        self.path = path
        kept = [line for line in read_metrics(path) if line["step"] <= keep_steps] if path.is_file() else []
        _replace(path, "".join(_json_line(line) for line in kept))

    def append(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Write one step. A number that is not finite is written as null, since JSON has none."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(_json_line({"step": step, **metrics}))


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of ``metrics.jsonl``; a last line that a crash cut short is left out."""
    lines = path.read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines[:-1] if line]


def _json_line(values: Mapping[str, Any]) -> str:
    plain = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
    return json.dumps(plain, ensure_ascii=False) + "\n"


def draw_curve(
    path: Path, *, steps: Iterable[tuple[int, float]], evals: Iterable[tuple[int, Estimate]], title: str = ""
) -> None:
    """Draw ``curve.png``: training reward for each (step, mean), held-out reward for each (steps taken, estimate).

    Raises `MissingExtra` without matplotlib.
    """
    try:
        figures = import_module("matplotlib.figure")
    except ModuleNotFoundError:
        raise MissingExtra("matplotlib", "torch", "drawing curve.png") from None
    figure: Any = figures.Figure(figsize=(8, 4.5), dpi=120, layout="constrained")  # Agg, whatever the display
    axes = figure.subplots()
    trained = list(steps)
    axes.plot(
        [step for step, _ in trained],
        [r for _, r in trained],
        color="tab:blue",
        alpha=0.8,
        label="training tasks, mean of a step",
    )
    measured = list(evals)
    if measured:
        below = [0.0 if math.isnan(e.low) else e.mean - e.low for _, e in measured]
        above = [0.0 if math.isnan(e.high) else e.high - e.mean for _, e in measured]
        axes.errorbar(
            [step for step, _ in measured],
            [e.mean for _, e in measured],
            yerr=[below, above],
            fmt="o-",
            capsize=4,
            color="tab:orange",
            label="held-out tasks, 95 % interval",
        )
    axes.set(xlabel="training step", ylabel="reward", title=title)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path)
