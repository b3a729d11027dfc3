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
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from lightning_core.config import Config, load_config
from lightning_core.observers.open import make_display
from lightning_core.records.store import Phase, Store
from lightning_core.rollouts.attempt import Group
from lightning_core.rollouts.collect import Collector
from lightning_core.rollouts.entry_points import load_agent
from lightning_core.rollouts.jobs import count_earlier
from lightning_core.trainers.verl.cluster import open_cluster_collector, original_error
from lightning_core.trainers.verl.prompt_queue import mark_running
from lightning_core.trainers.verl.prompts import Prompt, read_prompts
from lightning_core.trainers.verl.publish import PromptedGroup, Publisher
from lightning_core.trainers.verl.records import write_failure

logger = logging.getLogger(__name__)


class LightningManager:
    """See the module. verl creates it with `create`."""

    def __init__(self, config: Config, collector: Collector, store: Store, opened: ExitStack, *, folder: Path) -> None:
        """``opened``: kept open until the process ends, because verl does not close its manager. ``folder``: the run's."""
        self._config = config
        self._opened = opened
        self._folder = folder
        self._collector = collector
        self._publisher = Publisher(config, collector, store, folder)
        self._publisher.drop_incomplete()
        self._whole_batch = any(rules.needs_batch for rules in collector.rules.values())
        self._checked = False
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
        settings = config.actor_rollout_ref.rollout.custom["lightning"]
        folder, working_dir = Path(settings["folder"]), Path(settings["working_dir"])
        ours = load_config(folder / "config.yaml")
        if working_dir.is_dir():
            os.chdir(working_dir)
        load_agent(ours)  # registers the agents that its code marks
        _enable_interrupts()
        display = make_display(ours, progress=True)  # Ray shows it in the process that started the run
        with ExitStack() as stack:  # closes what is open if the next step fails
            stack.enter_context(display.watching(ours, folder))
            store = stack.enter_context(Store(folder / "store.db"))
            collector = open_cluster_collector(
                ours,
                llm_client,
                store,
                of_verl=config,
                working_dir=working_dir,
                on_rollout=lambda found: display.advance(found.trace),
            )
            return cls(ours, collector, store, stack.pop_all(), folder=folder)

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
        cause = original_error(error)
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
                await self._publisher.publish([await group for group in groups])
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
        self._collector.episodes(groups, required=True)
        self._checked = True

    async def _roll_out(self, prompt: Prompt, earlier: int) -> PromptedGroup:
        """tasks → rollouts: run all attempts at one prompt. ``earlier``: see `Collector.roll_out`."""
        await mark_running(prompt)
        phase, step = self._phase(prompt)
        if prompt.training:
            self._publisher.begin(prompt)
        group = await self._collector.roll_out(prompt.task, phase, step, earlier=earlier)
        return PromptedGroup(prompt=prompt, group=group)

    async def _publish_alone(self, group: asyncio.Task[PromptedGroup]) -> None:
        await self._publisher.publish([await group])

    def _phase(self, prompt: Prompt) -> tuple[Phase, int]:
        """The phase and the number of updates before it.

        verl counts steps from 1 and evaluates after the step.
        """
        if prompt.training:
            return "train", prompt.step - 1
        if prompt.step == 0:
            return "eval_before", 0
        return ("eval_after" if prompt.step >= self._config.trainer.steps else "eval"), prompt.step


def _enable_interrupts() -> None:
    """Undo SIG_IGN for SIGINT.

    Processes started in the background by a script inherit it and could not be interrupted.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
