"""What a conversation holds is never an error of the server: depth, halves of surrogate pairs, and ids of other types."""

from __future__ import annotations

import json
from typing import Any

import pytest

from lightning_core.chat.tool_calls.nesting import MOST_LEVELS
from tests.endpoint.serving import answered, client_in_rollout, serve

CHAT, RESPONSES, MESSAGES, GEMINI = (
    "/chat/completions",
    "/responses",
    "/messages",
    "/models/base:generateContent",
)


def nested(levels: int) -> str:
    return '{"a": ' * levels + "1" + "}" * levels


HALF = '{"a": "\\ud800", "\\udc00": 1}'
ODD = [
    HALF,
    nested(MOST_LEVELS),
    nested(MOST_LEVELS + 1),
    nested(500),
    nested(100_000),
    '{"a": NaN}',
    f'{{"a": {"9" * 5000}}}',
]


def chat_history(arguments: str) -> dict[str, Any]:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {
        "messages": [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": "r"},
        ],
    }


def responses_history(arguments: str) -> dict[str, Any]:
    return {
        "input": [
            {"role": "user", "content": "x"},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": arguments},
            {"type": "function_call_output", "call_id": "c", "output": "r"},
        ],
    }


def test_a_history_may_have_any_arguments():
    with serve() as endpoint, client_in_rollout(endpoint) as (run, client):
        for arguments in ODD:
            for path, write in ((CHAT, chat_history), (RESPONSES, responses_history)):
                reply = client.post(path, json={"model": "base", **write(arguments)})
                assert reply.status_code == 200, (path, arguments[:40], reply.text[:300])
    assert len(answered(run)) == 2 * len(ODD)
    assert run.infrastructure == []


@pytest.mark.parametrize("place", ["functionCall", "functionResponse"])
@pytest.mark.parametrize("odd", [{}, [], 5])
def test_an_id_of_another_type_is_refused_by_name(place: str, odd: Any):
    call: dict[str, Any] = {"name": "f", "args": {}, "id": "c"}
    result: dict[str, Any] = {"name": "f", "response": {}, "id": "c"}
    (call if place == "functionCall" else result)["id"] = odd
    body = {
        "contents": [
            {"role": "user", "parts": [{"text": "x"}]},
            {"role": "model", "parts": [{"functionCall": call}]},
            {"role": "user", "parts": [{"functionResponse": result}]},
        ]
    }
    with serve() as endpoint, client_in_rollout(endpoint) as (run, client):
        reply = client.post(GEMINI, json=body)
    assert reply.status_code == 400
    assert f"{place}.id is {odd!r}; expected a string" in reply.json()["error"]["message"]
    assert run.infrastructure == []


def test_a_refusal_that_quotes_a_long_value_is_short():
    with serve() as endpoint, client_in_rollout(endpoint) as (run, client):
        reply = client.post(
            CHAT, json={"model": "base", "messages": [{"role": "user", "content": {"a": "x" * 1_000_000}}]}
        )
    assert (reply.status_code, len(reply.content) < 1000) == (400, True)
    assert 'messages.0.content is {"a": "xxx' in reply.json()["error"]["message"]
    assert all(len(call.refused or "") <= 500 for call in run.trace.calls)


FUNCTION = {"name": "f", "description": "d"}
SCHEMA = {"type": "object", "properties": {}}
FIRST: dict[str, dict[str, Any]] = {
    CHAT: {
        "model": "base",
        "messages": [{"role": "user", "content": "x"}],
        "tools": [{"type": "function", "function": {**FUNCTION, "parameters": SCHEMA}}],
    },
    RESPONSES: {
        "model": "base",
        "input": [{"role": "user", "content": "x"}],
        "tools": [{"type": "function", **FUNCTION, "parameters": SCHEMA}],
    },
    MESSAGES: {
        "model": "base",
        "max_tokens": 20_000,
        "messages": [{"role": "user", "content": "x"}],
        "tools": [{**FUNCTION, "input_schema": SCHEMA}],
    },
    GEMINI: {
        "contents": [{"role": "user", "parts": [{"text": "x"}]}],
        "tools": [{"functionDeclarations": [FUNCTION]}],
    },
}


def echo(path: str, answer: dict[str, Any]) -> tuple[str, list[Any]]:
    """The field of the conversation, and what a client adds to it after ``answer``."""
    match path:
        case "/chat/completions":
            message = answer["choices"][0]["message"]
            results = [
                {"role": "tool", "tool_call_id": call["id"], "content": "r"} for call in message.get("tool_calls") or ()
            ]
            return "messages", [message, *results, {"role": "user", "content": "y"}]
        case "/responses":
            results = [
                {"type": "function_call_output", "call_id": item["call_id"], "output": "r"}
                for item in answer["output"]
                if item["type"] == "function_call"
            ]
            return "input", [*answer["output"], *results, {"role": "user", "content": "y"}]
        case "/messages":
            return "messages", [{"role": "assistant", "content": answer["content"]}, {"role": "user", "content": "y"}]
        case _:
            return "contents", [answer["candidates"][0]["content"], {"role": "user", "parts": [{"text": "y"}]}]


@pytest.mark.parametrize(
    "arguments",
    [
        HALF,
        nested(MOST_LEVELS),
        nested(MOST_LEVELS + 1),
        nested(500),
        json.dumps(nested(500)),
    ],
    ids=["half a character", "deep", "too deep", "far too deep", "text that is too deep"],
)
def test_what_the_model_sampled_can_be_sent_back(arguments: str):
    sampled = f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>'
    with serve(lambda prompt: sampled) as endpoint, client_in_rollout(endpoint) as (run, client):
        for path, body in FIRST.items():
            first = client.post(path, json=body)
            field, more = echo(path, first.json())
            second = client.post(path, json={**body, field: [*body[field], *more]})
            assert (first.status_code, second.status_code) == (200, 200), (path, second.text[:300])
    assert [call.context for call in answered(run)] == ["new", "clean"] * len(FIRST)
    assert run.infrastructure == []
