"""Anthropic's Messages API: the anthropic client over real HTTP, against a scripted backend."""

from __future__ import annotations

from typing import Any

import anthropic
import pytest

from lightning_core.capture.signatures import sign_origin
from lightning_core.testing.recording_server import RecordingServer
from tests.dialects.test_conversations import MESSAGES, talk
from tests.endpoint.serving import HI, client_in_rollout, prompts_of, serve

TOOLS: list[Any] = [{"name": "add", "description": "a + b", "input_schema": {"type": "object"}}]
ASK: dict[str, Any] = {"model": "m", "max_tokens": 1000, "messages": HI}


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_names_the_sequence_that_stopped_it(stream: bool):
    arguments: dict[str, Any] = {**ASK, "stop_sequences": [".", ";"]}
    with serve(lambda p: "a; b. c") as endpoint, talk(endpoint, MESSAGES) as (_, client):
        if stream:
            with client.messages.stream(**arguments) as events:
                answer = events.get_final_message()
        else:
            answer = client.messages.create(**arguments)
    (block,) = answer.content
    assert (block.text, answer.stop_reason, answer.stop_sequence) == ("a", "stop_sequence", ";")


def test_batches_are_not_served():
    with (
        serve() as endpoint,
        talk(endpoint, MESSAGES) as (_, client),
        pytest.raises(anthropic.NotFoundError, match="POST /v1/messages/batches"),
    ):
        client.messages.batches.create(requests=[])


def test_a_response_format_is_described_in_the_prompt():
    forms: list[dict[str, Any]] = [
        {"output_config": {"effort": "low", "format": {"type": "json_schema", "schema": {"title": "Verdict"}}}},
        {"tools": TOOLS, "tool_choice": {"type": "any", "disable_parallel_tool_use": True}},
        {"tools": TOOLS, "tool_choice": {"type": "tool", "name": "add"}},
        {"tools": TOOLS, "tool_choice": {"type": "none"}},
    ]
    with serve() as endpoint, talk(endpoint, MESSAGES) as (run, client):
        for form in forms:
            client.messages.create(**ASK, **form)
    schema, some, named, none = prompts_of(run)
    assert 'satisfies this JSON schema:\n{"title": "Verdict"}' in schema
    assert "Answer by calling a function.\nCall at most one function in an answer." in some
    assert "Answer by calling the function add." in named
    assert none == "user\nhi\nassistant\n"


def test_what_goes_to_its_origin_keeps_its_key_and_version(server: RecordingServer):
    headers = {
        "lightning-origin": f"{server.url}/v1/messages",
        "lightning-origin-authorization": "x-api-key sk-own",
        "anthropic-version": "2023-06-01",
    }
    with (
        serve() as endpoint,
        talk(endpoint, MESSAGES, agent="critic") as (run, client),
        pytest.raises(anthropic.InternalServerError, match="returned 0 complete responses; expected 1"),
    ):
        client.messages.create(**ASK, extra_headers=sign_origin(run.secret, run.rollout, headers))
    (noted,) = server.requests
    assert noted.body == ASK
    assert noted.headers["x-api-key"] == "sk-own"
    assert noted.headers["anthropic-version"] == "2023-06-01"
    assert "authorization" not in noted.headers
    assert run.trace.calls[0].error is not None


@pytest.mark.parametrize("arguments", [5, [1], None])
def test_the_input_of_a_call_is_an_object(arguments: Any):
    call = {"type": "tool_use", "id": "c", "name": "f", "input": arguments}
    result = {"type": "tool_result", "tool_use_id": "c", "content": "x"}
    messages = [*HI, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    with serve() as endpoint, client_in_rollout(endpoint) as (_, client):
        answer = client.post("/messages", json={"model": "policy", "max_tokens": 5, "messages": messages})
        assert answer.status_code == 400
        assert 'messages.1.content.0 is {"type": "tool_use"' in answer.json()["error"]["message"]
        call["input"] = {}
        sent = {"model": "policy", "max_tokens": 5, "messages": messages}
        assert client.post("/messages", json=sent).status_code == 200
        answer = client.post("/messages", json={**sent, "stop_sequences": "x"})
        assert answer.json()["error"]["message"].startswith("stop_sequences is 'x'; expected a list of strings")
