"""Pure functions from tasks to jobs, and from rollouts to episodes and records.

The same for every trainer.
"""

from __future__ import annotations

import hashlib
import random
import time
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from functools import lru_cache
from typing import Any

from lightning_core.config import Config
from lightning_core.credit import Credit, Episode
from lightning_core.errors import TrainingError
from lightning_core.records.store import LEFT_OUT, CallCredit, Phase, RolloutRecord, step_of
from lightning_core.rollouts.attempt import Job, Rollout, Task
from lightning_core.transitions import refused_calls, trace_to_transitions


def pick_tasks(tasks: Sequence[Task], config: Config, step: int) -> list[Task]:
    """The tasks of ``step``. Each pass over all tasks has its own order, which depends on ``run.seed`` alone."""
    size = config.rollouts.tasks_per_step
    picked: list[Task] = []
    for position in range(step * size, (step + 1) * size):
        epoch, index = divmod(position, len(tasks))
        picked.append(tasks[_order(config.run.seed, epoch, len(tasks))[index]])
    return picked


@lru_cache(maxsize=2)  # a step may begin in one pass and end in the next
def _order(seed: int, epoch: int, tasks: int) -> Sequence[int]:
    """The indices of that many tasks in the order of a pass."""
    return random.Random(f"{seed}:{epoch}").sample(range(tasks), tasks)


def count_earlier(tasks: Iterable[Task]) -> list[int]:
    """The number of tasks before each task with the same id."""
    seen: Counter[str] = Counter()
    earlier: list[int] = []
    for task in tasks:
        earlier.append(seen[task["id"]])
        seen[task["id"]] += 1
    return earlier


def make_jobs(task: Task, config: Config, *, copies: int, phase: Phase, step: int, earlier: int = 0) -> list[Job]:
    """``copies`` jobs for ``task``, each with its own seed.

    All evaluations use the same seeds, so only the policy differs between them.

    ``earlier``: number of groups of the same task before this one in the step, with their own seeds.
    """
    first = earlier * copies
    when = str(step) if phase == "train" else "eval"
    return [
        Job(task=task, task_id=str(task["id"]), seed=_seed(config.run.seed, when, task["id"], copy))
        for copy in range(first, first + copies)
    ]


def to_episodes(rollouts: Iterable[Rollout], trained: Collection[str]) -> list[Episode]:
    """The rollouts that can be trained on: all but infrastructure failures and invalid rewards.

    Raises `TrainingError` for a call of a trained agent without usable tokens.
    """
    episodes: list[Episode] = []
    for r in rollouts:
        if r.status in LEFT_OUT:
            continue
        for refusal in refused_calls(r.trace, agents=trained):
            if refusal.kind == "untrainable":
                raise TrainingError(f"a call of agent {refusal.agent!r} cannot be trained on: {refusal.reason}")
        transitions = trace_to_transitions(r.trace, agents=trained)
        masked = r.status == "masked"
        episodes.append(Episode(trace=r.trace, transitions=transitions, rewards=r.trace.rewards, masked=masked))
    return episodes


def call_credits(episodes: Iterable[Episode], credit: Credit, step: int) -> list[CallCredit]:
    """The credit of each call, as recorded. ``step``: number of updates so far."""
    return [
        CallCredit(
            rollout=e.rollout,
            call=t.call,
            agent=t.agent,
            step=step_of("train", step),
            reward=credit.values[t.call],
            advantage=credit.advantages[t.call],
            tokens=len(t.output_ids),
        )
        for e in episodes
        for t in e.transitions
    ]


def rollout_record(
    rollout: Rollout, step: int, phase: Phase, version: int | None, *, rejected: str | None = None
) -> RolloutRecord:
    """One attempt, as recorded. ``step``: number of updates so far. ``rejected``: why it is not used; None if it is."""
    root = rollout.trace.events[0] if rollout.trace.events else None
    now = time.time_ns()
    return RolloutRecord(
        id=rollout.trace.rollout,
        step=step_of(phase, step),
        task_id=rollout.job.task_id,
        phase=phase,
        attempt=rollout.attempt,
        status=rollout.status,
        reward=rollout.trace.reward,
        error=rollout.error if rejected is None else f"{phase} dropped: {rejected}",
        version=version,
        started_ns=root.start_ns if root else now,
        ended_ns=root.end_ns if root else now,
        counters=rollout.trace.counters,
    )


def _seed(*parts: Any) -> int:
    return int(hashlib.blake2b(repr(parts).encode(), digest_size=7).hexdigest(), 16)
