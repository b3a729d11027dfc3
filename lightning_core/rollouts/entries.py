"""Pure functions from tasks to jobs, and from rollouts to episodes and records.

The same for every trainer.
"""

from __future__ import annotations

import hashlib
import random
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from lightning_core.capture import Run
from lightning_core.config import Config
from lightning_core.config.forks import Forks
from lightning_core.credit import Credit, Episode
from lightning_core.errors import TrainingError
from lightning_core.records.store import LEFT_OUT, CallCredit, Phase, RolloutRecord
from lightning_core.records.task_history import Tried
from lightning_core.rollouts.attempt import Job, Rollout
from lightning_core.rollouts.curriculum import draw_tasks, sampling_probabilities
from lightning_core.rollouts.forks import Fork, choose_points, fork_seed, recording_of
from lightning_core.rollouts.replayed_tools import check_tools, kept_tools, recorded_tools
from lightning_core.rollouts.tasks import Task
from lightning_core.trace import Call
from lightning_core.transitions import refused_calls, trace_to_transitions


def pick_tasks(
    tasks: Sequence[Task], config: Config, step: int, tried: Mapping[str, Tried] | None = None
) -> list[Task]:
    """The tasks of ``step``.

    Each pass over all tasks has its own order, which depends on ``run.seed`` alone. With ``tasks.sampling: curriculum`` there are no
    passes: each step draws its tasks by ``tried``, the attempts so far by task id.
    """
    size = config.rollouts.tasks_per_step
    if config.tasks.sampling == "curriculum":
        probabilities = sampling_probabilities(tasks, tried or {}, config.tasks.sampling_floor)
        return draw_tasks(tasks, probabilities, size, seed=f"{config.run.seed}:curriculum:{step}")
    picked: list[Task] = []
    for position in range(step * size, (step + 1) * size):
        epoch, index = divmod(position, len(tasks))
        order = random.Random(f"{config.run.seed}:{epoch}").sample(range(len(tasks)), len(tasks))
        picked.append(tasks[order[index]])
    return picked


def count_earlier(tasks: Iterable[Task]) -> list[int]:
    """For each task, how many tasks before it have the same id."""
    seen: Counter[str] = Counter()
    earlier: list[int] = []
    for task in tasks:
        earlier.append(seen[task["id"]])
        seen[task["id"]] += 1
    return earlier


def make_jobs(task: Task, config: Config, *, copies: int, phase: Phase, step: int, earlier: int = 0) -> list[Job]:
    """``copies`` jobs for ``task``, each with its own seed.

    All evaluations use the same seeds, so that only the policy differs between them.

    ``earlier``: number of groups of the same task before this one in the step, with seeds of their own.
    """
    first = earlier * copies
    when = str(step) if phase == "train" else "eval"
    tools = kept_tools(config.rollouts.forks) if phase == "train" else None
    return [
        Job(task=task, task_id=str(task["id"]), seed=_seed(config.run.seed, when, task["id"], copy), tools=tools)
        for copy in range(first, first + copies)
    ]


def fork_jobs(rollouts: Sequence[Rollout], settings: Forks, agents: Collection[str]) -> list[Job]:
    """The forks of ``rollouts``, the attempts at one task, at calls of ``agents``; see ``rollouts.forks``."""
    finished = {r.trace.rollout: r for r in rollouts if r.status not in LEFT_OUT}
    if not finished:
        return []
    seed = next(iter(finished.values())).job.seed
    points = choose_points([r.trace for r in finished.values()], settings, agents, seed=seed)
    return [
        fork_job(finished[trace.rollout], call, index, sample)
        for index, (trace, call) in enumerate(points)
        for sample in range(settings.samples)
    ]


def fork_job(origin: Rollout, point: Call, index: int, sample: int) -> Job:
    """Fork ``sample`` of ``origin`` at its call ``point``, which is point number ``index`` of the task."""
    job, trace = origin.job, origin.trace
    return replace(
        job,
        seed=fork_seed(job.seed, index, sample),
        fork=Fork(recording=recording_of(trace, point), agent_seed=job.seed + origin.attempt),
        tools=job.tools and replace(job.tools, recorded=recorded_tools(trace, point)),
    )


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
        episodes.append(Episode(trace=r.trace, transitions=transitions, rewards=r.trace.rewards))
    return episodes


def call_credits(episodes: Iterable[Episode], credit: Credit, step: int) -> list[CallCredit]:
    """The credit of each call, as recorded."""
    return [
        CallCredit(
            rollout=e.rollout,
            call=t.call,
            agent=t.agent,
            step=step,
            reward=credit.values[t.call],
            advantage=credit.advantages[t.call],
            tokens=len(t.output_ids),
        )
        for e in episodes
        for t in e.transitions
    ]


def rollout_record(rollout: Rollout, step: int, phase: Phase, version: int | None) -> RolloutRecord:
    """One attempt, as recorded."""
    root = rollout.trace.events[0] if rollout.trace.events else None
    now = time.time_ns()
    return RolloutRecord(
        id=rollout.trace.rollout,
        step=step,
        task_id=rollout.job.task_id,
        phase=phase,
        attempt=rollout.attempt,
        status=rollout.status,
        reward=rollout.trace.reward,
        error=rollout.error if rollout.dropped is None else f"fork dropped: {rollout.dropped}",
        version=version,
        started_ns=root.start_ns if root else now,
        ended_ns=root.end_ns if root else now,
        counters=rollout.trace.counters,
    )


def judge_record(task_id: str, run: Run, error: str | None, step: int) -> RolloutRecord:
    """The judge's rollout for one group, as recorded. ``error``: why it returned no scores."""
    root = run.trace.events[0]
    return RolloutRecord(
        id=run.trace.rollout,
        step=step,
        task_id=task_id,
        phase="judge",
        attempt=0,
        status="ok" if error is None else "infrastructure",
        reward=None,
        error=error,
        version=None,
        started_ns=root.start_ns,
        ended_ns=root.end_ns,
        counters=run.trace.counters,
    )


def _seed(*parts: Any) -> int:
    return int(hashlib.blake2b(repr(parts).encode(), digest_size=7).hexdigest(), 16)


def check_tools_of(rollouts: Sequence[Rollout]) -> bool:
    """`check_tools`, if results of tools were kept in ``rollouts``; returns whether they were."""
    kept = next((r.job.tools for r in rollouts if r.job.tools is not None), None)
    if kept is not None:
        check_tools(kept, [r.trace for r in rollouts])
    return kept is not None
