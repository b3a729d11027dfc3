"""What every framework is tested for: a program of two agents, of which nothing is marked, in several rollouts at a time.

A framework's file has the program in its own way of writing, and a subclass of `Naming`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

import pytest

from lightning_core import Call, Trace
from lightning_core.testing import Playground, open_playground
from lightning_core.testing.programs import answer_prompt
from lightning_core.trace import TOOL_ARGUMENTS, TOOL_CALL_ID, TOOL_RESULT

PARALLEL = 8


def question(number: int) -> str:
    """The prompt of the agent ``calculator``, to which the scripted model answers with a call of the tool ``add``."""
    return f'rollout-{number}; use:add {{"a": {number}, "b": 3}}'


def request(number: int) -> str:
    """The prompt of the agent ``writer``."""
    return f"rollout-{number}; write it down"


def texts(call: Call) -> str:
    """All that the messages of a call say."""
    return " ".join(str(message.get("content")) for message in call.messages)


class Naming:
    """The tests. A subclass is one framework."""

    tools: ClassVar[bool] = True
    """Whether its tools are events."""
    tool_call_ids: ClassVar[bool] = True
    """Whether they have the id of the model's tool call, so that AIR works."""
    script: ClassVar[Callable[[str], str]] = staticmethod(answer_prompt)
    tool_arguments: ClassVar[bool] = True
    """Whether they have arguments and result."""
    tool: ClassVar[str] = "add"
    """Its name for the tool ``add``."""
    calculator: ClassVar[str] = "calculator"
    writer: ClassVar[str] = "writer"

    def run(self, number: int) -> None:
        """Run the agent ``calculator``, which calls its tool, and then ``writer``."""
        raise NotImplementedError

    async def arun(self, number: int) -> None:
        raise NotImplementedError

    @pytest.fixture(scope="class")
    @classmethod
    def playground(cls) -> Iterator[Playground]:
        with pytest.MonkeyPatch.context() as patch, open_playground(cls.script, delay=0.01) as opened:
            patch.setenv("OPENAI_API_KEY", "none")
            yield opened

    def check(self, trace: Trace, number: int) -> None:
        """The calls of one rollout have the right names, and no other rollout's."""
        assert trace.calls
        for call in trace.calls:
            said = texts(call)
            assert f"rollout-{number};" in said
            assert "rollout-" not in said.replace(f"rollout-{number};", "")
            assert call.agent == (self.writer if "write it down" in said else self.calculator), said
        assert {call.agent for call in trace.calls} == {self.calculator, self.writer}
        by_id = {event.id: event for event in trace.events}
        assert all(call.parent in by_id for call in trace.calls)
        assert all(event.parent in by_id for event in trace.events if event.kind != "rollout")
        assert {self.calculator, self.writer} <= {
            event.name for event in trace.events if event.kind in ("agent", "node")
        }
        if self.tools:
            (tool,) = [event for event in trace.events if event.kind == "tool" and event.name == self.tool]
            assert tool.agent == self.calculator
            if self.tool_arguments:
                assert str(number) in str(tool.attributes[TOOL_ARGUMENTS])
                assert str(number + 3) in str(tool.attributes[TOOL_RESULT])
            assert tool.error is None
            assert tool.end_ns >= tool.start_ns
            if self.tool_call_ids:
                asked = [c["id"] for call in trace.calls for c in (call.response or {}).get("tool_calls") or ()]
                assert tool.attributes[TOOL_CALL_ID] in asked

    def test_rollouts_in_threads(self, playground: Playground) -> None:
        def attempt(number: int) -> Trace:
            with playground.rollout(train=[self.calculator]) as run:
                self.run(number)
            return run.trace

        with ThreadPoolExecutor(PARALLEL) as pool:
            traces = list(pool.map(attempt, range(100, 100 + PARALLEL)))
        for number, trace in enumerate(traces, 100):
            self.check(trace, number)

    def test_rollouts_in_one_loop(self, playground: Playground) -> None:
        async def attempt(number: int) -> Trace:
            with playground.rollout(train=[self.calculator]) as run:
                await self.arun(number)
            return run.trace

        async def together() -> list[Trace]:
            return list(await asyncio.gather(*(attempt(number) for number in range(200, 200 + PARALLEL))))

        for number, trace in enumerate(asyncio.run(together()), 200):
            self.check(trace, number)
