"""AutoGen: agents of a Core runtime, and what is not the agent in AgentChat."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from autogen_agentchat.agents import AssistantAgent, SocietyOfMindAgent
from autogen_agentchat.teams import RoundRobinGroupChat
from autogen_agentchat.tools import AgentTool
from autogen_core import (
    AgentId,
    DefaultTopicId,
    MessageContext,
    RoutedAgent,
    SingleThreadedAgentRuntime,
    default_subscription,
    message_handler,
)
from autogen_core.memory import ListMemory
from autogen_core.model_context import UnboundedChatCompletionContext
from autogen_core.models import UserMessage
from openai import AsyncOpenAI

from lightning_core import Trace, trainable
from lightning_core.capture.integration import Installed
from lightning_core.testing import Playground, open_playground, tool_call
from lightning_core.trace import DECLARED_AGENTS
from tests.integrations.combinations import combined
from tests.integrations.test_autogen_agentchat import agents_of, assistant, client, has_result, played, role


@dataclass
class Question:
    text: str


@dataclass
class Answer:
    text: str


async def say(model: Any, text: str) -> str:
    result = await model.create([UserMessage(content=text, source="user")])
    return str(result.content)


class Solver(RoutedAgent):
    def __init__(self, model: Any) -> None:
        super().__init__("solves")
        self.model = model

    @message_handler
    async def solve(self, message: Question, ctx: MessageContext) -> Answer:
        return Answer(await say(self.model, f"solver: {message.text}"))


@default_subscription
class Asker(RoutedAgent):
    """Answers a published question after it has sent it to the solver."""

    def __init__(self, model: Any, done: dict[str, asyncio.Event]) -> None:
        super().__init__("asks")
        self.model, self.done = model, done

    @message_handler
    async def ask(self, message: Question, ctx: MessageContext) -> None:
        await say(self.model, f"asker: {message.text}")
        await self.send_message(message, AgentId("solver", "default"))
        self.done[message.text].set()


async def make_runtime(model: Any, done: dict[str, asyncio.Event]) -> SingleThreadedAgentRuntime:
    runtime = SingleThreadedAgentRuntime()
    await Solver.register(runtime, "solver", lambda: Solver(model))
    await Asker.register(runtime, "asker", lambda: Asker(model, done))
    runtime.start()
    return runtime


def solve_all(names: Sequence[str], *, started: str, train: Sequence[str] = (), marked: bool = False) -> list[Trace]:
    """Rollouts at once on one runtime, which was started before them or in the first one."""

    async def work(playground: Playground) -> list[Trace]:
        done = {name: asyncio.Event() for name in names}
        async with client() as model:
            runtimes: list[SingleThreadedAgentRuntime] = []
            if started == "before":
                runtimes.append(await make_runtime(model, done))

            async def attempt(name: str) -> Trace:
                async def run() -> None:
                    if not runtimes:
                        runtimes.append(await make_runtime(model, done))
                    await runtimes[0].publish_message(Question(name), DefaultTopicId())
                    await done[name].wait()

                with playground.rollout(train=train) as rollout:
                    await (trainable(run, name="whole") if marked else run)()
                return rollout.trace

            first = await attempt(names[0])
            traces = [first, *await asyncio.gather(*map(attempt, names[1:]))]
            await runtimes[0].stop_when_idle()
        return traces

    with open_playground(lambda prompt: "ok", integrations=["autogen-agentchat"]) as opened:
        return asyncio.run(work(opened))


@pytest.mark.parametrize("started", ["before", "in the first rollout"])
@pytest.mark.parametrize("train", [(), ("asker",), ("solver",)])
def test_agents_of_a_runtime_that_outlives_rollouts(started: str, train: Sequence[str]) -> None:
    traces = solve_all(["one", "two", "three", "four"], started=started, train=train)
    for name, trace in zip(["one", "two", "three", "four"], traces, strict=True):
        assert agents_of(trace) == ["asker", "solver"]
        assert [call.messages[-1]["content"] for call in trace.calls] == [f"asker: {name}", f"solver: {name}"]
        assert {call.rollout for call in trace.calls} == {trace.rollout}
        assert {event.name for event in trace.events if event.kind == "agent"} == set(train)


def test_a_mark_around_the_program_owns_its_messages() -> None:
    for trace in solve_all(["one", "two"], started="before", marked=True):
        assert agents_of(trace) == ["whole", "whole"]


def test_a_message_that_was_sent_outside_belongs_to_no_rollout(playground: Playground) -> None:
    async def work() -> Trace:
        done = {"outside": asyncio.Event()}
        heard: list[Any] = []

        class Listener(RoutedAgent):
            @message_handler
            async def hear(self, message: Question, ctx: MessageContext) -> None:
                from lightning_core.capture import current_rollout

                heard.append(current_rollout())
                done["outside"].set()

        with playground.rollout() as rollout:
            runtime = SingleThreadedAgentRuntime()
            await Listener.register(runtime, "listener", lambda: Listener("listens"))
            runtime.start()
        await runtime.send_message(Question("outside"), AgentId("listener", "default"))
        await done["outside"].wait()
        await runtime.stop_when_idle()
        assert heard == [None]
        return rollout.trace

    with Installed().installed("autogen-agentchat"):
        assert not asyncio.run(work()).calls


# What is not the agent


async def ask(*_: Any, **__: Any) -> str:
    """Ask a model with a client of one's own."""
    messages: Any = [{"role": "system", "content": "neighbour"}, {"role": "user", "content": "hm"}]
    async with AsyncOpenAI(api_key="sk-of-the-program", max_retries=0) as own:
        await own.chat.completions.create(model="gpt-4o", messages=messages)
    return "well"


async def look_up(text: str) -> str:
    """Look it up."""
    return await ask()


class Summary(UnboundedChatCompletionContext):
    async def get_messages(self) -> Any:
        await ask()
        return await super().get_messages()


class Recall(ListMemory):
    async def update_context(self, model_context: Any) -> Any:
        await ask()
        return await super().update_context(model_context)


NEIGHBOURS: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "a tool": (lambda: {"tools": [look_up], "reflect_on_tool_use": True}, "look_up"),
    "a model context": (lambda: {"model_context": Summary()}, "Summary"),
    "a memory": (lambda: {"memory": [Recall()]}, "Recall"),
}


@pytest.mark.parametrize(
    ("name", "how", "stream"), combined(list(NEIGHBOURS), ["selected", "marked", "in a team"], [True, False])
)
def test_a_neighbour_is_not_the_agent(name: str, how: str, stream: bool) -> None:
    settings, place = NEIGHBOURS[name]

    def script(prompt: str) -> str:
        use = name == "a tool" and role(prompt) == "writer" and not has_result(prompt)
        return tool_call("look_up", text="hm") if use else "ok"

    async def program(model: Any) -> None:
        agent = assistant("writer", model, model_client_stream=stream, **settings())
        agent = trainable(agent, name="writer") if how == "marked" else agent
        await (RoundRobinGroupChat([agent], max_turns=1) if how == "in a team" else agent).run(task="go")

    trace = played(script, program, agents=["writer"])
    by_prompt = {(str(call.messages[0]["content"]), call.agent) for call in trace.calls}
    assert by_prompt == {("writer", "writer"), ("neighbour", place)}


def test_an_unmarked_agent_as_a_tool_is_an_agent_of_its_own() -> None:
    def script(prompt: str) -> str:
        return tool_call("writer", task="go") if role(prompt) == "boss" and not has_result(prompt) else "ok"

    async def program(model: Any) -> None:
        tools: list[Any] = [AgentTool(assistant("writer", model))]
        await assistant("boss", model, tools=tools, max_tool_iterations=2).run(task="go")

    for selected in (["boss"], ["boss", "writer"]):
        trace = played(script, program, agents=selected)
        assert agents_of(trace) == ["boss", "writer", "boss"]
        assert {event.name for event in trace.events if event.kind == "agent"} == set(selected)


def test_a_failing_participant_is_logged_without_tracebacks(caplog: pytest.LogCaptureFixture) -> None:
    """The runtime logs a participant's exception once for each participant."""

    def fail(prompt: str) -> str:
        raise RuntimeError("no model")

    async def program(model: Any) -> None:
        agents: list[Any] = [assistant(name, model) for name in ("writer", "critic")]
        with pytest.raises(RuntimeError):
            await RoundRobinGroupChat(agents, max_turns=2).run(task="go")

    with contextlib.suppress(Exception):  # the playground reports that its script failed
        played(fail, program)
    logged = [record for record in caplog.records if record.name == "autogen_core"]
    assert logged
    assert all(not record.exc_info for record in logged)


# Names


def make_newsroom(model: Any) -> Any:
    left, right = (RoundRobinGroupChat([assistant("writer", model)], name=n, max_turns=1) for n in ("left", "right"))
    society: Any = SocietyOfMindAgent("society", team=right, model_client=model)
    tools: list[Any] = [AgentTool(AssistantAgent("adviser", model_client=model))]
    return RoundRobinGroupChat([left, society, assistant("idle", model, tools=tools)], name="newsroom", max_turns=2)


@pytest.mark.parametrize(
    ("selector", "speakers"),
    [
        ("writer", ["writer", "writer", "society"]),
        ("left/writer", ["left/writer", "writer", "society"]),
        ("newsroom/right/writer", ["writer", "newsroom/right/writer", "society"]),
        ("society/writer", ["writer", "society/writer", "society"]),
    ],
)
def test_one_name_in_two_teams(selector: str, speakers: list[str]) -> None:
    async def program(model: Any) -> None:
        await make_newsroom(model).run(task="go")

    trace = played(lambda prompt: "ok", program, agents=[selector])
    assert agents_of(trace) == speakers
    marked = [event.agent for event in trace.events if event.kind == "agent"]
    assert marked == [name for name in speakers if name == selector]


def test_agents_that_have_not_spoken_are_declared() -> None:
    async def program(model: Any) -> None:
        await make_newsroom(model).run(task="go")

    (root,) = [event for event in played(lambda prompt: "ok", program).events if event.kind == "rollout"]
    names = {"newsroom", "left", "right", "society", "writer", "idle", "adviser"}
    assert set(root.attributes[DECLARED_AGENTS]) == names
