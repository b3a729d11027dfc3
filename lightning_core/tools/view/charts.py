"""The charts of runs as plain data, which static/charts.js draws."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from lightning_core.records.statistics.intervals import Estimate

Point = tuple[float, ...]
"""The step and the value, and for points with an interval, its ends."""
Shape = Literal["line", "points"]
"""``points``: a line through marked points, whose intervals are bars; otherwise intervals are a band."""


class Curves(NamedTuple):
    """The data of the charts of one run."""

    metrics: Sequence[Mapping[str, Any]]
    """The lines of ``metrics.jsonl``."""
    errors: Mapping[int, float]
    """The standard error of each step's training reward."""
    held_out: Mapping[int, Estimate]
    policies: Collection[str] = ()
    """Names of several policies, whose metrics are called ``NAME/metric``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line of a chart."""

    name: str
    points: Sequence[Point]
    shape: Shape = "line"


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """A chart over training steps. Its title and note are plain text."""

    id: str
    title: str
    note: str = ""
    lines: Sequence[Line] = field(default=())
    other: bool = False
    """Whether it belongs to the metrics that no other chart shows."""


class _Spec(NamedTuple):
    id: str
    title: str
    metrics: Mapping[str, str]
    """The names of lines by metric; empty for the only metric of a chart."""
    note: str = ""


_SPECS = (
    _Spec("solved", "Solved rollouts", {"solved": ""}, "share of the step's rollouts"),
    _Spec("loss", "Loss", {"loss": ""}),
    _Spec("kl", "KL divergence", {"kl": "to the reference", "approx_kl": "of the update"}),
    _Spec("entropy", "Entropy", {"entropy": "trained", "sampling_entropy": "sampled"}, "nats per token"),
    _Spec("length", "Response length", {"response_tokens": ""}, "mean tokens of a trained response"),
    _Spec("equal", "Wasted groups", {"equal_share": "equal rewards", "wasted_share": "no gradient"}, "share of groups"),
    _Spec("truncated", "Truncated responses", {"truncated": ""}, "share that reached the token limit"),
    _Spec(
        "seconds",
        "Time per step",
        {"seconds_rollouts": "rollouts", "seconds_update": "update", "seconds_push": "push of weights"},
        "seconds",
    ),
    _Spec("speed", "Tokens per second", {"tokens_per_second": ""}, "sampled tokens, while rollouts run"),
)
_CONTEXTS = ("new", "clean", "realigned", "forked")
_LARGEST = 1e300
"""JSON has integers that do not fit a float."""
_REWARD_NOTE = "training: ± 1 standard error over the step's tasks; held-out: 95% interval"
_SHOWN = {"step", "reward", *(metric for spec in _SPECS for metric in spec.metrics)}


def run_charts(curves: Curves) -> list[Chart]:
    """The charts of one run: the known ones in a fixed order, then one for each other metric."""
    series = _series(curves)
    reward = Chart(
        id="reward",
        title="Reward",
        note=_REWARD_NOTE,
        lines=_filled([_training(curves, "training"), _held_out(curves, "held-out")]),
    )
    charts = [reward, *(_chart(spec, series) for spec in _SPECS)]
    others = sorted(metric for metric in series if metric not in _SHOWN and not metric.startswith("monitor/"))
    charts += [_chart(_Spec(f"other-{metric}", metric, {metric: ""}), series, other=True) for metric in others]
    return [chart for chart in charts if chart.lines]


def compared_charts(runs: Mapping[str, Curves]) -> list[Chart]:
    """The curves of several runs, by name, over each other."""
    training = [_training(curves, name) for name, curves in runs.items()]
    held_out = [_held_out(curves, name) for name, curves in runs.items()]
    combined = [
        Chart(
            id="reward",
            title="Training reward",
            note="± 1 standard error over the step's tasks",
            lines=_filled(training),
        ),
        Chart(id="held-out", title="Held-out reward", note="95% intervals", lines=_filled(held_out)),
    ]
    all_series = {name: _series(curves) for name, curves in runs.items()}
    for spec in _SPECS:
        charts = {name: _chart(spec, series) for name, series in all_series.items()}
        lines = [
            Line(name=f"{name} · {line.name}" if len(chart.lines) > 1 else name, points=line.points)
            for name, chart in charts.items()
            for line in chart.lines
        ]
        notes = dict.fromkeys(chart.note for chart in charts.values() if chart.lines and chart.note)
        combined.append(Chart(id=spec.id, title=spec.title, note="; ".join(notes), lines=lines))
    return [chart for chart in combined if chart.lines]


def _training(curves: Curves, name: str) -> Line:
    points: list[Point] = []
    for line in curves.metrics:
        step, reward = line["step"], line.get("reward")
        if reward is not None and _is_number(reward):
            error = curves.errors.get(step)
            points.append((step, reward) if error is None else (step, reward, reward - error, reward + error))
    return Line(name=name, points=points)


def _held_out(curves: Curves, name: str) -> Line:
    points = [(step, e.mean) if e.interval is None else (step, *e) for step, e in curves.held_out.items()]
    return Line(name=name, points=points, shape="points")


def _chart(spec: _Spec, series: Mapping[str, Mapping[str, list[Point]]], *, other: bool = False) -> Chart:
    present = {metric: label for metric, label in spec.metrics.items() if metric in series}
    by_policy = len(present) > 1
    lines = [
        Line(name=" · ".join(filter(None, (policy, label if by_policy else ""))) or spec.title, points=points)
        for metric, label in present.items()
        for policy, points in series[metric].items()
    ]
    note = spec.note or ("" if by_policy else "".join(present.values()))
    return Chart(id=spec.id, title=spec.title, note=note, lines=lines, other=other)


def _series(curves: Curves) -> dict[str, dict[str, list[Point]]]:
    """Points by metric and policy; the policy of common metrics is empty."""
    series: dict[str, dict[str, list[Point]]] = {}
    for line in curves.metrics:
        for key, value in with_derived(line, curves.policies).items():
            policy, slash, metric = key.partition("/")
            if not (slash and policy in curves.policies):
                policy, metric = "", key
            if metric != "step" and _is_number(value):
                series.setdefault(metric, {}).setdefault(policy, []).append((line["step"], value))
    return series


def with_derived(line: Mapping[str, Any], policies: Iterable[str] = ()) -> dict[str, Any]:
    """``line`` with the shares and means that are computed from its counts; older runs do not record all."""
    calls = line.get("calls", sum(_number(line.get(f"context_{kind}")) for kind in _CONTEXTS))
    tokens = line.get("tokens_sampled", line.get("tokens_trained"))
    derived = {
        "truncated": _ratio(line.get("calls_truncated"), calls),
        "response_tokens": _ratio(line.get("tokens_trained"), calls),
        "tokens_per_second": _ratio(tokens, line.get("seconds_rollouts")),
    }
    for prefix in ("", *(f"{name}/" for name in policies)):
        for name, count in (("equal_share", "groups_equal"), ("wasted_share", "groups_wasted")):
            derived[f"{prefix}{name}"] = _ratio(line.get(f"{prefix}{count}"), line.get(f"{prefix}groups"))
    return derived | dict(line)


def _ratio(above: Any, below: Any) -> float | None:
    return above / below if _is_number(above) and _number(below) > 0 else None


def _filled(lines: Iterable[Line]) -> list[Line]:
    return [line for line in lines if line.points]


def _number(value: Any) -> float:
    return value if _is_number(value) else 0.0


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and -_LARGEST < value < _LARGEST
