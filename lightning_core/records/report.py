"""A run's result files: ``summary.json``, ``metrics.jsonl`` and ``curve.png``."""

from __future__ import annotations

import json
import logging
import math
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

from lightning_core.capture.integration import discover, requirements_of_extra
from lightning_core.errors import MissingExtra, RecordError
from lightning_core.records.atomic import write_atomically
from lightning_core.records.json_file import read_json
from lightning_core.records.statistics.constant_answer import ConstantAnswer, DistinctAnswers
from lightning_core.records.statistics.intervals import Comparison, Estimate
from lightning_core.records.statistics.measured import EvaluationSummary, read_evaluation
from lightning_core.records.statistics.pass_rates import PassRate
from lightning_core.records.statistics.same_responses import SameResponse
from lightning_core.records.statistics.summary import Answers, HeldOutEnding, RaisedMonitor, SolvedTasks

logger = logging.getLogger(__name__)

_PACKAGES = ("lightning-rl", "torch", "transformers", "numpy")


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """A run's results; ``summary.json``. Without held-out tasks, the comparison is null."""

    eval: Comparison | None
    eval_tasks_left_out: int = 0
    """Held-out tasks that the comparison is without: before or after training all their rollouts were left out."""
    held_out_endings: Sequence[HeldOutEnding] = ()
    """The rollouts before and after training that failed, reached ``rollouts.max_calls`` or were left out."""
    splits: Mapping[str, Comparison] = field(default_factory=dict[str, Comparison])
    """The comparison for each value of the tasks' ``split``."""
    steps: int
    rollouts: int
    """Training rollouts, including those left out of updates; without evaluations."""
    tokens_sampled: int
    tokens_trained: int
    """Sampled tokens in rows with a gradient. With a single policy, without those of skipped updates."""
    wall_seconds: float
    """Seconds of the process that ended the run, and of what earlier ones did: all that they took if one of them ended the run too, and
    the rollouts and updates of the steps since then."""
    seed: int
    stopped: str | None = None
    """The reason the run ended before ``trainer.steps``, or None."""
    best_step: int | None = None
    """The step of the checkpoint that ``trainer.keep_best`` kept."""
    evaluation: EvaluationSummary | None = None
    """The result of a run that is a single evaluation, by `lightning-rl eval` or `baseline`; None for one that trained."""
    pass_rates_before: Sequence[PassRate] = ()
    """pass@k and pass^k on the held-out tasks before training; empty with one rollout of each."""
    pass_rates_after: Sequence[PassRate] = ()
    solved: SolvedTasks | None = None
    """The solved held-out tasks; None without a comparison."""
    groups: int = 0
    """Groups of rollouts in training, of all policies."""
    groups_wasted: int = 0
    """Groups whose calls all had the advantage 0, without effect on training."""
    groups_replaced: int = 0
    """Further groups without a gradient, which ``rollouts.refill`` replaced."""
    rollouts_failed: int = 0
    """Training rollouts in which the agent failed."""
    rollouts_max_calls: int = 0
    """Training rollouts that reached ``rollouts.max_calls``."""
    rollouts_left_out: int = 0
    """Training rollouts with an infrastructure failure or an invalid reward."""
    first_errors: Mapping[str, str] = field(default_factory=dict[str, str])
    """The first error of the ``failed``, the ``max_calls`` and the ``left_out`` rollouts; of ``repeated`` attempts if none was left out."""
    monitors: Sequence[RaisedMonitor] = ()
    """The monitors that were raised, in the order of their first step."""
    answers: Sequence[Answers] = ()
    """Answers to up to three held-out tasks before and after training."""
    distinct_answers: DistinctAnswers | None = None
    """The different answers to all held-out tasks; None without a comparison."""
    constant_answer: ConstantAnswer | None = None
    """The best constant answer, which an improvement of more than form beats."""
    constant_answer_problem: str | None = None
    """The reason that ``constant_answer`` is missing, or computed from recorded rewards despite a reward function."""
    same_responses: Sequence[SameResponse] = ()
    """The agents whose first response became the same for nearly all held-out tasks."""
    versions: Mapping[str, str] = field(default_factory=lambda: installed_versions())

    @property
    def improved(self) -> bool | None:
        """Whether the improvement is significant; None without an evaluation."""
        return None if self.eval is None else self.eval.improved

    @property
    def is_form_only(self) -> bool:
        """Whether the improvement is significant, but not shown to exceed the best constant answer."""
        return bool(self.improved) and self.constant_answer is not None and not self.constant_answer.is_beaten

    def write(self, path: Path) -> None:
        """Write ``summary.json``: the comparison's fields at the top level, then the rest."""
        data = asdict(self)
        comparison = data.pop("eval") or dict.fromkeys(f.name for f in fields(Comparison))
        comparison["eval_tasks"] = comparison.pop("tasks")
        write_atomically(path, json.dumps({**comparison, **data}, indent=2, ensure_ascii=False) + "\n")


def read_summary(path: Path) -> Summary:
    """Read a file that `Summary.write` wrote."""
    data = read_json(path)
    data["tasks"] = data.pop("eval_tasks")
    comparison = {key: data.pop(key) for key in (f.name for f in fields(Comparison))}
    splits = {name: _comparison(values) for name, values in data.pop("splits").items()}
    solved = data.pop("solved", None)  # missing in files of older versions, as are those below
    distinct, constant = data.pop("distinct_answers", None), data.pop("constant_answer", None)
    evaluation = data.pop("evaluation", None)
    return Summary(
        eval=None if comparison["tasks"] is None else _comparison(comparison),
        splits=splits,
        evaluation=None if evaluation is None else read_evaluation(evaluation),
        pass_rates_before=tuple(PassRate(**values) for values in data.pop("pass_rates_before", ())),
        pass_rates_after=tuple(PassRate(**values) for values in data.pop("pass_rates_after", ())),
        solved=None if solved is None else SolvedTasks(**solved),
        held_out_endings=tuple(HeldOutEnding(**values) for values in data.pop("held_out_endings", ())),
        monitors=tuple(RaisedMonitor(**values) for values in data.pop("monitors", ())),
        answers=tuple(Answers(**values) for values in data.pop("answers", ())),
        distinct_answers=None if distinct is None else DistinctAnswers(**distinct),
        constant_answer=None if constant is None else ConstantAnswer(**_with_tuples(constant)),
        same_responses=tuple(SameResponse(**values) for values in data.pop("same_responses", ())),
        **data,
    )


def find_summary(path: Path) -> Summary | None:
    """The summary in the file ``path``; None if there is none, or if it is damaged."""
    try:
        return read_summary(path)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _comparison(data: Mapping[str, Any]) -> Comparison:
    return Comparison(**_with_tuples(data))


def _with_tuples(data: Mapping[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in data.items()}


def installed_versions() -> dict[str, str]:
    """Versions of Python, of this package and of the installed frameworks."""
    return dict(_installed_versions())


@cache
def _installed_versions() -> Mapping[str, str]:
    versions = {"python": platform.python_version()}
    for package in (*_PACKAGES, *_integrated_distributions()):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions


def _integrated_distributions() -> list[str]:
    """The distributions that announce integrations, and their requirements."""
    unnamed: list[str] = []
    for name, entry in discover().items():
        if entry.dist is not None:
            unnamed += [entry.dist.name, *(requirement.name for requirement in requirements_of_extra(entry.dist, name))]
    return unnamed


class MetricsLog:
    """``metrics.jsonl``: one JSON object per step, flushed when `append` returns.

    For a resumed run, pass ``keep_steps``: opening drops the lines of later steps, and an
    incomplete last line; of a step that has two, the later one stays.
    """

    def __init__(
        self, path: Path, *, keep_steps: int = 0, stored: Mapping[int, Mapping[str, Any]] | None = None
    ) -> None:
        """``stored``: the metrics by step in the run's store, which replace lines that are damaged or lost.

        Raises `RecordError` for a damaged file if the store does not have its steps.
        """
        self.path = path
        kept = [line for line in _read_or_restore(path, stored or {}) if line["step"] <= keep_steps]
        self.lines: list[Mapping[str, Any]] = list(kept)
        """The steps in the file."""
        write_atomically(path, "".join(_json_line(line) for line in kept))

    def append(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Write one step; numbers that are not finite become null."""
        line = finite_or_none({"step": step, **metrics})
        self.lines.append(line)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(_json_line(line))


def _read_or_restore(path: Path, stored: Mapping[int, Mapping[str, Any]]) -> list[dict[str, Any]]:
    restored: dict[int, dict[str, Any]] = {step: {"step": step, **metrics} for step, metrics in stored.items()}
    if not path.is_file():
        return list(restored.values())
    try:
        found = {line["step"]: line for line in read_metrics(path)}
    except RecordError as error:
        if not restored:
            raise
        logger.warning("%s. Its lines are restored from the store", error)
        return list(restored.values())
    return [line for _, line in sorted({**restored, **found}.items())]


def seconds_of_steps(metrics: Sequence[Mapping[str, Any]]) -> float:
    """The seconds that the rollouts and updates of steps with these ``metrics`` took."""
    return sum(m.get("seconds_rollouts", 0.0) + m.get("seconds_update", 0.0) for m in metrics)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of ``metrics.jsonl``, without an incomplete last line. Raises `RecordError` for a damaged one."""
    found: list[dict[str, Any]] = []
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
        if not line:
            continue
        try:
            values: Any = json.loads(line)
        except ValueError as error:
            raise RecordError(f"line {number} of {str(path)!r} is damaged: {error}") from None
        if not (isinstance(values, dict) and isinstance(values.get("step"), int)):
            raise RecordError(f"line {number} of {str(path)!r} is damaged: expected the metrics of a step")
        found.append(values)
    return found


def _json_line(values: Mapping[str, Any]) -> str:
    return json.dumps(values, ensure_ascii=False) + "\n"


def finite_or_none(values: Mapping[str, Any]) -> dict[str, Any]:
    """``values`` with None for floats that are not finite, which JSON does not have."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}


def draw_curve(
    path: Path, *, steps: Iterable[tuple[int, float]], evals: Iterable[tuple[int, Estimate]], title: str = ""
) -> None:
    """Draw ``curve.png``: training reward by step, and held-out reward by steps taken.

    Raises `MissingExtra` without matplotlib.
    """
    try:
        figures = import_module("matplotlib.figure")
    except ModuleNotFoundError:
        raise MissingExtra("matplotlib", "torch", "drawing curve.png") from None
    figure: Any = figures.Figure(figsize=(8, 4.5), dpi=120)  # its own Figure uses Agg, which needs no display
    figure.subplots_adjust(left=0.08, right=0.98, bottom=0.11, top=0.92)
    axes = figure.subplots()
    trained = list(steps)
    axes.plot(
        [step for step, _ in trained],
        [r for _, r in trained],
        color="tab:blue",
        alpha=0.8,
        label="training tasks, mean per step",
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
            label="held-out tasks, 95% interval",
        )
    axes.set(xlabel="training step", ylabel="reward", title=title)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path)
