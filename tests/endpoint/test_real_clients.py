"""Eighteen client programs, each with its own unmodified client and the exact record that it must leave.

Clients are built as for a provider, with their own key. Inside a rollout their requests are routed to the endpoint.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest
from agents import Agent, OpenAIProvider, RunConfig, Runner
from anthropic import Anthropic
from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.base import TaskResult
from autogen_agentchat.messages import ModelClientStreamingChunkEvent
from autogen_ext.models.openai import OpenAIChatCompletionClient
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, MessagesState, StateGraph
from openai import AsyncOpenAI, OpenAI

from lightning_core.capture import ActiveRollout, rollout, scope
from lightning_core.endpoint.server import PolicyEndpoint, Routing
from lightning_core.endpoint.upstream import UpstreamServer
from lightning_core.rollouts.local_agents import patched
from lightning_core.testing.recording_server import RecordingServer, recording_server
from lightning_core.trace import Call
from lightning_core.transitions import trace_to_transitions, transitions_to_rows
from tests.endpoint.test_endpoint import serve

ROUTING = Routing(trained=frozenset({"writer"}), temperature=0.7, max_tokens=64)
HI: list[Any] = [{"role": "user", "content": "hi"}]
KEY: Any = "sk-of-the-agent"
ANSWER = "well, hällo ✓"


@pytest.fixture(scope="module")
def upstream() -> Iterator[RecordingServer]:
    with recording_server() as server:
        yield server


@pytest.fixture(scope="module")
def endpoint(upstream: RecordingServer) -> Iterator[PolicyEndpoint]:
    """Every response is unique, so that none can be confused with another."""
    answers = (f"{ANSWER}{i}" for i in range(1000))
    server = UpstreamServer(base_url=f"{upstream.url}/v1", api_key="sk-upstream")
    with patched(()), serve(answers, upstream=server) as endpoint:
        yield endpoint


def play(endpoint: PolicyEndpoint, work: Callable[[], Any], agent: str = "writer") -> tuple[ActiveRollout, Any]:
    """A rollout in which ``agent`` runs ``work``, and its result."""
    key = endpoint.new_key()
    with rollout({"id": "t"}, endpoint=endpoint.url, api_key=key) as run:
        endpoint.open(key, run.address, ROUTING, seed=1)
        with scope(agent):
            result = work()
        endpoint.close(key)
    return run, result


def run_async(work: Coroutine[Any, Any, Any]) -> Any:
    """Run on a new event loop, in this context."""
    return asyncio.run(work)


def openai_chat() -> list[str]:
    with OpenAI(api_key=KEY, max_retries=0) as client:
        answer = client.chat.completions.create(model="gpt-5", messages=HI, temperature=0)
    return [choice.message.content or "" for choice in answer.choices]


def openai_chat_streamed() -> list[str]:
    with OpenAI(api_key=KEY, max_retries=0) as client:
        chunks = list(client.chat.completions.create(model="gpt-5", messages=HI, stream=True))
    return ["".join(chunk.choices[0].delta.content or "" for chunk in chunks)]


def openai_n() -> list[str]:
    with OpenAI(api_key=KEY, max_retries=0) as client:
        answer = client.chat.completions.create(model="gpt-5", messages=HI, n=4)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    return [choice.message.content or "" for choice in answer.choices]


def openai_four_times_the_same() -> list[str]:
    return [text for _ in range(4) for text in openai_chat()]


def openai_responses() -> list[str]:
    with OpenAI(api_key=KEY, max_retries=0) as client:
        return [client.responses.create(model="gpt-5", input="hi").output_text]


def anthropic_messages() -> list[str]:
    with Anthropic(api_key=KEY, max_retries=0) as client:
        answer = client.messages.create(model="claude-x", max_tokens=64, messages=HI)
    return [block.text for block in answer.content if block.type == "text"]


def chat_openai() -> ChatOpenAI:
    return ChatOpenAI(model="gpt-5", api_key=KEY, max_retries=0)


def langchain_invoke() -> list[str]:
    return [chat_openai().invoke("hi").text]


def langchain_stream() -> list[str]:
    return ["".join(chunk.text for chunk in chat_openai().stream("hi"))]


def graph() -> Any:
    def write(state: MessagesState) -> dict[str, Any]:
        return {"messages": [chat_openai().invoke(state["messages"])]}

    builder = StateGraph(MessagesState)
    builder.add_node("write", write)
    builder.add_edge(START, "write")
    builder.add_edge("write", END)
    return builder.compile()


def langgraph_invoke() -> list[str]:
    return [graph().invoke({"messages": HI})["messages"][-1].text]


def langgraph_stream() -> list[str]:
    return ["".join(chunk.text for chunk, _ in graph().stream({"messages": HI}, stream_mode="messages"))]


async def _autogen(stream: bool) -> list[str]:
    able = dict.fromkeys(("vision", "function_calling", "json_output", "structured_output"), True)
    info: Any = {**able, "family": "unknown"}
    client = OpenAIChatCompletionClient(model="policy", api_key=KEY, model_info=info, max_retries=0)
    agent = AssistantAgent("writer", client, system_message=None, model_client_stream=stream)
    try:
        if not stream:
            return [(await agent.run(task="hi")).messages[-1].content]  # type: ignore[union-attr]
        text, result = "", None
        async for event in agent.run_stream(task="hi"):
            if isinstance(event, ModelClientStreamingChunkEvent):
                text += event.content
            if isinstance(event, TaskResult):
                result = event
        assert result is not None
        assert result.messages[-1].content == text  # type: ignore[union-attr]
        return [text]
    finally:
        await client.close()


async def _agents(*, stream: bool, **options: Any) -> list[str]:
    """``options``: for the SDK's provider of models; by default it uses the Responses API."""
    async with AsyncOpenAI(api_key=KEY, max_retries=0) as client:
        provider = OpenAIProvider(openai_client=client, **options)
        agent, quiet = Agent[Any](name="writer"), RunConfig(tracing_disabled=True, model_provider=provider)
        if not stream:
            return [(await Runner.run(agent, "hi", run_config=quiet)).final_output]
        result = Runner.run_streamed(agent, "hi", run_config=quiet)
        text = ""
        async for event in result.stream_events():
            if event.type == "raw_response_event" and event.data.type == "response.output_text.delta":
                text += event.data.delta
        assert result.final_output == text
        return [text]


SCENARIOS: dict[str, tuple[Callable[[], list[str]], int]] = {
    "openai chat.create": (openai_chat, 1),
    "LangChain invoke": (langchain_invoke, 1),
    "LangGraph invoke": (langgraph_invoke, 1),
    "AutoGen AssistantAgent": (lambda: run_async(_autogen(stream=False)), 1),
    "openai-agents use_responses=False": (lambda: run_async(_agents(stream=False, use_responses=False)), 1),
    "openai stream": (openai_chat_streamed, 1),
    "LangChain .stream": (langchain_stream, 1),
    "LangGraph stream_mode=messages": (langgraph_stream, 1),
    "AutoGen model_client_stream": (lambda: run_async(_autogen(stream=True)), 1),
    "openai-agents run_streamed": (lambda: run_async(_agents(stream=True, use_responses=False)), 1),
    "Responses create": (openai_responses, 1),
    "openai-agents default": (lambda: run_async(_agents(stream=False)), 1),
    "Anthropic messages": (anthropic_messages, 1),
    "n=4": (openai_n, 4),
    "4 identical prompts": (openai_four_times_the_same, 4),
}
"""The programs, and the number of model calls of each. The three that no policy answers are below."""


def assert_exact(call: Call, text: str) -> None:
    """The record of one call of the trained agent: agent, model, settings and tokens."""
    assert (call.agent, call.model, call.policy_version, call.temperature) == ("writer", "policy", 0, 0.7)
    assert (call.error, call.finish_reason, call.context) == (None, "stop", "new")
    assert call.response == {"role": "assistant", "content": text}
    assert call.prompt_ids is not None
    assert call.output_ids is not None
    assert call.logprobs is not None
    prompt = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    marked = "".join(chr(i) if i < 256 else ("<|im_start|>", "<|im_end|>")[i - 256] for i in call.prompt_ids.tolist())
    assert marked == prompt
    assert call.output_ids.tolist() == [*text.encode(), 257]
    assert call.logprobs.tolist() == [-0.5] * len(call.output_ids)


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_trained_agent_s_client(endpoint: PolicyEndpoint, name: str):
    work, count = SCENARIOS[name]
    run, texts = play(endpoint, work)
    assert run.infrastructure == []
    assert run.trace.counters == {}
    assert len(run.trace.calls) == len(texts) == count
    assert len(set(texts)) == count
    by_text = {(call.response or {})["content"]: call for call in run.trace.calls}
    for text in texts:
        assert text.startswith(ANSWER)
        assert_exact(by_text[text], text)
    transitions = trace_to_transitions(run.trace, agents={"writer"})
    assert [t.call for t in transitions] == [call.id for call in run.trace.calls]
    rows = transitions_to_rows(transitions)
    assert len(rows) == count, "answers to the same prompt never continue each other"
    assert sum(int(row.mask.sum()) for row in rows) == sum(len(text.encode()) + 1 for text in texts)


def test_another_model_at_temperature_0(endpoint: PolicyEndpoint):
    """Next to a trained call in the same rollout, which is not affected."""

    def work() -> list[str]:
        first = openai_chat()
        with scope("judge"), OpenAI(api_key=KEY, max_retries=0) as client:
            answer = client.chat.completions.create(model="base", messages=HI, temperature=0, logprobs=True)
        return [*first, answer.choices[0].message.content or ""]

    run, (mine, theirs) = play(endpoint, work)
    trained, other = run.trace.calls
    assert_exact(trained, mine)
    assert (other.agent, other.model, other.policy_version, other.temperature) == ("judge", "base", None, 0.0)
    assert other.output_ids is not None
    assert other.output_ids.tolist() == [*theirs.encode(), 257]
    assert [t.call for t in trace_to_transitions(run.trace, agents={"writer"})] == [trained.id]
    assert trace_to_transitions(run.trace, agents={"judge"}) == [], "its weights are not trained for any agent"


def test_embeddings(endpoint: PolicyEndpoint, upstream: RecordingServer):
    upstream.requests.clear()

    def work() -> list[float]:
        with OpenAI(base_url=endpoint.url, api_key=KEY, max_retries=0) as client:
            return client.embeddings.create(model="embed-3", input="hi", encoding_format="float").data[0].embedding

    run, vector = play(endpoint, work)
    assert vector == [0.1, 1e-7, -2.0]
    (noted,) = upstream.requests
    assert noted.body == {"model": "embed-3", "input": "hi", "encoding_format": "float"}
    assert run.trace.calls == ()
    (span,) = [span for span in run.spans if span.attributes.get("gen_ai.operation.name") == "embeddings"]
    assert (span.attributes["gen_ai.agent.name"], span.attributes["gen_ai.response.model"]) == ("writer", "recorded")


def test_models_list(endpoint: PolicyEndpoint):
    def work() -> list[str]:
        with OpenAI(base_url=endpoint.url, api_key=KEY, max_retries=0) as client:
            ours = [model.id for model in client.models.list()]
        with Anthropic(base_url=endpoint.url.removesuffix("/v1"), api_key=KEY, max_retries=0) as client:
            assert [model.id for model in client.models.list()] == ours
        return ours

    run, names = play(endpoint, work)
    assert names == ["policy", "base"]
    assert run.trace.calls == ()


def test_there_are_eighteen():
    assert len(SCENARIOS) + 3 == 18
