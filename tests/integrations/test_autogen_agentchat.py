"""AutoGen AgentChat: the contract suite, and tests of its own agents and teams."""

from __future__ import annotations

import asyncio
import inspect
import json
import random
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import autogen_core._single_threaded_agent_runtime as runtimes
import pytest
from autogen_agentchat.agents import AssistantAgent, BaseChatAgent, MessageFilterAgent, SocietyOfMindAgent
from autogen_agentchat.agents._message_filter_agent import MessageFilterConfig, PerSourceFilter
from autogen_agentchat.base import Response, TaskResult
from autogen_agentchat.conditions import HandoffTermination, MaxMessageTermination, TextMentionTermination
from autogen_agentchat.messages import HandoffMessage, TextMessage
from autogen_agentchat.teams import (
    BaseGroupChat,
    DiGraphBuilder,
    GraphFlow,
    MagenticOneGroupChat,
    RoundRobinGroupChat,
    SelectorGroupChat,
    Swarm,
)
from autogen_agentchat.teams._group_chat._chat_agent_container import ChatAgentContainer
from autogen_agentchat.teams._group_chat._events import GroupChatRequestPublish
from autogen_agentchat.tools import AgentTool, TeamTool
from autogen_core import BaseAgent, CancellationToken, SingleThreadedAgentRuntime
from autogen_core.models import ModelFamily, ModelInfo, UserMessage
from autogen_core.tools import BaseTool, FunctionTool, TextResultContent, ToolResult, Workbench
from autogen_ext.models.openai import OpenAIChatCompletionClient

from lightning_autogen_agentchat._context import FUNCTIONS
from lightning_core.capture import current_rollout
from lightning_core.capture.integration import Installed
from lightning_core.capture.mark import trainable
from lightning_core.errors import ConfigError
from lightning_core.testing import Playground, open_playground, playground, tool_call
from lightning_core.testing.contract import AgentSpec, HostAdapter, IntegrationContract, ancestors, parent_of, run_async
from lightning_core.trace import Event, Trace

INFO = ModelInfo(
    vision=False, function_calling=True, json_output=False, structured_output=False, family=ModelFamily.UNKNOWN
)


def add(a: int, b: int) -> int:
    """Add two numbers that are not negative."""
    if b < 0:
        raise ValueError("b is negative")
    return a + b


def chat_client(base_url: str | None = None) -> OpenAIChatCompletionClient:
    # AutoGen warns if a response names another model than the request.
    options: dict[str, Any] = {"model": "policy"} if base_url is None else {"model": "recorded", "base_url": base_url}
    return OpenAIChatCompletionClient(api_key="sk-of-the-agent", model_info=INFO, max_retries=0, **options)


@asynccontextmanager
async def client(base_url: str | None = None) -> AsyncGenerator[OpenAIChatCompletionClient]:
    model = chat_client(base_url)
    try:
        yield model
    finally:
        await model.close()


class PartAgent(AssistantAgent):
    """An assistant that sends its own prompt for any message, then does what its part specifies."""

    def __init__(self, part: AgentSpec, model: OpenAIChatCompletionClient, *, stream: bool) -> None:
        super().__init__(
            part.name.replace(" ", "_"),
            model,
            tools=[add] if part.tool else None,
            reflect_on_tool_use=part.tool,
            model_client_stream=stream,
        )
        self.part = part
        self.inner = None if part.inner is None else make_agent(part.inner, model, stream=stream)

    async def on_messages_stream(self, messages: Any, cancellation_token: Any) -> AsyncGenerator[Any, None]:
        own = [TextMessage(content=self.part.text, source="user")]
        async for message in super().on_messages_stream(own, cancellation_token):
            if isinstance(message, Response):
                if self.inner is not None:
                    await self.inner.run(task="go on")
                if self.part.error is not None:
                    raise self.part.error
            yield message


def make_agent(part: AgentSpec, model: OpenAIChatCompletionClient, *, stream: bool) -> AssistantAgent:
    agent = PartAgent(part, model, stream=stream)
    return trainable(agent, name=part.name) if part.marked else agent


class AutoGenAdapter(HostAdapter):
    """Several parts are a round-robin team. A single part, and each of parallel parts, is an agent that runs alone.

    Agents and teams are created for each run: they hold state, and a team cannot run twice at the same time.
    """

    integration = "autogen-agentchat"
    host = "autogen_agentchat"

    def build(self, parts: Sequence[AgentSpec], *, parallel: bool = False, base_url: str | None = None) -> Any:
        return list(parts), parallel, base_url

    def run(self, program: Any) -> None:
        asyncio.run(self.arun(program))

    async def arun(self, program: Any) -> None:
        await self.each(program, stream=False)

    def stream(self, program: Any) -> None:
        asyncio.run(self.astream(program))

    async def astream(self, program: Any) -> None:
        await self.each(program, stream=True)

    async def each(self, program: Any, *, stream: bool) -> None:
        parts, parallel, base_url = program
        async with client(base_url) as model:
            agents: list[Any] = [make_agent(part, model, stream=stream) for part in parts]
            if parallel or len(agents) == 1:
                await asyncio.gather(*(self.start(agent, stream=stream) for agent in agents))
            else:
                await self.start(RoundRobinGroupChat(agents, max_turns=len(agents)), stream=stream)

    async def start(self, runner: Any, *, stream: bool) -> None:
        if stream:
            assert [message async for message in runner.run_stream(task="go on")]
        else:
            await runner.run(task="go on")

    def patched_call(self) -> tuple[Any, str]:
        return BaseChatAgent, "run"


class TestAutoGen(IntegrationContract):
    distribution = "lightning-rl"
    adapter = AutoGenAdapter()


def test_private_api() -> None:
    """The private functions that are wrapped or read exist with the expected signatures."""
    execute = {"tool_call", "workbench", "handoff_tools", "agent_name", "cancellation_token", "stream"}
    assert set(inspect.signature(AssistantAgent._execute_tool_call).parameters) == execute
    handoff = {"model_result", "executed_calls_and_results", "inner_messages", "handoffs", "agent_name"}
    assert set(inspect.signature(AssistantAgent._check_and_handle_handoff).parameters) == handoff
    for method in ("_execute_tool_call(", "_check_and_handle_handoff("):
        call = inspect.getsource(AssistantAgent._process_model_result).partition(method)[2].partition(")")[0]
        assert "tool_call=call" in call or "model_result=current_model_result" in call  # by keyword
    assert list(inspect.signature(BaseAgent.on_message).parameters) == ["self", "message", "ctx"]
    assert list(inspect.signature(ChatAgentContainer.handle_request).parameters) == ["self", "message", "ctx"]
    assert GroupChatRequestPublish in ChatAgentContainer.handle_request.target_types
    for method in (SingleThreadedAgentRuntime._process_send, SingleThreadedAgentRuntime._process_publish):
        assert list(inspect.signature(method).parameters) == ["self", "message_envelope"]
        assert inspect.iscoroutinefunction(method)
    for method in FUNCTIONS:
        assert {"model_context", "memory"} & set(inspect.signature(getattr(AssistantAgent, method)).parameters)
    assert "recipient" in runtimes.SendMessageEnvelope.__annotations__
    assert "topic_id" in runtimes.PublishMessageEnvelope.__annotations__
    team = RoundRobinGroupChat([assistant("writer", chat_client())])
    constructor_attributes = {
        "_name",
        "_description",
        "_participants",
        "_group_chat_manager_name",
        "_base_group_chat_manager_class",
    }
    constructor_attributes |= {"_termination_condition", "_max_turns", "_runtime", "_emit_team_events"}
    made = {"_team_id", "_embedded_runtime", "_message_factory", "_initialized"}
    assert constructor_attributes | made <= vars(team).keys()
    constructor = inspect.signature(BaseGroupChat.__init__).parameters
    assert {"group_chat_manager_name", "group_chat_manager_class", "runtime", "emit_team_events"} <= constructor.keys()
    graph = GraphFlow(
        [assistant("writer", chat_client())], DiGraphBuilder().add_node(assistant("writer", chat_client())).build()
    )
    assert "_input_participants" in vars(graph)
    container = ChatAgentContainer.__init__.__code__.co_names
    assert "_agent" in container


# Programs from AgentChat's documentation


def role(prompt: str) -> str:
    """The role of the called agent, from the first line of the system message."""
    return prompt.partition("<|im_start|>system\n")[2].partition("<|im_end|>")[0].partition("\n")[0]


def has_result(prompt: str) -> bool:
    """Whether a tool result is the last message."""
    last = prompt.removesuffix("<|im_start|>assistant\n").rpartition("<|im_start|>")[2]
    return last.startswith("tool\n") or "<tool_response>" in last


def assistant(name: str, model: Any, **options: Any) -> AssistantAgent:
    return AssistantAgent(name, model_client=model, **{"system_message": name, **options})


def played(script: Any, program: Any, *, agents: Sequence[str] = ()) -> Trace:
    """The trace of ``program(model)``, with ``script`` as the model."""

    async def work() -> None:
        # An assistant waits forever for a tool whose workbench raised.
        async with client() as model, asyncio.timeout(30):
            await program(model)

    with playground(script, train=agents, integrations=["autogen-agentchat"]) as run:
        asyncio.run(work())
    return run.trace


def agents_of(trace: Trace) -> list[str | None]:
    return [call.agent for call in trace.calls]


def paths(trace: Trace) -> list[list[str]]:
    """The enclosing events of each call, innermost first, without the rollout."""
    return [ancestors(trace, parent_of(trace, call))[:-1] for call in trace.calls]


def tools_of(trace: Trace) -> list[Event]:
    return [event for event in trace.events if event.kind == "tool"]


def poem(prompt: str) -> str:
    """The critic approves of the second version."""
    if role(prompt) != "critic":
        return "A poem."
    return "APPROVE" if prompt.count("A poem.") == 2 else "Make it shorter."


def reflection_team(model: Any) -> RoundRobinGroupChat:
    primary_agent = AssistantAgent("primary", model_client=model, system_message="You are a helpful AI assistant.")
    critic_agent = AssistantAgent("critic", model_client=model, system_message="critic")
    text_termination = TextMentionTermination("APPROVE")
    return RoundRobinGroupChat([primary_agent, critic_agent], termination_condition=text_termination)


@pytest.mark.parametrize("how", ["unmarked", "selected", "parts", "agent", "team"])
def test_round_robin(how: str) -> None:
    async def program(model: Any) -> None:
        team = reflection_team(model)
        if how == "parts":
            team = trainable(team, agents=["primary"])
        elif how == "agent":
            primary = trainable(assistant("primary", model), name="primary")
            stop = TextMentionTermination("APPROVE")
            team = RoundRobinGroupChat([primary, assistant("critic", model)], termination_condition=stop)
        elif how == "team":
            team = trainable(team, name="poets")
        result = await team.run(task="Write a short poem about the fall season.")
        assert result.stop_reason == "Text 'APPROVE' mentioned"
        assert [message.source for message in result.messages] == ["user", "primary", "critic", "primary", "critic"]

    trace = played(poem, program, agents=["primary"] if how == "selected" else ())
    team = "poets" if how == "team" else "RoundRobinGroupChat"
    assert paths(trace) == [["primary", team], ["critic", team]] * 2
    if how == "team":
        assert agents_of(trace) == ["poets"] * 4
    else:
        assert agents_of(trace) == ["primary", "critic"] * 2
    marked = {"unmarked": set(), "team": {"poets"}}.get(how, {"primary"})
    assert {event.name for event in trace.events if event.kind == "agent"} == marked
    assert all(event.error is None for event in trace.events)


@pytest.mark.parametrize("use", [True, False])
def test_calculator(use: bool) -> None:
    def calculator(expression: str) -> str:
        """Evaluate an arithmetic expression."""
        return str(sum(int(number) for number in expression.split("+")))

    async def program(model: Any) -> None:
        agent = AssistantAgent("calc_agent", model_client=model, tools=[calculator], system_message="calculator")
        result = await trainable(agent).run(task="What is 19 + 23?")
        assert result.messages[-1].content == "42"

    trace = played(lambda prompt: tool_call("calculator", expression="19+23") if use else "42", program)
    assert agents_of(trace) == ["calc_agent"]
    assert [(t.name, t.agent, t.attributes["gen_ai.tool.call.result"]) for t in tools_of(trace)] == (
        [("calculator", "calc_agent", "42")] if use else []
    )


class Shelf(Workbench):
    """A workbench that executes its tools itself, as one connected to a server does."""

    async def list_tools(self) -> list[Any]:
        return [FunctionTool(add, description="Add two numbers.").schema]

    async def call_tool(
        self, name: str, arguments: Any = None, cancellation_token: Any = None, call_id: str | None = None
    ) -> ToolResult:
        is_error = arguments["b"] < 0
        text = "b is negative" if is_error else str(add(**arguments))
        return ToolResult(name=name, result=[TextResultContent(content=text)], is_error=is_error)

    async def start(self) -> None: ...
    async def stop(self) -> None: ...
    async def reset(self) -> None: ...
    async def save_state(self) -> Any: ...
    async def load_state(self, state: Any) -> None: ...


@pytest.mark.parametrize("b", [3, -3])
def test_workbench(b: int) -> None:
    async def program(model: Any) -> None:
        await assistant("writer", model, workbench=Shelf()).run(task="go")

    trace = played(lambda prompt: tool_call("add", a=2, b=b), program)
    (tool,) = tools_of(trace)
    assert (tool.name, tool.attributes["gen_ai.tool.call.result"]) == ("add", "5" if b > 0 else "b is negative")
    assert tool.error == (None if b > 0 else "b is negative")
    assert ancestors(trace, tool) == ["add", "writer", "rollout"]


def test_calls_that_reach_no_tool() -> None:
    """An unknown tool, and arguments that are not JSON: the model's mistakes, next to a valid call."""

    def script(prompt: str) -> str:
        return tool_call("add", a=1, b=1) + tool_call("multiply", a=2) + tool_call("add", a=1, b="x")

    async def program(model: Any) -> None:
        await assistant("writer", model, tools=[add]).run(task="go")

    trace = played(script, program)
    tools = sorted(tools_of(trace), key=lambda tool: tool.attributes["gen_ai.tool.call.arguments"])
    assert [tool.name for tool in tools] == ["add", "add", "multiply"]
    assert tools[1].error is None
    assert tools[0].error is not None
    assert "not found" in str(tools[2].error)
    assert len({tool.attributes["gen_ai.tool.call.id"] for tool in tools}) == 3


def test_swarm() -> None:
    def script(prompt: str) -> str:
        if role(prompt) == "support":
            return tool_call("transfer_to_refunds")
        return "Refunded. TERMINATE" if has_result(prompt) else tool_call("add", a=2, b=3)

    async def program(model: Any) -> None:
        support = assistant("support", model, handoffs=["refunds", "user"])
        refunds = assistant("refunds", model, tools=[add], max_tool_iterations=2, handoffs=["support"])
        stop = HandoffTermination(target="user") | TextMentionTermination("TERMINATE")
        team = trainable(Swarm([support, refunds], termination_condition=stop, max_turns=4), agents=["refunds"])
        result = await team.run(task="I want my money back.")
        assert isinstance(result.messages[3], HandoffMessage)

    trace = played(script, program)
    assert agents_of(trace) == ["support", "refunds", "refunds"]
    handoff, tool = tools_of(trace)
    assert (handoff.name, handoff.agent, handoff.error) == ("transfer_to_refunds", "support", None)
    assert handoff.attributes["lightning.handoff.from"] == "support"
    assert handoff.attributes["lightning.handoff.to"] == "refunds"
    assert handoff.attributes["gen_ai.tool.call.id"]
    assert ancestors(trace, handoff)[1:] == ["support", "Swarm", "rollout"]
    assert (tool.name, tool.agent) == ("add", "refunds")


def test_only_the_first_of_several_handoffs_is_made() -> None:
    async def program(model: Any) -> None:
        support = assistant("support", model, handoffs=["refunds", "user"])
        with pytest.warns(UserWarning, match="Multiple handoffs"):
            await support.run(task="go")

    trace = played(lambda prompt: tool_call("transfer_to_user") + tool_call("transfer_to_refunds"), program)
    handoffs = [(tool.attributes["lightning.handoff.to"], tool.error is None) for tool in tools_of(trace)]
    assert handoffs == [("user", True), ("refunds", False)]


@pytest.mark.parametrize("marked", [None, "selector", "writer"])
def test_selector(marked: str | None) -> None:
    """The call in which the manager selects the next speaker belongs to the team."""

    def script(prompt: str) -> str:
        if role(prompt) == "writer":
            return "A poem."
        if role(prompt) == "critic":
            return "APPROVE"
        return "critic" if "A poem." in prompt else "writer"

    async def program(model: Any) -> None:
        stop = TextMentionTermination("APPROVE")
        agents: list[Any] = [assistant("writer", model), assistant("critic", model), assistant("idle", model)]
        team = SelectorGroupChat(agents, model, name="selector", termination_condition=stop)
        if marked == "selector":
            team = trainable(team, name="selector")
        elif marked is not None:
            team = trainable(team, agents=[marked])
        await team.run(task="Write a poem.")

    trace = played(script, program)
    assert paths(trace) == [["selector"], ["writer", "selector"], ["selector"], ["critic", "selector"]]
    speaks = ["selector"] * 4 if marked == "selector" else ["selector", "writer", "selector", "critic"]
    assert agents_of(trace) == speaks


@pytest.mark.parametrize("how", ["unmarked", "inner team", "inner agent"])
def test_nested_team(how: str) -> None:
    async def program(model: Any) -> None:
        inner = RoundRobinGroupChat([assistant("writer", model), assistant("critic", model)], name="inner", max_turns=2)
        if how == "inner agent":
            inner = trainable(inner, agents=["writer"])
        outer = RoundRobinGroupChat([inner, assistant("translator", model)], max_turns=2)
        if how == "inner team":
            outer = trainable(outer, agents=["inner"])
        await outer.run(task="Write a poem.")

    trace = played(lambda prompt: f"by {role(prompt)}", program)
    outer = "RoundRobinGroupChat"
    assert paths(trace) == [["writer", "inner", outer], ["critic", "inner", outer], ["translator", outer]]
    first = ["inner", "inner"] if how == "inner team" else ["writer", "critic"]
    assert agents_of(trace) == [*first, "translator"]


@pytest.mark.parametrize("marked", [True, False])
def test_society_of_mind(marked: bool) -> None:
    async def program(model: Any) -> None:
        inner = RoundRobinGroupChat([assistant("writer", model), assistant("critic", model)], max_turns=2)
        society: Any = SocietyOfMindAgent("society", team=inner, model_client=model)
        team = RoundRobinGroupChat(
            [trainable(society) if marked else society, assistant("translator", model)], max_turns=2
        )
        await team.run(task="Write a poem.")

    trace = played(lambda prompt: "ok", program)
    speaks = ["society"] * 3 if marked else ["writer", "critic", "society"]
    assert agents_of(trace) == [*speaks, "translator"]
    assert paths(trace)[0] == ["writer", "RoundRobinGroupChat", "society", "RoundRobinGroupChat"]


def test_graph_flow_with_parallel_nodes() -> None:
    async def program(model: Any) -> None:
        writer, editor, reviewer, final = (assistant(n, model) for n in ("writer", "editor", "reviewer", "final"))
        filtered = MessageFilterAgent(
            "final", final, MessageFilterConfig(per_source=[PerSourceFilter(source="editor", position="last", count=1)])
        )
        builder = DiGraphBuilder()
        for agent in (writer, editor, reviewer, filtered):
            builder.add_node(agent)
        builder.add_edge(writer, editor).add_edge(writer, reviewer)
        builder.add_edge(editor, filtered).add_edge(reviewer, filtered)
        flow = GraphFlow(builder.get_participants(), builder.build())
        await trainable(flow, agents=["editor", "reviewer"]).run(task="Write.")

    trace = played(lambda prompt: f"by {role(prompt)}", program)
    assert agents_of(trace)[0] == "writer"
    assert sorted(map(str, agents_of(trace)[1:3])) == ["editor", "reviewer"]
    assert agents_of(trace)[3] == "final"
    assert paths(trace)[3] == ["final", "GraphFlow"]


def test_magentic_one() -> None:
    def script(prompt: str) -> str:
        if role(prompt) == "writer":
            return "A poem."
        if "JSON" not in prompt:
            return "So be it."
        answers = {"is_request_satisfied": "A poem." in prompt, "is_in_loop": False, "is_progress_being_made": True}
        answers |= {"next_speaker": "writer", "instruction_or_question": "Write."}
        return json.dumps({key: {"reason": "", "answer": answer} for key, answer in answers.items()})

    async def program(model: Any) -> None:
        team = MagenticOneGroupChat([assistant("writer", model)], model_client=model, name="magentic")
        await trainable(team, agents=["writer"]).run(task="Write a poem.")

    trace = played(script, program)
    assert Counter(agents_of(trace)) == {"magentic": 5, "writer": 1}


@pytest.mark.parametrize("marked", [True, False])
def test_agents_and_teams_as_tools(marked: bool) -> None:
    def script(prompt: str) -> str:
        if role(prompt) != "boss" or has_result(prompt):
            return "done"
        return tool_call("writer", task="Write.") + tool_call("board", task="Judge.")

    async def program(model: Any) -> None:
        writer = assistant("writer", model)
        board = RoundRobinGroupChat([assistant("critic", model)], max_turns=1, name="board")
        if marked:
            writer, board = trainable(writer), trainable(board, name="board")
        tools: list[Any] = [AgentTool(writer), TeamTool(board, name="board", description="Judges.")]
        await assistant("boss", model, tools=tools, max_tool_iterations=2).run(task="go")

    trace = played(script, program)
    assert sorted(map(str, agents_of(trace))) == sorted(["boss", "boss", "writer", "board" if marked else "critic"])
    assert sorted(paths(trace)) == [
        ["boss"],
        ["boss"],
        ["critic", "board", "board", "boss"],
        ["writer", "writer", "boss"],
    ]
    assert [(tool.name, tool.error) for tool in tools_of(trace)] == [("writer", None), ("board", None)]


def test_streaming() -> None:
    chunks: list[str] = []

    async def program(model: Any) -> None:
        agents: list[Any] = [assistant(name, model, model_client_stream=True) for name in ("writer", "critic")]
        team = trainable(RoundRobinGroupChat(agents, max_turns=2), agents=["critic"])
        async for message in team.run_stream(task="Write a poem."):
            chunks.append(type(message).__name__)
            if not isinstance(message, TaskResult):
                assert message.source in ("user", "writer", "critic")

    trace = played(lambda prompt: f"a poem by {role(prompt)}", program)
    assert agents_of(trace) == ["writer", "critic"]
    assert chunks.count("ModelClientStreamingChunkEvent") > 4
    assert chunks[-1] == "TaskResult"


@pytest.mark.parametrize("shared_runtime", [False, True])
def test_twenty_rollouts_at_once(shared_runtime: bool) -> None:
    """Teams of one factory with one model client in one loop. A shared runtime was started outside of all rollouts."""
    chance = random.Random(1)

    async def answer_late(playground: Playground) -> list[Trace]:
        runtime = SingleThreadedAgentRuntime() if shared_runtime else None
        if runtime is not None:
            assert current_rollout() is None
            runtime.start()
        async with client() as model:

            def make_team() -> Any:
                agents: list[Any] = [assistant(name, model, model_client_stream=True) for name in ("writer", "critic")]
                team = SelectorGroupChat(
                    [*agents, assistant("other", model)], model, name="desk", max_turns=4, runtime=runtime
                )
                return trainable(team, agents=["writer"])

            async def attempt(number: int) -> Trace:
                with playground.rollout() as run:
                    await asyncio.sleep(chance.random() / 50)  # so that they start at different times
                    await make_team().run(task=f"task {number}.")
                return run.trace

            traces = await asyncio.gather(*(attempt(number) for number in range(20)))
        if runtime is not None:
            await runtime.stop_when_idle()
        return traces

    def script(prompt: str) -> str:
        if role(prompt) in ("writer", "critic"):
            return f"by {role(prompt)}" + "." * chance.randrange(
                30
            )  # four tokens per delta, so the number of delays varies
        return "critic" if prompt.rstrip().count("by writer") > prompt.count("by critic") else "writer"

    with open_playground(script, integrations=["autogen-agentchat"], delay=0.001) as opened:
        traces = asyncio.run(answer_late(opened))
    assert len({trace.rollout for trace in traces}) == 20
    assert len({call.id for trace in traces for call in trace.calls}) == 20 * 8
    for number, trace in enumerate(traces):
        assert agents_of(trace) == ["desk", "writer", "desk", "critic"] * 2
        assert paths(trace) == [["desk"], ["writer", "desk"], ["desk"], ["critic", "desk"]] * 2
        assert all(f"task {number}." in json.dumps(call.messages) for call in trace.calls)


# What can be marked


class Chorus(BaseChatAgent):
    """A custom agent with a model and a tool, which it uses itself."""

    produced_message_types = (TextMessage,)

    def __init__(self, name: str, model: Any) -> None:
        super().__init__(name, "sings")
        self.model = model

    async def on_messages(self, messages: Any, cancellation_token: CancellationToken) -> Response:
        answer = await self.model.create([UserMessage(content="sing", source="user")])
        tool: BaseTool[Any, Any] = FunctionTool(add, description="Add.")
        await tool.run_json({"a": 1, "b": 2}, cancellation_token)
        return Response(chat_message=TextMessage(content=str(answer.content), source=self.name))

    async def on_reset(self, cancellation_token: CancellationToken) -> None: ...


RUNS = ["run", "run_stream", "on_messages", "on_messages_stream", "team", "inside a tool"]


async def start(agent: Any, how: str, model: Any) -> None:
    token, messages = CancellationToken(), [TextMessage(content="go", source="user")]
    match how:
        case "run":
            await agent.run(task="go")
        case "run_stream":
            assert [message async for message in agent.run_stream(task="go")]
        case "on_messages":
            await agent.on_messages(messages, token)
        case "on_messages_stream":
            assert [message async for message in agent.on_messages_stream(messages, token)]
        case "team":
            await RoundRobinGroupChat([agent], max_turns=1).run(task="go")
        case _:
            await AgentTool(agent).run_json({"task": "go"}, token)


@pytest.mark.parametrize("integration", [True, False])
@pytest.mark.parametrize("how", RUNS)
@pytest.mark.parametrize("kind", [AssistantAgent, Chorus])
def test_marked_agents(playground: Playground, kind: Any, how: str, integration: bool) -> None:
    async def program() -> None:
        async with client() as model:
            agent = kind("writer", model)
            marked = trainable(agent, name="poet")
            assert isinstance(marked, kind)
            assert (marked.name, type(marked).__name__, marked is agent) == ("writer", kind.__name__, False)
            await start(marked, how, model)

    installed = Installed()
    if integration:
        installed.install("autogen-agentchat")
    with playground.rollout() as run:
        run_async(program())
    installed.uninstall("autogen-agentchat")
    assert agents_of(run.trace) == ["poet"]
    assert [event.name for event in run.trace.events if event.kind == "agent"] == ["poet"]
    assert "writer" not in [event.name for event in run.trace.events if event.kind == "node"]


@pytest.mark.parametrize("agents", [(), ("writer",)])
@pytest.mark.parametrize("how", RUNS)
@pytest.mark.parametrize("kind", [AssistantAgent, Chorus])
def test_unmarked_agents(playground: Playground, kind: Any, how: str, agents: Sequence[str]) -> None:
    async def program() -> None:
        async with client() as model:
            await start(kind("writer", model), how, model)

    with Installed().installed("autogen-agentchat"), playground.rollout(train=agents) as run:
        run_async(program())
    places = [event.kind for event in run.trace.events if event.name == "writer" and event.kind != "tool"]
    if kind is Chorus and how.startswith("on_"):  # a method of the user's class, which only a mark covers
        assert (agents_of(run.trace), places) == ([None], [])
    else:
        assert (agents_of(run.trace), places) == (["writer"], ["agent" if agents else "node"])
    if kind is Chorus:
        tool = tools_of(run.trace)[-1]
        assert (tool.name, tool.attributes["gen_ai.tool.call.result"]) == ("add", "3")


def test_a_team_whose_runs_began_before_the_integration_was_installed(playground: Playground) -> None:
    async def program() -> None:
        async with client() as model:
            team = RoundRobinGroupChat([assistant("writer", model)], max_turns=1)
            await team.run(task="one")
            with Installed().installed("autogen-agentchat"), playground.rollout() as run:
                await team.run(task="two")
            assert agents_of(run.trace) == ["writer"]

    with playground.rollout():
        run_async(program())


def test_state_moves_between_an_agent_and_its_copy(playground: Playground) -> None:
    async def program() -> None:
        async with client() as model:
            agent = assistant("writer", model)
            marked = trainable(agent, name="poet")
            await marked.run(task="one")
            other = assistant("writer", model)
            await other.load_state(await marked.save_state())
            assert len(await other.model_context.get_messages()) == 2
            assert marked.dump_component() == agent.dump_component()

    with playground.rollout():
        run_async(program())


@pytest.mark.parametrize("first", ["original", "copy"])
def test_a_team_and_its_copy_both_run(playground: Playground, first: str) -> None:
    async def program() -> None:
        async with client() as model:
            runtime = SingleThreadedAgentRuntime()
            runtime.start()
            for options in ({}, {"runtime": runtime}):
                team = RoundRobinGroupChat([assistant("writer", model)], max_turns=1, **options)
                copy = trainable(team, agents=["writer"])
                assert isinstance(copy, RoundRobinGroupChat)
                for one in (team, copy) if first == "original" else (copy, team):
                    await one.run(task="one")
                assert (await copy.save_state()).keys() == (await team.save_state()).keys()
                await copy.load_state(await copy.save_state())
            await runtime.stop_when_idle()

    with playground.rollout() as run:
        run_async(program())
    assert [call.agent for call in run.trace.calls] == (
        [None, "writer"] if first == "original" else ["writer", None]
    ) * 2


def test_what_cannot_be_marked(playground: Playground) -> None:
    async def program() -> None:
        async with client() as model:
            writer = assistant("writer", model)
            team = RoundRobinGroupChat([writer, assistant("critic", model)], max_turns=1)
            with pytest.raises(
                ConfigError, match=r"no participant named 'write'; the participants are \['critic', 'writer'\]"
            ):
                trainable(team, agents=["write"])
            with pytest.raises(ConfigError, match="expected a team, found AssistantAgent"):
                trainable(writer, agents=["writer"])
            with pytest.raises(ConfigError, match="expected an agent or a team"):
                trainable(MaxMessageTermination(1), name="stop")
            poets = RoundRobinGroupChat([trainable(writer, name="poet")])
            with pytest.raises(ConfigError, match="is already marked as 'poet'"):
                trainable(poets, agents=["writer"])
            await team.run(task="go")
            for mark in ({"name": "team"}, {"agents": ["writer"]}):
                with pytest.raises(ConfigError, match="mark it before that"):
                    trainable(team, **mark)

    with playground.rollout():
        run_async(program())


def test_an_agent_that_fails_in_a_team(playground: Playground) -> None:
    """The team raises its own error, as without Lightning; the agent's span has the agent's error."""

    async def program() -> None:
        async with client() as model:
            part = AgentSpec("writer", marked=True, error=RuntimeError("the agent's own"))
            await RoundRobinGroupChat([make_agent(part, model, stream=False)], max_turns=1).run(task="go")

    with Installed().installed("autogen-agentchat"), playground.rollout() as run, pytest.raises(RuntimeError):
        run_async(program())
    errors = {event.name: event.error for event in run.trace.events}
    assert errors["writer"] == "RuntimeError: the agent's own"
    assert str(errors["RoundRobinGroupChat"]).startswith("RuntimeError: RuntimeError: the agent's own")
