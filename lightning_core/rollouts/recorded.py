"""Rollouts that were recorded before a run was interrupted, in the step or evaluation that it continues with."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

from lightning_core.config import Config
from lightning_core.endpoint.agents.routing import Routing
from lightning_core.records.run_folder.commit import commit_changed, newer_files
from lightning_core.records.run_folder.configs import changed_settings
from lightning_core.records.store import LEFT_OUT, Phase, RolloutRecord, Store
from lightning_core.rollouts.attempt import AgentPool, Attempt, Job, Record, Rollout
from lightning_core.trace import SEED, TASK, TASK_ID, spans_to_trace

logger = logging.getLogger(__name__)

_WITHOUT_EFFECT = ("trainer.", "monitors.", "otlp.", "run.", "eval.every", "eval.early_stop")
"""Settings that change no rollout under given weights. (``run.seed`` does: its rollouts have other seeds.)"""
_WITH_EFFECT = frozenset({"trainer.deterministic", "trainer.threads"})
"""But these: the bits of samples depend on them."""
_MOST_NAMED = 5
"""Files that a warning names."""


class RecordedAgents:
    """An `AgentPool` that returns a recorded rollout of a job, if there is one, and else runs its agent with ``agents``."""

    def __init__(self, agents: AgentPool, store: Store) -> None:
        self._agents = agents
        self._store = store
        self._left: dict[int, tuple[RolloutRecord, Collection[str]]] = {}
        """By seed of the job: the rollout, and the ids of all attempts at the job."""

    def find(self, folder: Path, config: Config, steps: int) -> Collection[str]:
        """The ids of the rollouts that are returned from now on, for a run in ``folder`` that continues after ``steps`` updates.

        None, with a warning, if settings or code have changed since.
        """
        attempts: dict[int, list[RolloutRecord]] = {}
        places: tuple[tuple[Phase, int], ...] = (("train", steps + 1), ("eval_unfinished", steps))
        for phase, step in places:
            for record in self._store.rollouts(phase=phase, step=step):
                if (seed := self._seed(record)) is not None:
                    attempts.setdefault(seed, []).append(record)
        used = {seed: own for seed, own in attempts.items() if own[-1].status not in LEFT_OUT}
        if all(own[-1].status == "failed" for own in used.values()):
            used = {}  # the run may have stopped because all failed, for a reason that is mended now
        changed = changed_settings(folder, config, without=_WITHOUT_EFFECT, but=_WITH_EFFECT) if used else []
        if used and not changed and commit_changed(folder, Path.cwd()):
            changed = [_changed_code(folder, Path.cwd())]
        if changed:
            logger.warning(
                "%d recorded rollouts of the interrupted step or evaluation are not used, but made again, because of what has changed: %s",
                *(len(used), ", ".join(changed)),
            )
            used = {}
        self._left = {seed: (own[-1], [record.id for record in own]) for seed, own in used.items()}
        return [key for _, ids in self._left.values() for key in ids]

    def end_step(self) -> None:
        """The weights have changed: delete the recorded rollouts that no job asked for."""
        self._drop(self._left)

    def end_evaluation(self) -> None:
        """Delete those of an evaluation, which was of other tasks."""
        self._drop([seed for seed, (record, _) in self._left.items() if record.phase != "train"])

    def _drop(self, seeds: Iterable[int]) -> None:
        dropped = [self._left.pop(seed) for seed in list(seeds)]
        if dropped:
            self._store.remove([key for _, ids in dropped for key in ids])

    async def roll_out(self, jobs: Sequence[Job], routing: Routing, record: Record) -> Sequence[Rollout]:
        """See `AgentPool.roll_out`."""
        jobs_left = [job for job in jobs if job.seed in self._left and job.recorded is None]
        found = {job.seed: rollout for job in jobs_left if (rollout := self._read(job)) is not None}
        if found:
            record([Attempt(rollout=rollout, final=True, is_recorded=True) for rollout in found.values()])
        others = [job for job in jobs if job.seed not in found]
        ran = iter(await self._agents.roll_out(others, routing, record) if others else ())
        return [found[job.seed] if job.seed in found else next(ran) for job in jobs]

    async def call_endpoint(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """See `AgentPool.call_endpoint`."""
        return await self._agents.call_endpoint(function, *arguments)

    def _seed(self, record: RolloutRecord) -> int | None:
        """The seed of the job of ``record``; None if it has none, or if a signal added to it, which would do so again."""
        spans = self._store.spans(record.id)
        root = next((span for span in spans if TASK_ID in span.attributes), None)
        if root is None or any(span.start_ns > root.end_ns for span in spans):
            return None
        return root.attributes.get(SEED)

    def _read(self, job: Job) -> Rollout | None:
        """The recorded rollout of ``job``. If it was of another task with the same id, it is deleted, with a warning: None."""
        record, ids = self._left.pop(job.seed)
        spans = self._store.spans(record.id)
        recorded = next(span.attributes.get(TASK) for span in spans if TASK_ID in span.attributes)
        if recorded != json.dumps(job.task, default=repr):
            logger.warning("a recorded rollout of the task %r is made again: the task has changed", job.task_id)
            self._store.remove(ids)
            return None
        return Rollout(
            job=job,
            attempt=record.attempt,
            status=record.status,
            trace=spans_to_trace(spans, counters=record.counters),
            spans=spans,
            error=record.error,
            seconds=(record.ended_ns - record.started_ns) / 1e9,
        )


def _changed_code(folder: Path, code: Path) -> str:
    """The words for changed code, with the first of the files that may be the cause."""
    files = [repr(os.path.relpath(file, code)) for file in newer_files(folder, code)]
    text = "the code in the working directory (its commit, changed and untracked files)"
    if not files:
        return text
    more = f" and {len(files) - _MOST_NAMED} more" if len(files) > _MOST_NAMED else ""
    return f"{text}; written or deleted since it was recorded: {', '.join(files[:_MOST_NAMED])}{more}"
