"""Programs that hand work from agents to workers: two rollouts at a time, two agents in each.

Each model call says in its prompt who makes it, so every wrong name is seen.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx

from lightning_core.capture import ActiveRollout, current_rollout, scope
from lightning_core.testing.playground import Playground, open_playground

URL = "https://api.openai.com/v1/chat/completions"
AGENTS = ("writer", "critic")
_client = httpx.Client(verify=False)  # as most programs, built once; building one is slow


def body_of(prompt: str) -> dict[str, Any]:
    return {"model": "gpt", "messages": [{"role": "user", "content": prompt}]}


def ask(prompt: str) -> str:
    """One model call; the script repeats the prompt."""
    response = _client.post(URL, json=body_of(prompt), timeout=30)
    response.raise_for_status()
    return response.json()["choices"][0]["message"]["content"]


async def ask_async(prompt: str) -> str:
    async with httpx.AsyncClient(verify=False) as client:
        response = await client.post(URL, json=body_of(prompt), timeout=30)
    response.raise_for_status()
    return response.json()["choices"][0]["message"]["content"]


@contextmanager
def opened() -> Generator[Playground]:
    with open_playground(lambda prompt: "ok", integrations=()) as playground:
        yield playground


def prompt_of(agent: str) -> str:
    """What the agent ``agent`` of the current rollout asks."""
    run = current_rollout()
    assert run is not None
    return f"{run.rollout} {agent}"


def run_agents(work: Callable[[str], Any]) -> None:
    """Both agents of this rollout do ``work(prompt)``, one after the other, twice."""
    for agent in AGENTS * 2:
        with scope(agent):
            work(prompt_of(agent))


def run_rollouts(playground: Playground, work: Callable[[str], Any], *, rollouts: int = 2) -> list[ActiveRollout]:
    """Two concurrent rollouts, each on a thread of its own; ``work(prompt)`` makes one call of the agent that the prompt names."""
    together = threading.Barrier(rollouts)

    def solve(_: int) -> ActiveRollout:
        with playground.rollout() as run:
            together.wait(30)
            try:
                run_agents(work)
            except BaseException:
                together.abort()
                raise
            together.wait(30)
        return run

    with ThreadPoolExecutor(rollouts) as pool:
        return list(pool.map(solve, range(rollouts)))


def speakers(run: ActiveRollout) -> list[tuple[str, str | None]]:
    """For each call: who asked, by its prompt, and who did, by the trace."""
    return [(str(call.messages[-1]["content"]), call.agent) for call in run.trace.calls]


def assert_exact(runs: list[ActiveRollout], *, each: int = 2) -> None:
    """Every call belongs to the agent and the rollout that its prompt names, and none is missing."""
    for run in runs:
        expected = [(f"{run.rollout} {agent}", agent) for agent in AGENTS * each]
        assert sorted(speakers(run), key=repr) == sorted(expected, key=repr)
