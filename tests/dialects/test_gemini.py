"""Google's Gemini API: the google-genai client over real HTTP, against a scripted backend."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from google import genai
from google.genai import errors, types
from pydantic import BaseModel

from lightning_core.capture import ActiveRollout, reward, rollout, scope
from lightning_core.capture.signatures import sign_origin
from lightning_core.dialects import gemini
from lightning_core.endpoint.server import PolicyEndpoint, Routing
from lightning_core.endpoint.upstream import UpstreamServer
from lightning_core.testing import Playground
from lightning_core.testing.recording_server import RecordingServer
from lightning_core.transitions import trace_to_transitions, transitions_to_rows
from tests.dialects.test_fields import client_in_rollout
from tests.dialects.test_responses import TWO_CALLS, WRITER, prompts_of
from tests.endpoint.test_endpoint import client_in_scope, serve

ADD = {
    "name": "add",
    "description": "a + b",
    "parameters": {"type": "OBJECT", "properties": {"a": {"type": "INTEGER"}}},
}
TOOLS: list[Any] = [{"function_declarations": [ADD]}]
HI: dict[str, Any] = {"contents": [{"role": "user", "parts": [{"text": "hi"}]}]}
BASE = "/models/base:generateContent"


def one_call(prompt: str) -> str:
    """Calls ``add`` first, then answers."""
    if "tool_response" in prompt:
        return "the sum is 3"
    return 'let me <tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'


@contextmanager
def talk(
    endpoint: PolicyEndpoint, routing: Routing = WRITER, agent: str = "writer"
) -> Generator[tuple[ActiveRollout, genai.Client]]:
    """A rollout with a client in the scope of ``agent``; only its key identifies the rollout."""
    with client_in_scope(endpoint, routing, agent) as (run, client):
        address = {name: str(client.default_headers[name]) for name in ("traceparent", "lightning-agent")}
        options = types.HttpOptions(base_url=endpoint.url.removesuffix("/v1"), headers=address)
        talker = genai.Client(api_key=client.api_key, http_options=options)
        try:
            yield run, talker
        finally:
            talker.close()


def assert_rows(run: ActiveRollout, *segments: int) -> None:
    """The number of calls in each row; every later call of a row continues it cleanly."""
    rows = transitions_to_rows(trace_to_transitions(run.trace, agents={"writer"}))
    assert [len(row.segments) for row in rows] == list(segments)
    contexts = [call.context for call in run.trace.calls]
    assert sorted(map(str, contexts)) == sorted(["new"] * len(rows) + ["clean"] * (len(contexts) - len(rows)))


def add(a: int, b: int) -> int:
    """The sum of a and b."""
    return a + b


def test_an_answer_and_its_record():
    with serve() as endpoint, talk(endpoint) as (run, client):
        config = types.GenerateContentConfig(
            system_instruction="be kind",
            temperature=0.3,
            labels=None,
            safety_settings=[types.SafetySetting(category="HARM_CATEGORY_HARASSMENT", threshold="BLOCK_NONE")],  # type: ignore[arg-type]
            thinking_config=types.ThinkingConfig(thinking_budget=0),
        )
        answer = client.models.generate_content(model="gemini-x", contents="hi", config=config)
        assert answer.response_id is not None
        reward(0.5, call=answer.response_id)
    assert (answer.text, answer.model_version) == ("hello", "policy")
    assert answer.candidates is not None
    assert answer.candidates[0].finish_reason == types.FinishReason.STOP
    (call,) = run.trace.calls
    assert (call.agent, call.temperature, call.id) == ("writer", 0.3, answer.response_id)
    assert call.output_ids is not None
    assert call.prompt_ids is not None
    assert call.output_ids.tolist() == [*b"hello", 257]
    usage = answer.usage_metadata
    assert usage is not None
    assert (usage.prompt_token_count, usage.candidates_token_count) == (len(call.prompt_ids), 6)
    assert prompts_of(run) == ["system\nbe kind\nuser\nhi\nassistant\n"]
    assert run.trace.rewards[0].call == call.id


@pytest.mark.parametrize("text", ["hällo wörld ✓", "", TWO_CALLS, "x" * 300])
def test_a_stream_adds_up_to_the_answer(text: str):
    with serve(lambda p: text) as endpoint, talk(endpoint) as (run, client):
        config = types.GenerateContentConfig(tools=TOOLS)
        answer = client.models.generate_content(model="m", contents="hi", config=config)
        chunks = list(client.models.generate_content_stream(model="m", contents="hi", config=config))
    parts = [part for chunk in chunks for part in (chunk.candidates or [])[0].content.parts or []]  # type: ignore[union-attr]
    whole = list((answer.candidates or [])[0].content.parts or [])  # type: ignore[union-attr]
    assert "".join(part.text or "" for part in parts) == "".join(part.text or "" for part in whole)
    made = [(part.function_call.name, part.function_call.args) for part in parts if part.function_call]
    assert made == [(call.name, call.args) for call in answer.function_calls or []]
    assert [(chunk.candidates or [])[0].finish_reason for chunk in chunks][-1] == types.FinishReason.STOP
    assert chunks[-1].usage_metadata == answer.usage_metadata
    first, second = run.trace.calls
    assert first.output_ids is not None
    assert second.output_ids is not None
    assert first.output_ids.tolist() == second.output_ids.tolist()


def test_async_clients():
    async def work(client: genai.Client) -> list[str | None]:
        answer = await client.aio.models.generate_content(model="m", contents="hi")
        stream = await client.aio.models.generate_content_stream(model="m", contents="hi")
        streamed = "".join([chunk.text or "" async for chunk in stream])
        await client.aio.aclose()
        return [answer.text, streamed]

    with serve() as endpoint, talk(endpoint) as (run, client):
        assert asyncio.run(work(client)) == ["hello", "hello"]
    assert_rows(run, 1, 1)


def test_automatic_function_calling_continues_the_row():
    with serve(one_call) as endpoint, talk(endpoint) as (run, client):
        answer = client.models.generate_content(
            model="m", contents="1 + 2?", config=types.GenerateContentConfig(tools=[add])
        )
    assert answer.text == "the sum is 3"
    assert_rows(run, 2)
    first, second = run.trace.calls
    assert first.finish_reason == "tool_calls"
    assert second.messages[-1]["role"] == "tool"
    assert json.loads(second.messages[-1]["content"]) == {"result": 3}
    assert second.messages[-1]["tool_call_id"] == (first.response or {})["tool_calls"][0]["id"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_is_one_row(stream: bool):
    answers = iter(["first ✓", "second", "third"])
    with serve(answers) as endpoint, talk(endpoint) as (run, client):
        chat = client.chats.create(model="m", config=types.GenerateContentConfig(system_instruction="be kind"))
        for question, answer in (("a", "first ✓"), ("b", "second"), ("c", "third")):
            if stream:
                assert "".join(chunk.text or "" for chunk in chat.send_message_stream(question)) == answer
            else:
                assert chat.send_message(question).text == answer
    assert_rows(run, 3)


@pytest.mark.parametrize("with_ids", [False, True])
def test_parallel_calls_with_and_without_ids_continue_the_row(with_ids: bool):
    """Clients of the API may leave out ids: results then belong to the calls in order."""
    two = "".join(f'<tool_call>{{"name": "add", "arguments": {{"a": {i}}}}}</tool_call>' for i in (1, 2))
    script = lambda prompt: "done" if "tool_response" in prompt else two  # noqa: E731
    with serve(script) as endpoint, client_in_scope(endpoint, WRITER) as (run, client):
        url = f"{endpoint.url.removesuffix('/v1')}/v1beta/models/m:generateContent"
        headers = {name: str(client.default_headers[name]) for name in ("traceparent", "lightning-agent")}
        headers["x-goog-api-key"] = client.api_key
        said = httpx.post(url, json={**HI, "tools": TOOLS}, headers=headers).json()["candidates"][0]["content"]
        calls = [part["functionCall"] for part in said["parts"]]
        results = [
            {"functionResponse": {"name": c["name"], "response": {"result": c["args"]["a"]}, "id": c["id"]}}
            for c in calls
        ]
        if not with_ids:
            for part in (*said["parts"], *results):
                next(iter(part.values())).pop("id")
        turns = [*HI["contents"], said, {"role": "user", "parts": results}]
        for _ in range(2):
            answer = httpx.post(url, json={"contents": turns, "tools": TOOLS}, headers=headers).json()
            turns += [answer["candidates"][0]["content"], {"role": "user", "parts": [{"text": "again"}]}]
    assert_rows(run, 3)
    made = [call["id"] for call in run.trace.calls[1].messages[1]["tool_calls"]]
    assert [m["tool_call_id"] for m in run.trace.calls[1].messages[2:]] == made
    assert len(set(made)) == 2


def test_arguments_that_are_no_object_come_back_as_they_were():
    with (
        serve(lambda p: '<tool_call>{"name": "add", "arguments": "oops"}</tool_call>') as endpoint,
        talk(endpoint) as (run, client),
    ):
        config = types.GenerateContentConfig(tools=TOOLS)
        chat = client.chats.create(model="m", config=config)
        chat.send_message("hi")
        result = types.Part.from_function_response(name="add", response={"error": "no numbers"})
        chat.send_message([result])
    assert_rows(run, 2)


class Person(BaseModel):
    name: str
    age: int | None


def test_the_client_parses_a_schema():
    with serve(lambda p: '{"name": "Ann", "age": 3}') as endpoint, talk(endpoint) as (_, client):
        config = types.GenerateContentConfig(response_mime_type="application/json", response_schema=Person)
        answer = client.models.generate_content(model="m", contents="who?", config=config)
    assert answer.parsed == Person(name="Ann", age=3)


def test_the_model_is_shown_the_tools_that_may_be_called():
    tools: list[Any] = [{"functionDeclarations": [{**ADD, "name": name} for name in ("add", "sub", "mul")]}]
    with serve() as endpoint, talk(endpoint) as (run, client):
        for mode, names in (("NONE", None), ("AUTO", None), ("ANY", None), ("ANY", ["sub"]), ("ANY", ["sub", "mul"])):
            calling = types.FunctionCallingConfig(
                mode=types.FunctionCallingConfigMode(mode), allowed_function_names=names
            )
            config = types.GenerateContentConfig(
                tools=tools, tool_config=types.ToolConfig(function_calling_config=calling)
            )  # type: ignore[arg-type]
            client.models.generate_content(model="m", contents="hi", config=config)
    none, auto, every, sub, two = prompts_of(run)
    assert '"add"' not in none
    assert '"add"' in auto
    assert "Answer by calling" not in auto
    assert "Answer by calling a function." in every
    assert '"add"' in sub
    assert "Answer by calling the function sub." in sub
    assert '"add"' not in two
    assert '"mul"' in two
    shown = [s.attributes["gen_ai.tool.definitions"] for s in run.spans if "gen_ai.tool.definitions" in s.attributes]
    assert json.loads(shown[0])[0]["function"]["parameters"] == {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
    }


def test_errors_are_those_of_the_client():
    with serve(iter([])) as endpoint, talk(endpoint) as (run, client):
        with pytest.raises(errors.ClientError, match="cachedContent") as caught:
            client.models.generate_content(
                model="m", contents="hi", config=types.GenerateContentConfig(cached_content="x")
            )
        assert (caught.value.code, caught.value.status) == (400, "INVALID_ARGUMENT")
        with pytest.raises(errors.ServerError, match="no more answers"):
            client.models.generate_content(model="m", contents="hi")
        with pytest.raises(errors.APIError, match="no more answers"):
            list(client.models.generate_content_stream(model="m", contents="hi"))
    assert len(run.infrastructure) == 2
    assert [call.refused is None for call in run.trace.calls] == [False, True, True]


def test_the_provider_s_client_is_redirected_with_the_address(playground: Playground):
    """Created outside the rollout, with its own key and its provider's URL; also as Vertex AI's, and asynchronously."""
    clients = [genai.Client(api_key="own-key"), genai.Client(vertexai=True, api_key="own-key")]

    async def asked(client: genai.Client) -> str | None:
        answer = await client.aio.models.generate_content(model="policy", contents="hi")
        await client.aio.aclose()
        return answer.text

    with playground.rollout(train=["writer"]) as run, scope("writer"):
        for client in clients:
            assert client.models.generate_content(model="policy", contents="hi").text == "answer to hi"
            chunks = client.models.generate_content_stream(model="policy", contents="hi")
            assert "".join(chunk.text or "" for chunk in chunks) == "answer to hi"
            assert asyncio.run(asked(client)) == "answer to hi"
    assert [call.agent for call in run.trace.calls] == ["writer"] * 6
    assert not any("own-key" in str(span) for span in run.spans)


@pytest.mark.parametrize("stream", [False, True])
def test_an_untrained_agent_s_call_passes_through_unchanged_and_is_recorded(stream: bool):
    """The upstream is a second endpoint, which identifies the call by the key in ``x-goog-api-key``."""
    with serve(lambda p: TWO_CALLS) as far, rollout({"id": "far"}) as far_run:
        key = far.new_key()
        far.open(key, far_run.address, Routing(frozen={"": "policy"}))
        upstream = UpstreamServer(base_url=far.url, api_key=key)
        with serve(upstream=upstream) as near, talk(near, Routing(), agent="critic") as (run, client):
            config = types.GenerateContentConfig(tools=TOOLS)
            if stream:
                chunks = list(client.models.generate_content_stream(model="m", contents="hi", config=config))
                text = "".join(p.text or "" for c in chunks for p in c.candidates[0].content.parts)  # type: ignore[index,union-attr]
            else:
                answer = client.models.generate_content(model="m", contents="hi", config=config)
                text = "".join(p.text or "" for p in answer.candidates[0].content.parts)  # type: ignore[index,union-attr]
            with pytest.raises(errors.ClientError, match="cachedContent"):
                client.models.generate_content(
                    model="m", contents="hi", config=types.GenerateContentConfig(cached_content="x")
                )
        far.close(key)
    call, failed = run.trace.calls
    assert (call.agent, call.prompt_ids, call.finish_reason, call.model) == ("critic", None, "tool_calls", "policy")
    assert call.response is not None
    assert call.response["content"] == text == "both:"
    assert call.response == far_run.trace.calls[0].response
    assert failed.error is not None
    assert failed.refused is None, "its provider refused it, not the endpoint"
    assert run.infrastructure == []


@pytest.mark.parametrize("array", [False, True])
def test_a_call_to_its_origin_keeps_body_and_key_and_may_get_another_model(array: bool, server: RecordingServer):
    routing = Routing(frozen={"judge": "gemini-other"})
    method = "streamGenerateContent" if array else "generateContent"
    origin = f"{server.url}/v1beta/models/gemini-x:{method}?key=own-key"
    with serve() as endpoint, client_in_rollout(endpoint, routing) as (run, client):
        for agent in ("judge", "critic"):  # calls of others wait until the configured name has spoken
            given = {"lightning-origin": origin, "lightning-agent": agent, "x-goog-user-project": "p"}
            headers = sign_origin(run.secret, run.rollout, given)
            answer = client.post(f"/models/gemini-x:{method}", json={**HI, "safety_settings": []}, headers=headers)
            assert answer.status_code == 502, "the recording server speaks another format"
            assert "own-key" not in answer.text
    second, first = server.requests
    assert first.url == f"{server.url}/v1beta/models/gemini-x:generateContent"
    assert second.url == f"{server.url}/v1beta/models/gemini-other:generateContent"
    for noted in (first, second):
        assert noted.body == {**HI, "safety_settings": []}
        assert (noted.headers["x-goog-api-key"], noted.headers["x-goog-user-project"]) == ("own-key", "p")
        assert "authorization" not in noted.headers
    assert not any("own-key" in str(span) for span in run.spans)
    assert not any("own-key" in reason for reason in run.infrastructure)


def test_blocked_prompts_and_finish_reasons_of_the_provider_are_read():
    blocked = gemini.read_response({"promptFeedback": {"blockReason": "SAFETY"}})
    assert [(r.message, r.finish_reason) for r in blocked] == [({"role": "assistant", "content": ""}, "content_filter")]
    for reason, finish in (("MAX_TOKENS", "length"), ("SAFETY", "safety")):
        (found,) = gemini.read_response(
            {"candidates": [{"finishReason": reason}], "usageMetadata": {"promptTokenCount": 3}}
        )
        assert (found.finish_reason, found.input_tokens) == (finish, 3)
