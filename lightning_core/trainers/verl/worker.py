"""Where agents run on the cluster: a Ray actor with a policy endpoint of its own, in front of verl's model servers."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_core.backends.verl import LLMClient, VerlBackend
from lightning_core.capture import Run
from lightning_core.chat.chat import Chat
from lightning_core.config import Config
from lightning_core.config.imports import import_callable
from lightning_core.credit import Episode
from lightning_core.endpoint.server import Routing
from lightning_core.model.source import load_eos_token_ids, load_tokenizer
from lightning_core.records.store import RolloutRecord
from lightning_core.rollouts.entries import judge_record
from lightning_core.rollouts.environment import capturing, open_runner
from lightning_core.rollouts.judge import judge_episodes
from lightning_core.rollouts.runner import Job, Rollout
from lightning_core.trace import SpanRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One attempt at a job, as a worker reports it; ``final``: there is none after it."""

    rollout: Rollout
    final: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """What the judge said: scores by rollout, and its own rollouts with their spans."""

    scores: Mapping[str, float]
    records: Sequence[tuple[RolloutRecord, Sequence[SpanRecord]]]


class RolloutWorker:
    """Runs agents. Made as a Ray actor by the manager, several on the cluster.

    ``folder``: the working directory of whoever started the run; agents are imported from there, if it is there on this machine.
    """

    def __init__(
        self, config: Config, client: LLMClient, *, model: str, max_context: int, concurrency: int, folder: str
    ) -> None:
        if Path(folder).is_dir():
            os.chdir(folder)
        assert config.agent is not None, "checked when the run began"
        solve = import_callable(config.agent, key="agent")
        reward = import_callable(config.reward, key="reward") if config.reward else None
        tokenizer: Any = load_tokenizer(model)
        chat = Chat(tokenizer, stop_token_ids=load_eos_token_ids(model))
        backend = VerlBackend(client, max_context=max_context)
        self._config = config
        self._open = ExitStack()
        self._open.enter_context(capturing(config))
        self._endpoint, self._runner = self._open.enter_context(
            open_runner(
                config,
                solve,
                backend,
                dict.fromkeys(backend.models, chat),
                reward_function=reward,
                concurrency=concurrency,
            )
        )

    async def roll_out(self, jobs: Sequence[Job], routing: Routing) -> list[Attempt]:
        """Every attempt at ``jobs``, failed ones too. Raises what stops the run, such as a `RewardError`."""
        attempts: list[Attempt] = []
        work = self._runner.submit(
            jobs,
            routing=routing,
            on_attempt=lambda rollout, final: attempts.append(Attempt(rollout=rollout, final=final)),
        )
        await asyncio.wrap_future(work)
        return attempts

    async def judge(self, episodes: Sequence[Episode], step: int) -> Judged:
        """Have the attempts at one task scored, at ``step``."""
        judge = self._config.credit.judge
        assert judge is not None, "asked only where there is one"
        records: list[tuple[RolloutRecord, Sequence[SpanRecord]]] = []

        def note(task_id: str, run: Run, error: str | None) -> None:
            records.append((judge_record(task_id, run, error, step), run.spans))

        scores = await asyncio.to_thread(judge_episodes, episodes, judge, self._endpoint, on_answer=note)
        return Judged(scores=scores, records=records)
