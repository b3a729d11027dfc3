"""Rollouts that an interrupted run has recorded: which of them it uses when it is resumed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from lightning_core import Config, load_config
from lightning_core.endpoint.agents.routing import Routing
from lightning_core.records.store import RolloutRecord, Store
from lightning_core.rollouts.attempt import Attempt, Job, Record, Rollout
from lightning_core.rollouts.jobs import make_jobs, pick_tasks
from lightning_core.rollouts.recorded import RecordedAgents
from lightning_core.rollouts.tasks import training_tasks
from tests.baselines.runs import BASE
from tests.baselines.wiring import run

SECTIONS = {**BASE, "trainer": {"steps": 1, "checkpoint_every": 0}}


class NoAgents:
    """An `AgentPool` that keeps the jobs that it gets, and runs none."""

    def __init__(self) -> None:
        self.jobs: list[Job] = []

    async def roll_out(self, jobs: Sequence[Job], routing: Routing, record: Record) -> Sequence[Rollout]:
        del routing, record
        self.jobs += jobs
        return [cast("Rollout", None) for _ in jobs]

    async def call_endpoint(self, function: Callable[..., Any], *arguments: Any) -> Any:
        raise NotImplementedError


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """Of a run of one step."""
    tasks = {**SECTIONS["tasks"], "sampling": "uniform"}  # the order of `pick_tasks`
    sections = {**SECTIONS, "tasks": tasks, "run": {"dir": str(tmp_path), "name": "run"}}
    run(sections)
    return load_config(sections)


@pytest.fixture
def store(config: Config) -> Iterator[Store]:
    with Store(Path(config.run.dir) / "run" / "store.db") as opened:
        yield opened


def jobs_of(config: Config) -> list[Job]:
    tasks = pick_tasks(training_tasks(config), config, 0)
    return [job for task in tasks for job in make_jobs(task, config, copies=3, phase="train", step=0)]


def resume(config: Config, store: Store, jobs: Sequence[Job]) -> tuple[list[Attempt], list[Job]]:
    """The recorded attempts of ``jobs`` that are used, and the jobs that are left."""
    others, used = NoAgents(), list[Attempt]()
    agents = RecordedAgents(others, store)
    agents.find(Path(config.run.dir) / "run", config, 0)
    asyncio.run(agents.roll_out(jobs, cast("Routing", None), used.extend))
    return used, others.jobs


def test_failed_rollouts_are_used_as_they_were_recorded(config: Config, store: Store) -> None:
    before = {record.id: record for record in store.rollouts()}
    (failed, *_) = [record for record in before.values() if record.attempt == 0]
    fail(store, failed)
    used, left = resume(config, store, jobs_of(config))
    assert left == []
    (rollout,) = [a.rollout for a in used if a.rollout.status == "failed"]
    assert (rollout.error, rollout.trace.rollout) == ("ValueError: a bug", failed.id)
    assert rollout.reward == (failed.reward or 0)
    for record in before.values():  # a run stops if all fail: the cause may be mended now
        fail(store, record)
    assert resume(config, store, jobs_of(config)) == ([], jobs_of(config))


def fail(store: Store, record: RolloutRecord) -> None:
    spans = store.spans(record.id)
    store.remove([record.id])
    store.add_rollout(replace(record, status="failed", error="ValueError: a bug"), spans)


def test_a_rollout_of_another_task_with_the_same_id_is_made_again(
    config: Config, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    first, *rest = jobs_of(config)
    other = replace(first, task={**first.task, "added": 1})
    recorded = len(store.rollouts())
    used, left = resume(config, store, [other, *rest])
    assert left == [other]
    assert len(used) == len(rest)
    assert len(store.rollouts()) < recorded
    assert f"the task {first.task_id!r} is made again: the task has changed" in caplog.text
