"""The parts of a summary besides the mean rewards: solved tasks, failures, raised monitors, sample answers."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Literal

from lightning_core.errors import shorten
from lightning_core.records.statistics.solved import ROUNDING, is_solved
from lightning_core.records.store import LEFT_OUT, Phase, RolloutRecord, Status, Store
from lightning_core.trace import Trace

Rewards = Mapping[str, Sequence[float]]
"""The rewards of an evaluation by task id, one per sample."""
RewardChange = Literal["rose", "unchanged", "fell"]

ENDINGS: Mapping[str, frozenset[Status]] = {
    "failed": frozenset({"failed", "masked"}),
    "max_calls": frozenset({"max_calls"}),
    "left_out": LEFT_OUT,
}
"""The statuses of rollouts with an error that a summary shows, by the name of their count."""

_ANSWER_CHARACTERS = 200
_ERROR_CHARACTERS = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class SolvedTasks:
    """The held-out tasks whose mean reward is at least ``eval.solved``."""

    tasks: int
    """Number of tasks with a reward both before and after training."""
    before: int
    after: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutEnding:
    """The rollouts of an evaluation that ended in one of the `ENDINGS`."""

    evaluation: Literal["before", "after"]
    """Before or after training."""
    ending: str
    number: int
    rollouts: int
    """All rollouts of the evaluation."""
    error: str | None
    """The first error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RaisedMonitor:
    """A monitor that held after some steps."""

    monitor: str
    policy: str | None
    """The policy that it is about; None with one policy, or for all."""
    first_step: int
    last_step: int
    steps: int
    """Number of steps after which it held."""
    message: str
    """The message of its last alert."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """The last responses to a held-out task before and after training, shortened."""

    task: str
    change: RewardChange
    """The change of the task's mean reward."""
    reward_before: float
    reward_after: float
    before: str | None
    """None if no trained agent responded."""
    after: str | None


def solved_tasks(before: Rewards, after: Rewards, *, solved: float) -> SolvedTasks:
    """The number of tasks that are solved in two evaluations. ``solved``: the reward."""
    common = [task for task in before if task in after]
    first, last = (sum(is_solved(fmean(rewards[task]), solved) for task in common) for rewards in (before, after))
    return SolvedTasks(tasks=len(common), before=first, after=last)


def replaced_groups(metrics: Iterable[Mapping[str, Any]]) -> int:
    """The number of groups that ``rollouts.refill`` replaced."""
    return sum(int(line.get("groups_refilled") or 0) for line in metrics)


def wasted_groups(metrics: Iterable[Mapping[str, Any]]) -> tuple[int, int]:
    """The numbers of groups in training and of groups without advantages, over the steps that recorded both."""
    groups = wasted = 0
    for line in metrics:
        for key, value in line.items():
            prefix, slash, name = key.rpartition("/")
            if name == "groups_wasted":
                wasted += int(value)
                groups += int(line[f"{prefix}{slash}groups"])
    return groups, wasted


def first_error(store: Store, statuses: Collection[Status], *, phase: Phase = "train", after: int = 0) -> str | None:
    """The error of the first rollout of ``phase`` with one of ``statuses`` that was stored ``after`` this ordinal, shortened."""
    first = min(_ended(store, statuses, phase, after), key=lambda r: r.ordinal, default=None)
    return None if first is None or first.error is None else one_line(first.error, _ERROR_CHARACTERS)


def count_statuses(store: Store, ending: str, *, phase: Phase, after: int = 0) -> str:
    """The rollouts with one of the `ENDINGS` by status, such as `` (2 timeout, 1 refused)``; empty if all have the ending's own name."""
    counts = Counter(r.status for r in _ended(store, ENDINGS[ending], phase, after))
    listed = ", ".join(f"{number} {status}" for status, number in counts.most_common())
    return "" if set(counts) <= {ending} else f" ({listed})"


def _ended(store: Store, statuses: Collection[Status], phase: Phase, after: int) -> Iterator[RolloutRecord]:
    stored = (r for status in statuses for r in store.rollouts(phase=phase, status=status))
    return (r for r in stored if r.ordinal > after)


def first_errors(store: Store, *, left_out: int) -> dict[str, str]:
    """The first error of the training rollouts with each of the `ENDINGS`.

    ``left_out``: the number of rollouts that were left out. If there are none, the error of an attempt that was repeated is ``repeated``.
    """
    errors = {name: first_error(store, statuses) for name, statuses in ENDINGS.items()}
    names = {"left_out": "left_out" if left_out else "repeated"}
    return {names.get(name, name): error for name, error in errors.items() if error is not None}


def held_out_endings(store: Store, *, before: int | None, after: int | None) -> Iterator[HeldOutEnding]:
    """The endings of the evaluations before and after training, which took place after these numbers of updates; None: there was none."""
    phases: tuple[tuple[Literal["before", "after"], Phase, int | None], ...] = (
        ("before", "eval_before", before),
        ("after", "eval_after", after),
    )
    for evaluation, phase, step in phases:
        final = [] if step is None else _final_attempts(store.rollouts(phase=phase, step=step))
        for name, statuses in ENDINGS.items():
            if ended := [r for r in final if r.status in statuses]:
                error = next((one_line(r.error, _ERROR_CHARACTERS) for r in ended if r.error is not None), None)
                yield HeldOutEnding(
                    evaluation=evaluation, ending=name, number=len(ended), rollouts=len(final), error=error
                )


def _final_attempts(records: Iterable[RolloutRecord]) -> list[RolloutRecord]:
    """``records`` without attempts that were repeated. Each rollout of a task has one first attempt, and one that counts or is its last."""
    by_task: defaultdict[str, list[RolloutRecord]] = defaultdict(list)
    for record in records:
        by_task[record.task_id].append(record)
    final: list[RolloutRecord] = []
    for attempts in by_task.values():
        counted = [r for r in attempts if r.status not in LEFT_OUT]
        lost = sum(r.attempt == 0 for r in attempts) - len(counted)
        latest = sorted((r for r in attempts if r.status in LEFT_OUT), key=lambda r: r.attempt, reverse=True)
        final += [*counted, *latest[:lost]]
    return sorted(final, key=lambda r: r.ordinal)


def sample_answers(store: Store, before: Rewards, after: Rewards) -> list[Answers]:
    """The answers to the first task whose reward rose, the first that did not change, and the first that fell, in order of ids."""
    chosen: dict[RewardChange, str] = {}
    for task in sorted(before.keys() & after.keys()):
        chosen.setdefault(_change(fmean(before[task]), fmean(after[task])), task)
    first, last = (_rollouts(store, phase, chosen.values()) for phase in ("eval_before", "eval_after"))
    return [
        Answers(
            task=task,
            change=change,
            reward_before=fmean(before[task]),
            reward_after=fmean(after[task]),
            before=_last_response(store, first.get(task)),
            after=_last_response(store, last.get(task)),
        )
        for change in ("rose", "unchanged", "fell")
        if (task := chosen.get(change)) is not None
    ]


def _change(before: float, after: float) -> RewardChange:
    if abs(after - before) <= ROUNDING:
        return "unchanged"
    return "rose" if after > before else "fell"


def _rollouts(store: Store, phase: Phase, tasks: Collection[str]) -> dict[str, int]:
    """The first finished rollout of each of ``tasks`` in the last evaluation of ``phase``."""
    records = [r for r in store.rollouts(phase=phase) if r.task_id in tasks and r.status not in LEFT_OUT]
    newest = max((r.step for r in records), default=0)
    counts: dict[str, int] = {}
    for record in records:
        if record.step == newest:
            counts.setdefault(record.task_id, record.ordinal)
    return counts


def _last_response(store: Store, rollout: int | None) -> str | None:
    return None if rollout is None else last_response(store.trace(rollout))


def last_response(trace: Trace) -> str | None:
    """The text or the tool calls of the last response of a trained agent, shortened; None without one."""
    response = next((c.response for c in reversed(trace.calls) if c.trained and c.response is not None), None)
    if response is None:
        return None
    return one_line(response_text(response), _ANSWER_CHARACTERS)


def response_text(response: Mapping[str, Any]) -> str:
    """The text and the tool calls of a response."""
    content = response.get("content")
    parts = [content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)] if content else []
    for call in response.get("tool_calls") or ():
        function = call.get("function") or {}
        parts.append(f"{function.get('name')}({function.get('arguments')})")
    return " ".join(parts)


def one_line(text: str, characters: int) -> str:
    """``text`` on one line, without what is beyond ``characters``, and without control characters of terminals."""
    line = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in " ".join(text.split()))
    return shorten(line, characters)
