"""Runs agents on the workers of a Ray cluster, for the collector in the process of verl's trainer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ray

from lightning_core.config import Config
from lightning_core.endpoint.agents.routing import Routing
from lightning_core.records.store import Store
from lightning_core.rollouts.attempt import Attempt, Job, Rollout
from lightning_core.rollouts.collect import Collector
from lightning_core.rollouts.signal import Resources, open_signals
from lightning_core.trace import POLICY
from lightning_core.trainers.verl.constrained_rows import why_unconstrained
from lightning_core.trainers.verl.policy_chat import open_chat
from lightning_core.trainers.verl.pool import WorkerPool
from lightning_core.trainers.verl.worker import RolloutWorker


class ClusterAgents:
    """Runs agents on the workers of a cluster."""

    def __init__(self, workers: WorkerPool, *, retries: int) -> None:
        self._workers = workers
        self._tries = retries + 1

    async def roll_out(
        self, jobs: Sequence[Job], routing: Routing, record: Callable[[Sequence[Attempt]], None]
    ) -> Sequence[Rollout]:
        """Run all jobs on one worker, which share its caches; see `AgentPool.roll_out`."""
        attempts: list[Attempt] = await self._call("roll_out", jobs, routing)
        await asyncio.to_thread(record, attempts)
        return [a.rollout for a in attempts if a.final]

    async def call_endpoint(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """See `AgentPool.call_endpoint`."""
        return await self._call("call_endpoint", function, *arguments)

    async def _call(self, method: str, *arguments: Any) -> Any:
        try:
            return await self._workers.call(method, *arguments, tries=self._tries)
        except ray.exceptions.RayTaskError as error:
            raise original_error(error) from error


def open_cluster_collector(
    config: Config,
    client: Any,
    store: Store,
    *,
    of_verl: Any,
    working_dir: Path,
    on_rollout: Callable[[Rollout], None],
) -> Collector:
    """A collector whose agents run on workers of the cluster, and whose model calls ``client`` samples.

    ``of_verl``: verl's configuration. ``working_dir``: agents are imported from there. ``on_rollout``: see `Collector`. Raises the
    errors of signals that cannot be opened.
    """
    rollout = of_verl.actor_rollout_ref.rollout
    model, max_context = str(of_verl.actor_rollout_ref.model.path), int(rollout.max_model_len)
    workers, unconstrained = int(rollout.agent.num_workers), why_unconstrained(of_verl)
    chat = open_chat(config, model)
    actor = ray.remote(RolloutWorker).options(
        num_cpus=1, scheduling_strategy="SPREAD", max_concurrency=1 + config.rollouts.concurrency
    )
    arguments = (ray.put(config), ray.put(client))

    def make() -> Any:
        return actor.remote(
            *arguments,
            model=model,
            max_context=max_context,
            concurrency=-(-config.rollouts.concurrency // workers),
            folder=str(working_dir),
            unconstrained=unconstrained,
        )

    agents = ClusterAgents(WorkerPool(make, workers), retries=config.rollouts.retries)
    resources = Resources(config=config, store=store, agents=agents, chats={POLICY: chat}, max_context=max_context)
    return Collector(config, agents, store, signals=open_signals(resources), on_rollout=on_rollout)


def original_error(error: Any) -> BaseException:
    """The error that was raised in another process, without Ray's wrapper."""
    return error.cause if isinstance(error, ray.exceptions.RayTaskError) else error
