"""The agent-loop manager that produces rollouts for verl's trainer.

verl creates it in its trainer's process (``actor_rollout_ref.rollout.agent.agent_loop_manager_class``). It turns each batch of prompts
into groups of attempts and runs them on workers across the cluster. When a group is complete, its calls get their credit, and its rows
go to TransferQueue, where the trainer waits for them. Time limits, retries and rewards of calls are handled before verl sees a row.

An error that stops the run, such as a missing reward or an unknown agent name, is written to the run's folder and interrupts the trainer,
which would otherwise wait for rows forever.
"""

from __future__ import annotations

import _thread
import asyncio
import logging
import os
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray
import transfer_queue as tq
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from lightning_core.chat.chat import Chat
from lightning_core.config import Config, load_config
from lightning_core.credit import Credit, Episode
from lightning_core.endpoint.routing import Routing
from lightning_core.errors import visible
from lightning_core.model.source import load_tokenizer
from lightning_core.records.ledger import NewRoutes
from lightning_core.records.store import Phase, Store
from lightning_core.rollouts.attempt import Attempt, Group, Job, Rollout
from lightning_core.rollouts.collect import Collector
from lightning_core.rollouts.counts import add_counts
from lightning_core.rollouts.entry_points import load_agent
from lightning_core.rollouts.jobs import count_earlier, to_episodes
from lightning_core.rollouts.refill import without_gradient
from lightning_core.rollouts.rows import to_rows
from lightning_core.rollouts.selection import require_transitions, trained_agents
from lightning_core.rollouts.signal import Resources, open_signals
from lightning_core.trace import POLICY
from lightning_core.trainers.verl.policy_chat import open_chat
from lightning_core.trainers.verl.pool import WorkerPool
from lightning_core.trainers.verl.prompts import Prompt, read_prompts
from lightning_core.trainers.verl.records import write_failure
from lightning_core.trainers.verl.rows import VerlRow, train_rows, validation_row
from lightning_core.trainers.verl.worker import RolloutWorker
from lightning_core.transitions import Row, transitions_to_rows

logger = logging.getLogger(__name__)


class ClusterAgents:
    """Runs agents on the workers of a cluster."""

    def __init__(self, workers: WorkerPool, *, retries: int) -> None:
        self._workers = workers
        self._tries = retries + 1

    async def roll_out(
        self, jobs: Sequence[Job], routing: Routing, record: Callable[[Sequence[Attempt]], None]
    ) -> Sequence[Rollout]:
        """Run all jobs on one worker, so they share its caches; see `AgentPool.roll_out`."""
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
            raise _original_error(error) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prompted:
    """A prompt and its finished group."""

    prompt: Prompt
    group: Group


class LightningManager:
    """See the module. verl creates it with `create`."""

    def __init__(self, config: Config, *, folder: Path, workers: WorkerPool, chat: Chat, max_context: int) -> None:
        self._config = config
        self._folder = folder
        self._store = Store(folder / "store.db")
        agents = ClusterAgents(workers, retries=config.rollouts.retries)
        resources = Resources(
            config=config, store=self._store, agents=agents, chats={POLICY: chat}, max_context=max_context
        )
        signals = open_signals(resources)
        self._collector = Collector(config, agents, self._store, signals=signals, on_rollout=self._show_routes)
        self._whole_batch = any(rules.needs_batch for rules in self._collector.rules.values())
        self._routes = NewRoutes()
        self._checked = False
        self._replaced: Counter[int] = Counter()
        self._counts: dict[int, dict[str, float]] = {}
        """Sums of counts, by verl's step."""
        self._recording = asyncio.Lock()
        """Held while they are written: later sums must not be overwritten by earlier ones."""
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="lightning-manager", daemon=True).start()

    @classmethod
    def create(
        cls, *, config: Any, llm_client: Any, teacher_client: Any = None, reward_loop_worker_handles: Any = None
    ) -> LightningManager:
        """Called by verl with its configuration.

        ``actor_rollout_ref.rollout.custom.lightning`` locates ours.
        """
        del teacher_client, reward_loop_worker_handles  # the agents return the rewards
        rollout = config.actor_rollout_ref.rollout
        settings = rollout.custom["lightning"]
        ours = load_config(Path(settings["folder"]) / "config.yaml")
        if Path(settings["working_dir"]).is_dir():
            os.chdir(settings["working_dir"])
        load_agent(ours)  # registers the agents that its code marks
        model, max_context = str(config.actor_rollout_ref.model.path), int(rollout.max_model_len)
        chat = open_chat(ours, model, load_tokenizer(model))
        _enable_interrupts()
        count = int(rollout.agent.num_workers)
        actor = ray.remote(RolloutWorker).options(
            num_cpus=1, scheduling_strategy="SPREAD", max_concurrency=1 + ours.rollouts.concurrency
        )
        arguments = (ray.put(ours), ray.put(llm_client))

        def make() -> Any:
            return actor.remote(
                *arguments,
                model=model,
                max_context=max_context,
                concurrency=-(-ours.rollouts.concurrency // count),
                folder=settings["working_dir"],
            )

        return cls(
            ours, folder=Path(settings["folder"]), workers=WorkerPool(make, count), chat=chat, max_context=max_context
        )

    def _show_routes(self, rollout: Rollout) -> None:
        if routing := self._routes.of(rollout.trace):
            # Ray shows the text in the process that started the run.
            sys.stderr.write(f"{visible(routing, lines=False)}\n")
            sys.stderr.flush()

    def generate_sequences(self, prompts: Any) -> None:
        """Start the rollouts of ``prompts`` (a TensorDict) and return.

        Their rows appear in TransferQueue.
        """
        batch = read_prompts(prompts)
        work = asyncio.run_coroutine_threadsafe(self._dispatch(batch), self._loop)
        work.add_done_callback(self._stop_on_error)

    def _stop_on_error(self, work: Any) -> None:
        """Write the error of a finished dispatch, if it has one, and interrupt verl's trainer."""
        error = work.exception()
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        if error is None:
            return
        cause = _original_error(error)
        logger.error("the run is stopped by an error", exc_info=cause)
        write_failure(self._folder, cause)
        _thread.interrupt_main()

    async def _dispatch(self, batch: Sequence[Prompt]) -> None:
        async with asyncio.TaskGroup() as running:
            groups = [
                running.create_task(self._roll_out(prompt, earlier))
                for prompt, earlier in zip(batch, count_earlier(prompt.task for prompt in batch), strict=True)
            ]
            if not self._checked:  # an agent name is known to be wrong only when all rollouts have finished
                self._check([(await group).group for group in groups])
            if self._whole_batch and batch[0].training:
                await self._publish([await group for group in groups])
            else:
                for group in groups:
                    running.create_task(self._publish_alone(group))
            if not batch[0].training or len(batch) >= self._config.rollouts.tasks_per_step:  # fewer: a refill
                self._collector.check([(await group).group for group in groups])

    def _check(self, groups: Sequence[Group]) -> None:
        """Check the first rollouts.

        At least one finished, all agents are known, and a trained agent made a call.
        """
        self._collector.check(groups)
        require_transitions(groups, self._collector.episodes(groups))
        self._checked = True

    async def _roll_out(self, prompt: Prompt, earlier: int) -> _Prompted:
        """tasks → rollouts: run all attempts at one prompt. ``earlier``: see `Collector.roll_out`."""
        await tq.async_kv_put(key=prompt.uid, partition_id=prompt.partition, tag={"status": "running"})
        phase, step = self._phase(prompt)
        group = await self._collector.roll_out(prompt.task, phase, step, earlier=earlier)
        return _Prompted(prompt=prompt, group=group)

    def _phase(self, prompt: Prompt) -> tuple[Phase, int]:
        """The phase and the number of updates before it.

        verl counts steps from 1 and evaluates after the step.
        """
        if prompt.training:
            return "train", prompt.step - 1
        if prompt.step == 0:
            return "eval_before", 0
        return ("eval_after" if prompt.step >= self._config.trainer.steps else "eval"), prompt.step

    async def _publish_alone(self, group: asyncio.Task[_Prompted]) -> None:
        await self._publish([await group])

    async def _publish(self, prompted: Sequence[_Prompted]) -> None:
        """rollouts → transitions → advantages → rows, and the metrics of the step so far.

        ``prompted``: prompts of one batch. Their calls are compared with each other if the credit rules need the whole batch.
        """
        if not prompted[0].prompt.training:
            for one in prompted:
                await self._put(
                    one.prompt,
                    _validation_rows(one, trained_agents(self._config, (r.trace for r in one.group.rollouts))),
                )
            return
        step, groups = prompted[0].prompt.step, [one.group for one in prompted]
        episodes = await self._collector.annotate(groups, step - 1, required=False)
        credit = self._collector.credit(episodes)
        by_rollout = {e.rollout: e for e in episodes}
        replaced = self._replaced_prompts(prompted, by_rollout, credit)
        dropped = {r.trace.rollout for one in prompted if one.prompt.uid in replaced for r in one.group.trained}
        kept = [e for e in episodes if e.rollout not in dropped]
        counted = replace(credit, metrics=self._credit_metrics(kept, credit)) if replaced else credit
        streams = await asyncio.to_thread(self._collector.streams, kept)
        rows = to_rows(self._config.algorithm, episodes, credit, streams)
        trained = [row for row in rows if row.rollout not in dropped]
        counts = self._collector.count(groups, kept, counted, trained, streams, replaced=len(replaced))
        async with self._recording:
            self._counts[step] = add_counts(self._counts.get(step, {}), counts)
            await asyncio.to_thread(self._collector.record_credit, kept, counted, step - 1)
            await asyncio.to_thread(self._store.add_step, step, self._counts[step])
        for one in prompted:
            await self._put(one.prompt, _training_rows(one, by_rollout, rows, signal=one.prompt.uid not in replaced))

    def _replaced_prompts(
        self, prompted: Sequence[_Prompted], by_rollout: Mapping[str, Episode], credit: Credit
    ) -> Collection[str]:
        """The uids of the prompts to replace: no signal, up to ``rollouts.refill`` per step.

        verl cannot replace a group of one row, which has one value in any case.
        """
        replaced: set[str] = set()
        for one in prompted:
            own = [by_rollout[r.trace.rollout] for r in one.group.trained if r.trace.rollout in by_rollout]
            flat = sum(bool(e.transitions) for e in own) > 1 and bool(without_gradient(own, credit))
            if flat and self._replaced[one.prompt.step] < self._config.rollouts.refill:
                self._replaced[one.prompt.step] += 1
                replaced.add(one.prompt.uid)
        return replaced

    def _credit_metrics(self, kept: Sequence[Episode], credit: Credit) -> Mapping[str, float]:
        """The metrics of ``credit`` for ``kept`` alone.

        The embedded trainer does not count replaced groups either.
        """
        return self._collector.credit(kept).metrics if kept else dict.fromkeys(credit.metrics, 0.0)

    async def _put(self, prompt: Prompt, rows: Sequence[VerlRow]) -> None:
        """Put the rows, then the prompt's status.

        verl reads the rows of a prompt with a final status.
        """
        if rows:
            await tq.async_kv_batch_put(
                keys=[row.key for row in rows],
                fields=list_of_dict_to_tensordict([dict(row.fields) for row in rows]),
                tags=[dict(row.tag) for row in rows],
                partition_id=prompt.partition,
            )
        status = "finished" if rows else "failure"
        await tq.async_kv_put(key=prompt.uid, partition_id=prompt.partition, tag={"status": status})


def _enable_interrupts() -> None:
    """Undo SIG_IGN for SIGINT.

    Processes started in the background by a script inherit it and could not be interrupted.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _original_error(error: Any) -> BaseException:
    """The error that was raised in another process, without Ray's wrapper."""
    return error.cause if isinstance(error, ray.exceptions.RayTaskError) else error


def _training_rows(
    one: _Prompted, episodes: Mapping[str, Episode], rows: Sequence[Row], *, signal: bool
) -> list[VerlRow]:
    """The rows of one prompt's rollouts, of the step's ``rows``. See `train_rows` for ``signal``."""
    found: list[VerlRow] = []
    for session, rollout in enumerate(one.group.trained):
        if (episode := episodes.get(rollout.trace.rollout)) is not None:
            own = [row for row in rows if row.rollout == episode.rollout]
            found += train_rows(one.prompt.group, session, own, reward=episode.reward, signal=signal)
    return found


def _validation_rows(one: _Prompted, trained: frozenset[str]) -> list[VerlRow]:
    """One row with the reward for each finished rollout."""
    rows: list[VerlRow] = []
    for session, rollout in enumerate(one.group.rollouts):
        found = [row for e in to_episodes([rollout], trained) for row in transitions_to_rows(e.transitions)]
        if found:
            rows.append(validation_row(one.prompt.group, session, found[-1], reward=rollout.reward))
    return rows
