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
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import transfer_queue as tq
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from lightning_core.config import Config, load_config
from lightning_core.config.credit_rules import policy_rules
from lightning_core.config.imports import import_callable
from lightning_core.credit import Credit, CreditRules, Episode, assign_by_policy
from lightning_core.errors import InfrastructureError, TrainingError
from lightning_core.records.store import Phase, Store
from lightning_core.rollouts.entries import (
    call_credits,
    check_names,
    make_jobs,
    rollout_record,
    routing_of,
    to_episodes,
    trained_agents,
)
from lightning_core.rollouts.judge import reward_spans, with_scores
from lightning_core.rollouts.runner import Rollout
from lightning_core.trainers.verl.pool import WorkerPool
from lightning_core.trainers.verl.prompts import Prompt, read_prompts
from lightning_core.trainers.verl.records import write_failure
from lightning_core.trainers.verl.rows import VerlRow, train_rows, validation_row
from lightning_core.trainers.verl.worker import Attempt, Judged, RolloutWorker
from lightning_core.transitions import transitions_to_rows

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class _Done:
    """A prompt whose attempts have all ended."""

    prompt: Prompt
    rollouts: Sequence[Rollout]
    """The last attempt of each."""
    lost: int
    """How many there should be besides, whose workers were lost."""
    error: str | None = None
    """How they were lost."""


class LightningManager:
    """See the module. Made by verl through `create`."""

    def __init__(self, config: Config, *, folder: Path, workers: WorkerPool) -> None:
        self._config = config
        self._folder = folder
        self._workers = workers
        self._rules: Mapping[str, CreditRules] = policy_rules(config)
        self._store = Store(folder / "store.db")
        self._whole_batch = any(rules.advantage_rule.needs_batch for rules in self._rules.values())
        self._checked = False
        self._flat: Counter[int] = Counter()
        self._counts: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))
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
            if not self._checked:  # a misspelt agent shows only when all have run
                self._check([await group for group in groups])
            if self._whole_batch and batch[0].training:
                await self._publish([await group for group in groups])
            else:
                for group in asyncio.as_completed(groups):
                    await self._publish([await group])

    def _check(self, groups: Sequence[_Done]) -> None:
        """Once, on the first rollouts: that there is anything to learn from. verl would wait for rows that never come."""
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        failures = [g.error for g in groups if g.error] + [r.error for r in rollouts if r.status == "infrastructure"]
        if all(r.status == "infrastructure" for r in rollouts):
            count = len(rollouts) + sum(group.lost for group in groups)
            raise InfrastructureError(
                f"all of the first {count} rollouts failed for reasons of infrastructure; the first: {failures[0]}"
            )
        check_names(self._config, rollouts)
        if not any(e.transitions for e in to_episodes(rollouts, trained_agents(self._config))):
            error = next((f"; the first error: {r.error}" for r in rollouts if r.error), "")
            raise TrainingError(f"no trained agent made a call in {len(rollouts)} rollouts{error}")
        self._checked = True

    async def _roll_out(self, prompt: Prompt) -> _Done:
        """All attempts at one prompt, on one worker, so that they meet the same caches."""
        c = self._config
        await tq.async_kv_put(key=prompt.uid, partition_id=prompt.partition, tag={"status": "running"})
        phase, step = self._phase(prompt)
        copies = c.rollouts.group_size if prompt.training else c.eval.samples
        jobs = make_jobs([prompt.task], c, copies=copies, phase=phase, step=step)
        routing = routing_of(c, trained_agents(c), phase)
        attempts: list[Attempt] = []
        lost: str | None = None
        try:
            attempts = await self._workers.call("roll_out", jobs, routing, tries=c.rollouts.retries + 1)
        except InfrastructureError as error:
            lost = str(error)
            logger.error("task %r: %d rollouts are left out: %s", prompt.task["id"], len(jobs), lost)
        records = [(rollout_record(a.rollout, step, phase, step), a.rollout.spans) for a in attempts]
        await asyncio.to_thread(self._store.add_rollouts, records)
        final = [a.rollout for a in attempts if a.final]
        return _Done(prompt=prompt, rollouts=final, lost=len(jobs) - len(final), error=lost)

    def _phase(self, prompt: Prompt) -> tuple[Phase, int]:
        """The phase, and how many updates came before: verl counts steps from 1, and evaluates after the one that it names."""
        if prompt.training:
            return "train", prompt.step - 1
        if prompt.step == 0:
            return "eval_before", 0
        return ("eval_after" if prompt.step >= self._config.trainer.steps else "eval"), prompt.step

    async def _publish(self, groups: Sequence[_Done]) -> None:
        """Credit, rows, and at last the word that a group is complete."""
        if not groups[0].prompt.training:
            for group in groups:
                await self._put(group.prompt, _validation_rows(group, trained_agents(self._config)))
            return
        episodes = {g.prompt.uid: to_episodes(g.rollouts, trained_agents(self._config)) for g in groups}
        for group in groups:
            episodes[group.prompt.uid] = await self._judge(group, episodes[group.prompt.uid])
        credit = assign_by_policy([e for several in episodes.values() for e in several], self._rules)
        for group in groups:
            await self._publish_group(group, episodes[group.prompt.uid], credit)

    async def _publish_group(self, group: _Done, episodes: Sequence[Episode], credit: Credit) -> None:
        prompt, step = group.prompt, group.prompt.step
        flat = not any(credit.advantages[t.call] for e in episodes for t in e.transitions)
        replaced = flat and self._flat[step] < self._config.rollouts.refill
        self._flat[step] += replaced
        session = {r.trace.rollout: index for index, r in enumerate(group.rollouts)}
        rows: list[VerlRow] = []
        for e in episodes:
            found = transitions_to_rows(e.transitions, credit.advantages)
            rows += train_rows(prompt.group, session[e.rollout], found, reward=e.reward, signal=not replaced)
        credits_ = [] if replaced else call_credits(episodes, credit, step - 1)
        counts = self._counts[step]
        for name, value in {
            "reward_sum": sum(r.reward for r in group.rollouts if r.status != "infrastructure"),
            "rollouts": len(group.rollouts) + group.lost,
            "rollouts_failed": sum(r.status == "failed" for r in group.rollouts),
            "rollouts_left_out": sum(r.status == "infrastructure" for r in group.rollouts) + group.lost,
            "groups": 1,
            "groups_equal": flat,
            "groups_refilled": replaced,
            "rows": 0 if replaced else len(rows),
            "tokens_trained": sum(c.tokens for c in credits_),
        }.items():
            counts[name] += value
        await asyncio.to_thread(self._store.add_credit, credits_)
        await asyncio.to_thread(self._store.add_step, step, dict(counts))
        await self._put(prompt, rows)

    async def _judge(self, group: _Done, episodes: list[Episode]) -> list[Episode]:
        if self._config.credit.judge is None or len(episodes) < 2:
            return episodes
        try:
            judged: Judged = await self._workers.call(
                "judge", episodes, group.prompt.step - 1, tries=1 + self._config.rollouts.retries
            )
        except (InfrastructureError, ray.exceptions.RayTaskError) as error:
            if not isinstance(_cause(error), InfrastructureError):
                raise
            logger.warning("a group goes without the judge's scores: %s", _cause(error))
            return episodes
        await asyncio.to_thread(self._store.add_rollouts, judged.records)
        await asyncio.to_thread(self._store.add_spans, reward_spans(episodes, judged.scores))
        return with_scores(episodes, judged.scores)

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


def _validation_rows(group: _Done, trained: frozenset[str]) -> list[VerlRow]:
    """One row for each rollout that came about, with its reward."""
    rows: list[VerlRow] = []
    for session, rollout in enumerate(group.rollouts):
        found = [row for e in to_episodes([rollout], trained) for row in transitions_to_rows(e.transitions)]
        if found:
            rows.append(validation_row(group.prompt.group, session, found[-1], reward=rollout.reward))
    return rows
