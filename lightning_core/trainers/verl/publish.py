"""Finished groups → credit → rows in TransferQueue, and the counts of each step."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lightning_core.config import Config
from lightning_core.credit import Credit, Episode
from lightning_core.records.store import Store
from lightning_core.rollouts.attempt import Group
from lightning_core.rollouts.collect import Collector
from lightning_core.rollouts.jobs import to_episodes
from lightning_core.rollouts.refill import without_gradient
from lightning_core.rollouts.rows import to_rows
from lightning_core.rollouts.selection import trained_agents
from lightning_core.trainers.verl.group_log import GroupLog
from lightning_core.trainers.verl.prompt_queue import incomplete_prompts, put_rows
from lightning_core.trainers.verl.prompts import Prompt
from lightning_core.trainers.verl.rows import VerlRow, train_rows, validation_row
from lightning_core.transitions import Row, transitions_to_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptedGroup:
    """A prompt and its finished group."""

    prompt: Prompt
    group: Group


class Publisher:
    """Publishes the rows of finished groups, all at once or one by one, and records what they amount to."""

    def __init__(self, config: Config, collector: Collector, store: Store, folder: Path) -> None:
        """``folder``: the run's."""
        self._config = config
        self._collector = collector
        self._store = store
        self._log = GroupLog(folder)
        self._replaced: Counter[int] = Counter()
        self._recording = asyncio.Lock()
        """Held while they are written: later sums must not be overwritten by earlier ones."""

    def drop_incomplete(self) -> None:
        """Remove the groups that verl requests again from the store: incomplete in the checkpoint, they may have rollouts there."""
        self._log.drop(incomplete_prompts(), self._store)

    def begin(self, prompt: Prompt) -> None:
        """Before the rollouts of ``prompt``, which is for training."""
        self._log.begin(prompt.uid, str(prompt.task["id"]), prompt.step)

    async def publish(self, prompted: Sequence[PromptedGroup]) -> None:
        """rollouts → transitions → advantages → rows, and the metrics of the step so far.

        ``prompted``: of one batch. Their calls are compared with each other if the credit rules need the whole batch.
        """
        if prompted[0].prompt.training:
            await self._publish_training(prompted)
            return
        for one in prompted:
            agents = trained_agents(self._config, (r.trace for r in one.group.rollouts))
            await put_rows(one.prompt, _validation_rows(one, agents))

    async def _publish_training(self, prompted: Sequence[PromptedGroup]) -> None:
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
            await asyncio.to_thread(self._collector.record_credit, kept, counted, step - 1)
            tasks = {one.prompt.uid: str(one.prompt.task["id"]) for one in prompted}
            rollouts = {one.prompt.uid: [r.trace.rollout for r in one.group.trained] for one in prompted}
            total = self._log.publish(step, tasks, rollouts, counts)
            await asyncio.to_thread(self._store.add_step, step, total)
        for one in prompted:
            signal = one.prompt.uid not in replaced
            await put_rows(one.prompt, _training_rows(one, by_rollout, rows, signal=signal))

    def _replaced_prompts(
        self, prompted: Sequence[PromptedGroup], by_rollout: Mapping[str, Episode], credit: Credit
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


def _training_rows(
    one: PromptedGroup, episodes: Mapping[str, Episode], rows: Sequence[Row], *, signal: bool
) -> list[VerlRow]:
    """The rows of one prompt's rollouts, of the step's ``rows``. See `train_rows` for ``signal``."""
    found: list[VerlRow] = []
    for session, rollout in enumerate(one.group.trained):
        if (episode := episodes.get(rollout.trace.rollout)) is not None:
            own = [row for row in rows if row.rollout == episode.rollout]
            found += train_rows(one.prompt.group, session, own, reward=episode.reward, signal=signal)
    return found


def _validation_rows(one: PromptedGroup, trained: frozenset[str]) -> list[VerlRow]:
    """One row with the reward for each finished rollout."""
    rows: list[VerlRow] = []
    for session, rollout in enumerate(one.group.rollouts):
        found = [row for e in to_episodes([rollout], trained) for row in transitions_to_rows(e.transitions)]
        if found:
            rows.append(validation_row(one.prompt.group, session, found[-1], reward=rollout.reward))
    return rows
