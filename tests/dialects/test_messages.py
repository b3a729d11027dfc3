"""Anthropic's Messages API: the anthropic client over real HTTP, against a scripted backend."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import anthropic
import pytest
from anthropic import Anthropic

from lightning_core.capture import ActiveRollout, reward, rollout, scope
from lightning_core.capture.signatures import sign_origin
from lightning_core.endpoint.server import PolicyEndpoint, Routing
from lightning_core.endpoint.upstream import UpstreamServer
from lightning_core.testing import Playground
from lightning_core.testing.recording_server import RecordingServer
from lightning_core.transitions import trace_to_transitions, transitions_to_rows
from tests.dialects.test_responses import TWO_CALLS, WRITER, prompts_of, sum_up
from tests.endpoint.test_endpoint import client_in_scope, serve

TOOLS: list[Any] = [{"name": "add", "description": "a + b", "input_schema": {"type": "object"}}]
HI: list[Any] = [{"role": "user", "content": "hi"}]
ASK: dict[str, Any] = {"model": "m", "max_tokens": 1000, "messages": HI}


@contextmanager
def talk(
    endpoint: PolicyEndpoint, routing: Routing = WRITER, agent: str = "writer"
) -> Iterator[tuple[ActiveRollout, Anthropic]]:
    """A rollout with a client in the scope of ``agent``; only its key identifies the rollout."""
    with client_in_scope(endpoint, routing, agent) as (run, client):
        address = {name: str(client.default_headers[name]) for name in ("traceparent", "lightning-agent")}
        url = endpoint.url.removesuffix("/v1")
        with Anthropic(base_url=url, api_key=client.api_key, max_retries=0, default_headers=address) as talker:
            yield run, talker


def text_of(message: anthropic.types.Message) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def calls_of(message: anthropic.types.Message) -> list[tuple[str, object]]:
    return [(block.name, block.input) for block in message.content if block.type == "tool_use"]


def test_an_answer_and_its_record():
    with serve() as endpoint, talk(endpoint) as (run, client):
        answer = client.messages.create(
            **ASK,
            system=[{"type": "text", "text": "be kind", "cache_control": {"type": "ephemeral"}}],
            thinking={"type": "adaptive"},
            metadata={"user_id": "u"},
            extra_body={"temperature": 0.3},
        )
        reward(0.5, call=answer.id)
    assert text_of(answer) == "hello"
    assert (answer.stop_reason, answer.stop_sequence, answer.model) == ("end_turn", None, "policy")
    (call,) = run.trace.calls
    assert call.agent == "writer"
    assert call.temperature == 0.3
    assert call.output_ids is not None
    assert call.prompt_ids is not None
    assert call.output_ids.tolist() == [*b"hello", 257]
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (len(call.prompt_ids), 6)
    assert prompts_of(run) == ["system\nbe kind\nuser\nhi\nassistant\n"]
    assert run.trace.rewards[0].call == call.id


@pytest.mark.parametrize(
    "text",
    ["hällo wörld ✓", "", " spaced \n", TWO_CALLS, '<tool_call>{"name": "add", "arguments": "oops"}</tool_call>'],
)
def test_a_stream_adds_up_to_the_answer(text: str):
    with serve(lambda p: text) as endpoint, talk(endpoint) as (run, client):
        answer = client.messages.create(**ASK, tools=TOOLS)
        with client.messages.stream(**ASK, tools=TOOLS) as stream:
            events = list(stream)
            streamed = stream.get_final_message()
    assert "".join(e.text for e in events if e.type == "text") == text_of(streamed) == text_of(answer)
    assert calls_of(streamed) == calls_of(answer)
    assert streamed.usage == answer.usage
    assert streamed.stop_reason == answer.stop_reason
    assert streamed.id != answer.id
    first, second = run.trace.calls
    assert first.output_ids is not None
    assert second.output_ids is not None
    assert first.output_ids.tolist() == second.output_ids.tolist()


@pytest.mark.parametrize("stream", [False, True])
def test_parallel_calls_and_the_second_turn_continues_their_tokens(stream: bool):
    with serve(sum_up) as endpoint, talk(endpoint) as (run, client):

        def ask(messages: list[Any]) -> Any:
            arguments: Any = {
                "model": "m",
                "max_tokens": 1000,
                "system": "add up",
                "tools": TOOLS,
                "messages": messages,
            }
            if not stream:
                return client.messages.create(**arguments)
            with client.messages.stream(**arguments) as events:
                return events.get_final_message()

        answer = ask([{"role": "user", "content": [{"type": "text", "text": "hi"}]}])
        assert text_of(answer) == "both:"
        assert answer.stop_reason == "tool_use"
        assert calls_of(answer) == [("add", {"a": 1}), ("add", {"a": 2})]
        used = [block for block in answer.content if block.type == "tool_use"]
        results: list[Any] = [
            {"type": "tool_result", "tool_use_id": used[0].id, "content": [{"type": "text", "text": "3"}]},
            {"type": "tool_result", "tool_use_id": used[1].id, "content": "too big", "is_error": True},
            {"type": "text", "text": "go on"},
        ]
        second = ask([*HI, {"role": "assistant", "content": answer.content}, {"role": "user", "content": results}])
        assert text_of(second) == "2 results"
    assert [c.context for c in run.trace.calls] == ["new", "clean"]
    rows = transitions_to_rows(trace_to_transitions(run.trace, agents={"writer"}))
    assert [len(row.segments) for row in rows] == [2]
    recorded = run.trace.calls[1].messages
    assert [m["role"] for m in recorded] == ["system", "user", "assistant", "tool", "tool", "user"]
    assert [m.get("tool_call_id") for m in recorded[3:5]] == [block.id for block in used]
    assert recorded[4]["content"] == "Error: too big"


@pytest.mark.parametrize("stream", [False, True])
def test_how_an_answer_ended(stream: bool):
    with serve(lambda p: "a; b. c") as endpoint, talk(endpoint) as (run, client):

        def ask(**options: Any) -> Any:
            if not stream:
                return client.messages.create(**{**ASK, **options})
            with client.messages.stream(**{**ASK, **options}) as events:
                return events.get_final_message()

        stopped = ask(stop_sequences=[".", ";"])
        cut = ask(max_tokens=2)
    assert (text_of(stopped), stopped.stop_reason, stopped.stop_sequence) == ("a", "stop_sequence", ";")
    assert (text_of(cut), cut.stop_reason) == ("a;", "max_tokens")
    assert run.trace.calls[1].finish_reason == "length"


def test_a_response_format_is_described_in_the_prompt():
    forms: list[dict[str, Any]] = [
        {"output_config": {"effort": "low", "format": {"type": "json_schema", "schema": {"title": "Verdict"}}}},
        {"tools": TOOLS, "tool_choice": {"type": "any", "disable_parallel_tool_use": True}},
        {"tools": TOOLS, "tool_choice": {"type": "tool", "name": "add"}},
        {"tools": TOOLS, "tool_choice": {"type": "none"}},
    ]
    with serve() as endpoint, talk(endpoint) as (run, client):
        for form in forms:
            client.messages.create(**ASK, **form)
    schema, some, named, none = prompts_of(run)
    assert 'satisfies this JSON schema:\n{"title": "Verdict"}' in schema
    assert "Answer by calling a function.\nCall at most one function in an answer." in some
    assert "Answer by calling the function add." in named
    assert none == "user\nhi\nassistant\n"


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ({"extra_body": {"output_format": {}}}, "output_format"),
        ({"extra_body": {"temperature": "hot"}}, "temperature"),
        ({"container": "c"}, "container"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"extra_body": {"max_tokens": None}}, "max_tokens"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools.0.type"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "grammar"}}, "tool_choice"),
        ({"output_config": {"format": {"type": "grammar"}}}, "output_config.format"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages.0.content.0"),
        ({"messages": [*HI, {"role": "assistant", "content": "The answer is ("}]}, "ends with an assistant message"),
        ({"messages": []}, "messages"),
    ],
)
def test_unsupported_fields_are_refused_by_name(extra: dict[str, Any], named: str):
    with serve() as endpoint, talk(endpoint) as (run, client), pytest.raises(anthropic.BadRequestError) as caught:
        client.messages.create(**{**ASK, **extra})
    body: Any = caught.value.body
    assert body["type"] == "error"
    assert body["error"]["type"] == "invalid_request_error"
    assert named in body["error"]["message"]
    assert run.infrastructure == []


def test_errors_are_of_the_class_that_the_client_has_for_them():
    with serve(iter([])) as endpoint:
        url = endpoint.url.removesuffix("/v1")
        with (
            Anthropic(base_url=url, api_key="lr-guess", max_retries=0) as stranger,
            pytest.raises(anthropic.AuthenticationError, match="unknown API key"),
        ):
            stranger.messages.create(**ASK)
        with talk(endpoint) as (run, client):
            with pytest.raises(anthropic.InternalServerError, match="no more answers"):
                client.messages.create(**ASK)
            with (
                pytest.raises(anthropic.APIStatusError, match="no more answers"),
                client.messages.stream(**ASK) as stream,
            ):
                list(stream)
            with pytest.raises(anthropic.NotFoundError, match="POST /v1/messages/batches"):
                client.messages.batches.create(requests=[])
        assert len(run.infrastructure) == 2
        with talk(endpoint, agent="critic") as (_, client), pytest.raises(anthropic.NotFoundError, match="'critic'"):
            client.messages.create(**ASK)


def test_a_provider_s_client_is_redirected_with_the_address(playground: Playground):
    with (
        Anthropic(api_key="sk-own", max_retries=0) as client,
        playground.rollout(train=["writer"]) as run,
        scope("writer"),
    ):
        answer = client.messages.create(**{**ASK, "model": "policy"})
        with client.messages.stream(**{**ASK, "model": "policy"}) as stream:
            streamed = stream.get_final_text()
        beta = client.beta.messages.create(**{**ASK, "model": "policy"})
    assert text_of(answer) == streamed == "answer to hi"
    assert [block.text for block in beta.content if block.type == "text"] == ["answer to hi"]
    assert [call.agent for call in run.trace.calls] == ["writer"] * 3


@pytest.mark.parametrize("stream", [False, True])
def test_an_untrained_agent_s_call_passes_through_unchanged_and_is_recorded(stream: bool):
    """The upstream is a second endpoint, which identifies the call by the key in ``x-api-key``."""
    with serve(lambda p: TWO_CALLS) as far, rollout({"id": "far"}) as far_run:
        key = far.new_key()
        far.open(key, far_run.address, Routing(frozen={"": "policy"}))
        upstream = UpstreamServer(base_url=far.url, api_key=key)
        with serve(upstream=upstream) as near, talk(near, agent="critic") as (run, client):
            if stream:
                with client.messages.stream(**ASK, tools=TOOLS) as events:
                    answer = events.get_final_message()
            else:
                answer = client.messages.create(**ASK, tools=TOOLS)
            with pytest.raises(anthropic.BadRequestError, match="output_format"):
                list(client.messages.create(**ASK, stream=True, extra_body={"output_format": {}}))
    call, refused = run.trace.calls
    assert call.agent == "critic"
    assert call.prompt_ids is None
    assert (call.finish_reason, call.model) == ("tool_calls", "policy")
    assert call.response is not None
    assert call.response["content"] == text_of(answer) == "both:"
    assert call.response == far_run.trace.calls[0].response
    attributes = next(span.attributes for span in run.spans if span.span_id == call.id)
    assert attributes["gen_ai.usage.input_tokens"] == answer.usage.input_tokens
    assert attributes["gen_ai.usage.output_tokens"] == answer.usage.output_tokens
    assert refused.error is not None


def test_what_goes_to_its_origin_keeps_its_key_and_version(server: RecordingServer):
    headers = {
        "lightning-origin": f"{server.url}/v1/messages",
        "lightning-origin-authorization": "x-api-key sk-own",
        "anthropic-version": "2023-06-01",
    }
    with (
        serve() as endpoint,
        talk(endpoint, agent="critic") as (run, client),
        pytest.raises(anthropic.InternalServerError, match="returned 0 complete responses; expected 1"),
    ):
        client.messages.create(**ASK, extra_headers=sign_origin(run.secret, run.rollout, headers))
    (noted,) = server.requests
    assert noted.body == ASK
    assert noted.headers["x-api-key"] == "sk-own"
    assert noted.headers["anthropic-version"] == "2023-06-01"
    assert "authorization" not in noted.headers
    assert run.trace.calls[0].error is not None
