"""The result of a run, computed from its folder: evaluations, summary, curve."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from lightning_core.config import Config
from lightning_core.config.command import CommandSection
from lightning_core.errors import html_table
from lightning_core.records.report import Summary, draw_curve, find_summary, read_metrics, seconds_of_steps
from lightning_core.records.run_folder.checkpoints import best_checkpoint, checkpoint_step, checkpoints
from lightning_core.records.statistics.constant_answer import (
    AnswersOfRun,
    Score,
    compare_answers,
    given_answers,
    reward_problem,
)
from lightning_core.records.statistics.held_out import EVALUATIONS
from lightning_core.records.statistics.intervals import Comparison, compare, compare_splits, confidence_interval
from lightning_core.records.statistics.pass_rates import common_pass_rates
from lightning_core.records.statistics.same_responses import same_responses
from lightning_core.records.statistics.summary import (
    first_errors,
    held_out_endings,
    replaced_groups,
    sample_answers,
    solved_tasks,
    wasted_groups,
)
from lightning_core.records.store import LEFT_OUT, Phase, RolloutRecord, Store


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Rewards of one pass over held-out tasks."""

    rewards: Mapping[str, Sequence[float]]
    """Rewards by task id, one per sample, without tasks whose rollouts were all left out."""
    left_out: int
    """Number of rollouts that ended for a reason outside the agent or with an invalid reward."""
    failed: int = 0
    """Number of rollouts that the agent failed; they count, with the reward so far, else 0."""
    max_calls: int = 0
    """Number of rollouts that reached ``rollouts.max_calls``; they count, with the reward returned or the reward so far, else 0."""

    @property
    def reward(self) -> float | None:
        """The mean over tasks of each task's mean reward; None without rewards."""
        return fmean(fmean(rewards) for rewards in self.rewards.values()) if self.rewards else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The result of `fit`."""

    folder: Path
    """The run's folder: configuration, metrics, store, checkpoints, summary, curve."""
    checkpoint: Path
    summary: Summary
    metrics: Sequence[Mapping[str, Any]]
    """One mapping per step, as in ``metrics.jsonl``."""

    def _repr_html_(self) -> str:
        s = self.summary
        compared = {} if s.eval is None else {"all": s.eval, **s.splits}
        rows = [
            (name, c.tasks, c.eval_reward_before, c.eval_reward_after, c.improvement, c.improvement_ci95 and c.improved)
            for name, c in compared.items()
        ]
        caption = (
            f"{self.folder}: {s.steps} steps, {s.rollouts} rollouts{f', stopped: {s.stopped}' if s.stopped else ''}"
        )
        return html_table(caption, ("held-out tasks", "number", "before", "after", "improvement", "significant"), rows)


class Recorded(NamedTuple):
    """The records of a run so far."""

    lines: Sequence[Mapping[str, Any]]
    """The steps as in ``metrics.jsonl``, oldest first."""
    store: Store

    @property
    def steps(self) -> int:
        """Number of steps."""
        return int(self.lines[-1]["step"]) if self.lines else 0


def to_evaluation(outcomes: Iterable[tuple[str, str, float]]) -> Evaluation:
    """The evaluation with these ``outcomes``: task id, status and reward of each rollout."""
    by_task: dict[str, list[float]] = {}
    left_out = failed = max_calls = 0
    for task_id, status, reward in outcomes:
        failed += status in ("failed", "masked")
        max_calls += status == "max_calls"
        if status in LEFT_OUT:
            left_out += 1
        else:
            by_task.setdefault(task_id, []).append(reward)
    return Evaluation(rewards=by_task, left_out=left_out, failed=failed, max_calls=max_calls)


def recorded_evaluations(store: Store, phase: Phase = "eval") -> dict[int, Evaluation]:
    """The evaluations in ``store``, by the number of updates before them."""
    by_step: dict[int, list[RolloutRecord]] = {}
    for record in store.rollouts(phase=phase):
        by_step.setdefault(record.step, []).append(record)
    return {
        step: to_evaluation((r.task_id, r.status, r.reward or 0.0) for r in records)
        for step, records in by_step.items()
    }


def held_out_rewards(store: Store, *phases: Phase) -> dict[int, float]:
    """The mean held-out reward in ``store``, by the number of updates before the evaluation."""
    rewards = {step: e.reward for phase in phases for step, e in recorded_evaluations(store, phase).items()}
    return {step: reward for step, reward in sorted(rewards.items()) if reward is not None}


def seconds_before(folder: Path, checkpoint: Path | None) -> float:
    """Seconds of the run in ``folder`` before it was resumed from ``checkpoint``; None: 0.

    All until the end of the run if it had ended once, and the rollouts and updates of later steps.
    """
    if checkpoint is None:
        return 0.0
    steps, ended = checkpoint_step(checkpoint), find_summary(folder / "summary.json")
    before, seconds = (0, 0.0) if ended is None else (ended.steps, ended.wall_seconds)
    later = [line for line in read_metrics(folder / "metrics.jsonl") if before < line["step"] <= steps]
    return seconds + seconds_of_steps(later)


def finish(
    config: Config,
    folder: Path,
    eval_tasks: Sequence[Mapping[str, Any]],
    reward: Score | None,
    seconds: float,
    complete: Callable[[Summary, Recorded], Summary],
) -> Result:
    """Write ``summary.json`` and ``curve.png`` of a finished run; returns its result.

    ``reward``: the reward function. ``complete``: see `Observer.summarize`.
    """
    checkpoint = checkpoints(folder)[-1]
    metrics = read_metrics(folder / "metrics.jsonl")
    with Store(folder / "store.db", read_only=True) as store:
        evaluations = {phase: recorded_evaluations(store, phase) for phase in EVALUATIONS}
        tokens_sampled = store.tokens_sampled()
        before_step, before = next(iter(evaluations["eval_before"].items()), (None, None))
        after_step, after = next(reversed(evaluations["eval_after"].items()), (None, None))
        answers = [] if before is None or after is None else sample_answers(store, before.rewards, after.rewards)
        best = best_checkpoint(folder)
        splits = {str(t["id"]): str(t["split"]) for t in eval_tasks if "split" in t}
        overall, solved, by_split = None, None, dict[str, Comparison]()
        all_answers, rates = AnswersOfRun(None, None, None), ((), ())
        if before is not None and after is not None:
            overall = compare(before.rewards, after.rewards)
            solved = solved_tasks(before.rewards, after.rewards, solved=config.eval.solved)
            rates = common_pass_rates(before.rewards, after.rewards, solved=config.eval.solved)
            all_answers = compare_answers(
                given_answers(store), after.rewards, eval_tasks, reward, reward_problem(store)
            )
            if len(set(splits.values())) > 1:
                by_split = compare_splits(before.rewards, after.rewards, splits)
        groups, wasted = wasted_groups(metrics)
        left_out = sum(int(m["rollouts_left_out"]) for m in metrics)
        summary = Summary(
            eval=overall,
            eval_tasks_left_out=0 if overall is None else len({str(t["id"]) for t in eval_tasks}) - overall.tasks,
            held_out_endings=tuple(held_out_endings(store, before=before_step, after=after_step)),
            splits=by_split,
            steps=checkpoint_step(checkpoint),
            best_step=None if best is None else checkpoint_step(best),
            rollouts=sum(int(m["rollouts"]) for m in metrics),
            tokens_sampled=tokens_sampled,
            tokens_trained=sum(int(m["tokens_trained"]) for m in metrics if not m.get("updates_skipped")),
            wall_seconds=seconds,
            seed=config.run.seed,
            solved=solved,
            groups=groups,
            groups_wasted=wasted,
            groups_replaced=replaced_groups(metrics),
            rollouts_failed=sum(int(m["rollouts_failed"]) for m in metrics),
            rollouts_max_calls=sum(int(m.get("rollouts_max_calls") or 0) for m in metrics),
            rollouts_left_out=left_out,
            first_errors=first_errors(store, left_out=left_out),
            pass_rates_before=rates[0],
            pass_rates_after=rates[1],
            answers=tuple(answers),
            distinct_answers=all_answers.distinct,
            constant_answer=all_answers.constant,
            constant_answer_problem=all_answers.problem,
            same_responses=() if overall is None else same_responses(store),
        )
        summary = complete(summary, Recorded(lines=metrics, store=store))
    summary.write(folder / "summary.json")
    measured = [(step, e) for by_step in evaluations.values() for step, e in by_step.items() if e.rewards]
    draw_curve(
        folder / "curve.png",
        steps=[(int(m["step"]), float(m["reward"])) for m in metrics],
        evals=[(step, confidence_interval([fmean(r) for r in e.rewards.values()])) for step, e in measured],
        title=config.agent.agent if isinstance(config.agent, CommandSection) else config.agent or "",
    )
    return Result(folder=folder, checkpoint=checkpoint, summary=summary, metrics=metrics)
