"""The agent-loop manager that verl's trainer asks for rollouts (``actor_rollout_ref.rollout.agent.agent_loop_manager_class``).

It lives in the process of verl's trainer. A batch of prompts becomes groups of attempts, run by workers all over the cluster; when a
group is complete its calls get their credit, and its rows go to TransferQueue, where the trainer waits for them. verl knows no
time limits, no retries and no rewards of calls; all of that happened before it sees a row.

What stops a run (a reward that is none, an agent that does not exist) is written down for whoever started it, and interrupts the
trainer, which would otherwise wait for ever.
"""

from __future__ import annotations

import _thread
import asyncio
import logging
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray
import transfer_queue as tq
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from lightning_core.config import Config, load_config
from lightning_core.config.imports import import_callable
from lightning_core.credit import Credit, Episode
from lightning_core.endpoint.server import Routing
from lightning_core.records.store import Phase, Store
from lightning_core.rollouts.collect import Collector, Group, require_transitions, without_signal
from lightning_core.rollouts.counts import add_counts
from lightning_core.rollouts.entries import to_episodes, trained_agents
from lightning_core.rollouts.judge import Judged
from lightning_core.rollouts.runner import Attempt, Job, Rollout
from lightning_core.trainers.verl.pool import WorkerPool
from lightning_core.trainers.verl.prompts import Prompt, read_prompts
from lightning_core.trainers.verl.records import write_failure
from lightning_core.trainers.verl.rows import VerlRow, train_rows, validation_row
from lightning_core.trainers.verl.worker import RolloutWorker
from lightning_core.transitions import transitions_to_rows

logger = logging.getLogger(__name__)


class ClusterAgents:
    """Runs agents and the judge on the workers of a cluster."""

    def __init__(self, workers: WorkerPool, *, retries: int) -> None:
        self._workers = workers
        self._tries = retries + 1

    async def roll_out(
        self, jobs: Sequence[Job], routing: Routing, record: Callable[[Sequence[Attempt]], None]
    ) -> Sequence[Rollout]:
        """All jobs on one worker, so that they share its caches; see `AgentPool.roll_out`."""
        attempts: list[Attempt] = await self._workers.call("roll_out", jobs, routing, tries=self._tries)
        await asyncio.to_thread(record, attempts)
        return [a.rollout for a in attempts if a.final]

    async def judge(self, episodes: Sequence[Episode], step: int) -> Judged:
        """See `AgentPool.judge`."""
        try:
            return await self._workers.call("judge", episodes, step, tries=self._tries)
        except ray.exceptions.RayTaskError as error:
            raise _cause(error) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prompted:
    """A prompt and its finished group."""

    prompt: Prompt
    group: Group


class LightningManager:
    """See the module. Made by verl through `create`."""

    def __init__(self, config: Config, *, folder: Path, workers: WorkerPool) -> None:
        self._config = config
        self._folder = folder
        self._store = Store(folder / "store.db")
        self._collector = Collector(config, ClusterAgents(workers, retries=config.rollouts.retries), self._store)
        self._whole_batch = any(rules.advantage_rule.needs_batch for rules in self._collector.rules.values())
        self._checked = False
        self._replaced: Counter[int] = Counter()
        self._counts: dict[int, dict[str, float]] = {}
        """Sums, by verl's step."""
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="lightning-manager", daemon=True).start()

    @classmethod
    def create(
        cls, *, config: Any, llm_client: Any, teacher_client: Any = None, reward_loop_worker_handles: Any = None
    ) -> LightningManager:
        """What verl calls, with the whole of its configuration; ours is in ``actor_rollout_ref.rollout.custom.lightning``."""
        del teacher_client, reward_loop_worker_handles  # rewards are the agents' own
        rollout = config.actor_rollout_ref.rollout
        settings = rollout.custom["lightning"]
        ours = load_config(Path(settings["folder"]) / "config.yaml")
        if Path(settings["working_dir"]).is_dir():
            os.chdir(settings["working_dir"])
        import_callable(ours.agent or "", key="agent")  # for the names that its code marks
        _heed_interrupts()
        count = int(rollout.agent.num_workers)
        actor = ray.remote(RolloutWorker).options(
            num_cpus=1, scheduling_strategy="SPREAD", max_concurrency=1 + ours.rollouts.concurrency
        )
        arguments = (ray.put(ours), ray.put(llm_client))

        def make() -> Any:
            return actor.remote(
                *arguments,
                model=str(config.actor_rollout_ref.model.path),
                max_context=int(rollout.max_model_len),
                concurrency=-(-ours.rollouts.concurrency // count),
                folder=settings["working_dir"],
            )

        return cls(ours, folder=Path(settings["folder"]), workers=WorkerPool(make, count))

    def generate_sequences(self, prompts: Any) -> None:
        """Begin the rollouts of ``prompts`` (a TensorDict) and return at once; rows appear in TransferQueue."""
        batch = read_prompts(prompts)
        work = asyncio.run_coroutine_threadsafe(self._dispatch(batch), self._loop)
        work.add_done_callback(self._settle)

    def _settle(self, work: Any) -> None:
        error = work.exception()
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        if error is None:
            return
        cause = _cause(error)
        logger.error("the run cannot go on", exc_info=cause)
        write_failure(self._folder, cause)
        _thread.interrupt_main()

    async def _dispatch(self, batch: Sequence[Prompt]) -> None:
        async with asyncio.TaskGroup() as running:
            groups = [running.create_task(self._roll_out(prompt)) for prompt in batch]
            if not self._checked:  # an unknown agent is certain only when all rollouts have finished
                await self._check([(await group).group for group in groups])
            if self._whole_batch and batch[0].training:
                await self._publish([await group for group in groups])
            else:
                for group in asyncio.as_completed(groups):
                    await self._publish([await group])

    async def _check(self, groups: Sequence[Group]) -> None:
        """Once, on the first rollouts: check that there is anything to learn from. verl would wait for rows forever."""
        self._collector.check(groups)
        trained = trained_agents(self._config)
        require_transitions(groups, [e for g in groups for e in to_episodes(g.rollouts, trained)])
        self._checked = True

    async def _roll_out(self, prompt: Prompt) -> _Prompted:
        """tasks → rollouts: all attempts at one prompt."""
        await tq.async_kv_put(key=prompt.uid, partition_id=prompt.partition, tag={"status": "running"})
        phase, step = self._phase(prompt)
        return _Prompted(prompt=prompt, group=await self._collector.roll_out(prompt.task, phase, step))

    def _phase(self, prompt: Prompt) -> tuple[Phase, int]:
        """The phase, and the number of updates before it: verl counts steps from 1, and evaluates after the step it names."""
        if prompt.training:
            return "train", prompt.step - 1
        if prompt.step == 0:
            return "eval_before", 0
        return ("eval_after" if prompt.step >= self._config.trainer.steps else "eval"), prompt.step

    async def _publish(self, prompted: Sequence[_Prompted]) -> None:
        """rollouts → transitions → advantages, then each group's rows."""
        if not prompted[0].prompt.training:
            for one in prompted:
                await self._put(one.prompt, _validation_rows(one, trained_agents(self._config)))
            return
        episodes = await self._collector.episodes([one.group for one in prompted])
        credit = self._collector.credit(episodes)
        if len(prompted) == 1:
            await self._publish_group(prompted[0], episodes, credit)
            return
        for index, one in enumerate(prompted):
            own = {r.trace.rollout for r in one.group.rollouts}
            # The metrics of a credit over the whole batch count once.
            part = credit if index == 0 else replace(credit, metrics={})
            await self._publish_group(one, [e for e in episodes if e.rollout in own], part)

    async def _publish_group(self, one: _Prompted, episodes: Sequence[Episode], credit: Credit) -> None:
        """advantages → rows, the record of the step so far, and at last verl's notice that the group is complete."""
        prompt, step = one.prompt, one.prompt.step
        flat = bool(without_signal(episodes, credit)) or not episodes
        replaced = flat and self._replaced[step] < self._config.rollouts.refill
        self._replaced[step] += replaced
        batch = self._collector.batch([one.group], [] if replaced else episodes, credit, replaced=int(replaced))
        self._counts[step] = add_counts(self._counts.get(step, {}), batch.counts)
        await asyncio.to_thread(self._collector.record_credit, batch, step - 1)
        await asyncio.to_thread(self._store.add_step, step, self._counts[step])
        session = {r.trace.rollout: index for index, r in enumerate(one.group.rollouts)}
        rows: list[VerlRow] = []
        for e in episodes:
            found = transitions_to_rows(e.transitions, credit.advantages)
            rows += train_rows(prompt.group, session[e.rollout], found, reward=e.reward, signal=not replaced)
        await self._put(prompt, rows)

    async def _put(self, prompt: Prompt, rows: Sequence[VerlRow]) -> None:
        """Rows first: the group's status tells the trainer that all of them are there."""
        if rows:
            await tq.async_kv_batch_put(
                keys=[row.key for row in rows],
                fields=list_of_dict_to_tensordict([dict(row.fields) for row in rows]),
                tags=[dict(row.tag) for row in rows],
                partition_id=prompt.partition,
            )
        status = "finished" if rows else "failure"
        await tq.async_kv_put(key=prompt.uid, partition_id=prompt.partition, tag={"status": status})


def _heed_interrupts() -> None:
    """What a script starts in the background ignores interrupts, and all of its processes do: nothing would stop the trainer."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _cause(error: Any) -> BaseException:
    """What was raised in another process, without what Ray adds to it."""
    return error.cause if isinstance(error, ray.exceptions.RayTaskError) else error


def _validation_rows(one: _Prompted, trained: frozenset[str]) -> list[VerlRow]:
    """One row for each finished rollout, with its reward."""
    rows: list[VerlRow] = []
    for session, rollout in enumerate(one.group.rollouts):
        found = [row for e in to_episodes([rollout], trained) for row in transitions_to_rows(e.transitions)]
        if found:
            rows.append(validation_row(one.prompt.group, session, found[-1], reward=rollout.reward))
    return rows
