"""The rewards of the untrained model, without a run: ``python -m tests.bench.defaults --starts``."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from statistics import fmean

from lightning_core.chat.chat import Chat
from lightning_core.config.sections import Rollouts
from lightning_core.model.source import load_model, load_tokenizer, resolve_model
from lightning_core.records.statistics.solved import is_solved
from lightning_core.testing import Playground, open_playground
from tests.bench.defaults.suite.agent import Agent, Task, constant_reward, split
from tests.bench.defaults.variant import MODEL

HEAD = f"{'agent':<10} {'reward':>6} {'solved':>6} {'constant':>8} {'seconds':>7}  kind"
_CONCURRENT = 32


@contextmanager
def untrained() -> Generator[Playground]:
    """An endpoint that serves the untrained model."""
    import lightning_core.trainers.plan  # noqa: F401 - before torch: sets how its threads wait

    folder = resolve_model(MODEL)
    import torch

    from lightning_core.backends.torch.engine import SampledModel, TorchBackend
    from lightning_core.model.compute import choose_path
    from lightning_core.model.constraint import Constraints

    model = load_model(folder, torch.float32)
    tokenizer = load_tokenizer(folder)
    constraints = Constraints(tokenizer, model.get_output_embeddings().weight.shape[0])
    sampled = SampledModel(model=model, path=choose_path(model), constraints=constraints)
    backend = TorchBackend({"policy": sampled}, max_context=8192, max_batch=64, gather_ms=5.0, seed=0)
    try:
        with open_playground(backend, chats=Chat(tokenizer)) as opened:
            yield opened
    finally:
        backend.close()


def start_line(opened: Playground, agent: Agent, tasks: int) -> str:
    """The mean reward, the share of solved tasks and the best constant answer's reward on the first held-out ``tasks``."""
    began = time.monotonic()
    rewards = asyncio.run(_rewards(opened, agent, split(agent)[1][:tasks]))
    solved = fmean(is_solved(reward, agent.solved) for reward in rewards)
    constant = constant_reward(agent)
    best = "" if constant is None else f"{constant:.2f}"
    return (
        f"{agent.name:<10} {fmean(rewards):6.2f} {solved:6.2f} {best:>8} {time.monotonic() - began:7.0f}  {agent.kind}"
    )


async def _rewards(opened: Playground, agent: Agent, tasks: Sequence[Task]) -> list[float]:
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(_CONCURRENT))
    return await asyncio.gather(*(_reward(opened, agent, task) for task in tasks))


async def _reward(opened: Playground, agent: Agent, task: Task) -> float:
    """With the sampling settings of the defaults. An error of the agent is the reward 0, as in a run."""
    defaults = Rollouts()
    with opened.rollout(
        task,
        train=(*agent.train, *agent.frozen),
        temperature=defaults.temperature,
        max_tokens=defaults.max_tokens,
        strict=False,
    ):
        try:
            if inspect.iscoroutinefunction(agent.solve):
                answer = await agent.solve(task)
            else:
                answer = await asyncio.to_thread(agent.solve, task)
        except Exception as error:  # noqa: BLE001 - of the agent
            print(f"{agent.name}: {error!r}"[:200])
            return 0.0
    return agent.score(task, answer)
