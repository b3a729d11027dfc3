"""Checks the identity of many concurrent calls of one graph that runs in many rollouts.

Every prompt contains its rollout, agent and call number, so that records can be compared with what was sent. The graph has everything
that makes attribution difficult: parallel branches, synchronous nodes in threads next to asynchronous ones, a sub-graph, a node that
fails and is retried, streaming, an agent that calls another, one shared model client, and sleeps of random length.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Annotated, Any, TypedDict

from langchain_core.language_models import BaseChatModel
from langgraph.graph import END, START, StateGraph
from langgraph.types import RetryPolicy

from lightning_core.capture import ActiveRollout
from lightning_core.capture.mark import trainable
from lightning_core.trace import Trace
from tests.integrations.identity.outcome import Outcome, compare

CALLS_PER_ROUND = 9
"""Model calls of one round of the graph."""


def keep_first(left: Any, right: Any) -> Any:
    return left if right is None else right


class State(TypedDict):
    rollout: Annotated[int, keep_first]
    round: Annotated[int, keep_first]
    rounds: Annotated[int, keep_first]


class Storm:
    """The graph, and a record of every prompt that it sent."""

    def __init__(self, model: BaseChatModel, *, seed: int = 0, longest_sleep: float = 0.01) -> None:
        self.sent: list[str] = []
        self._model = model
        self._random = random.Random(seed)
        self._longest_sleep = longest_sleep
        self._failed: set[tuple[int, int]] = set()
        self.graph = self._build()

    def _pause(self) -> float:
        return self._random.random() * self._longest_sleep

    def _prompt(self, state: State, agent: str, turn: int) -> str:
        prompt = f"{state['rollout']} {agent} {state['round']}.{turn}"
        self.sent.append(prompt)
        return prompt

    async def _ask(self, state: State, agent: str, turn: int = 0) -> None:
        await asyncio.sleep(self._pause())
        await self._model.ainvoke(self._prompt(state, agent, turn))
        await asyncio.sleep(self._pause())

    def _build(self) -> Any:
        @trainable("writer")
        async def writer(state: State) -> dict[str, Any]:
            await self._ask(state, "writer", 0)
            await editor(state)
            async for _ in self._model.astream(self._prompt(state, "writer", 1)):
                await asyncio.sleep(0)
            return {}

        @trainable("editor")
        async def editor(state: State) -> None:
            await self._ask(state, "editor")

        async def critic(state: State) -> dict[str, Any]:
            await self._ask(state, "critic")
            return {}

        def planner(state: State) -> dict[str, Any]:
            time.sleep(self._pause())
            self._model.invoke(self._prompt(state, "planner", 0))
            return {}

        async def flaky(state: State) -> dict[str, Any]:
            attempt = (state["rollout"], state["round"])
            turn = int(attempt in self._failed)
            await self._ask(state, "flaky", turn)
            if not turn:
                self._failed.add(attempt)
                raise ConnectionError("try again")
            return {}

        async def left(state: State) -> dict[str, Any]:
            await self._ask(state, "left")
            return {}

        @trainable("right")
        def right(state: State) -> dict[str, Any]:
            list(self._model.stream(self._prompt(state, "right", 0)))
            time.sleep(self._pause())
            return {}

        team = StateGraph(State)
        for name, member in (("left", left), ("right_node", right)):
            team.add_node(name, member)
            team.add_edge(START, name)
        graph = StateGraph(State)
        retry = RetryPolicy(initial_interval=0.001, jitter=False, retry_on=ConnectionError)
        graph.add_node("begin", lambda state: {})
        graph.add_node("join", lambda state: {"round": state["round"] + 1})
        for name, node, policy in (
            ("writer", writer, None),
            ("critic", critic, None),
            ("planner", planner, None),
            ("flaky", flaky, retry),
            ("team", team.compile(), None),
        ):
            graph.add_node(name, node, retry_policy=policy)
            graph.add_edge("begin", name)
        graph.add_edge(START, "begin")
        graph.add_edge(["writer", "critic", "planner", "flaky", "team"], "join")
        graph.add_conditional_edges("join", lambda s: "begin" if s["round"] < s["rounds"] else END, ["begin", END])
        return graph.compile()

    async def run(
        self,
        scope: Callable[[], AbstractContextManager[ActiveRollout]],
        *,
        rollouts: int,
        rounds: int,
        concurrency: int,
    ) -> list[Trace]:
        """The traces of ``rollouts`` rollouts, each in its own ``scope``."""
        places = asyncio.Semaphore(concurrency)

        async def one(number: int) -> Trace:
            async with places:
                with scope() as run:
                    state = {"rollout": number, "round": 0, "rounds": rounds}
                    await self.graph.ainvoke(state, {"recursion_limit": 10 + 5 * rounds})
                return run.trace

        return list(await asyncio.gather(*(one(number) for number in range(rollouts))))

    def compare(self, traces: list[Trace]) -> Outcome:
        """Compares the sent prompts with the recorded calls; traces are in the order of their rollouts."""
        return compare(self.sent, traces)
