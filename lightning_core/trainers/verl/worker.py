"""A Ray actor that runs agents, with a policy endpoint in front of verl's model servers."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from lightning_core.backends.verl import LLMClient, VerlBackend
from lightning_core.config import Config
from lightning_core.endpoint.agents.routing import Routing
from lightning_core.model.constraint import Constraints
from lightning_core.rollouts.attempt import Attempt, Job
from lightning_core.rollouts.entry_points import load_agent, load_reward
from lightning_core.rollouts.local_agents import capturing, open_agents
from lightning_core.trace import POLICY
from lightning_core.trainers.verl.policy_chat import open_chat
from lightning_core.trainers.verl.whole_responses import WholeResponses


class RolloutWorker:
    """Runs agents. The manager creates several as Ray actors across the cluster.

    ``folder``: working directory of the process that started the run. Agents are imported from there if it exists on this machine.
    ``unconstrained``: why responses cannot be constrained, if so.
    """

    def __init__(
        self,
        config: Config,
        client: LLMClient,
        *,
        model: str,
        max_context: int,
        concurrency: int,
        folder: str,
        unconstrained: str | None = None,
    ) -> None:
        if Path(folder).is_dir():
            os.chdir(folder)
        chat = open_chat(config, model)
        tokenizer: Any = chat.tokenizer
        backend = VerlBackend(
            client,
            model=POLICY,
            max_context=max_context,
            constraints=unconstrained or Constraints(tokenizer, len(tokenizer)),
            whole=None if config.trainer.mode == "sync" else WholeResponses(client),
        )
        self._open = ExitStack()
        self._open.enter_context(capturing(config))
        self._agents = self._open.enter_context(
            open_agents(
                config,
                load_agent(config),
                backend,
                dict.fromkeys(backend.models, chat),
                reward_function=load_reward(config),
                concurrency=concurrency,
            )
        )

    async def roll_out(self, jobs: Sequence[Job], routing: Routing) -> list[Attempt]:
        """All attempts at ``jobs``, including repeated ones."""
        attempts: list[Attempt] = []
        await self._agents.roll_out(jobs, routing, attempts.extend)
        return attempts

    async def call_endpoint(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """See `AgentPool.call_endpoint`."""
        return await self._agents.call_endpoint(function, *arguments)
