"""The text of a refusal: what was found, in JSON's words, what is expected, and what to do."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.endpoint.serving import HI, client_in_rollout, serve

CHAT = "/chat/completions"


def refusal(path: str, body: Any, status: int = 400, **options: Any) -> str:
    """The message of the error that ``body`` gets at ``path``."""
    with serve(**options) as endpoint, client_in_rollout(endpoint) as (_, client):
        answer = client.post(path, content=json.dumps(body))
    assert answer.status_code == status, answer.text
    return answer.json()["error"]["message"]


@pytest.mark.parametrize("model", [{}, {"model": None}, {"model": ""}])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": HI}),
        ("/completions", {"prompt": "hi"}),
        ("/responses", {"input": "hi"}),
        ("/responses/input_tokens", {"input": "hi"}),
        ("/messages", {"messages": HI, "max_tokens": 1}),
        ("/messages/count_tokens", {"messages": HI}),
    ],
)
def test_a_request_without_a_model_is_invalid(path: str, body: dict[str, Any], model: dict[str, Any]):
    said = refusal(path, {**body, **model})
    assert "model is missing; expected the name of a model: the models are ['policy', 'base']" in said


def of_model(name: str, value: Any) -> dict[str, Any]:
    return {"model": "base", "messages": HI, name: value}


@pytest.mark.parametrize(
    ("body", "found"),
    [
        (None, "the request body is null; expected an object"),
        ([], "the request body is a list; expected an object"),
        (of_model("model", True), "model is true; expected a string"),
        (of_model("messages", {"a": None}), 'messages is {"a": null}; expected a list'),
        (of_model("messages", [{"role": None}]), "messages.0.role is null; expected one of ['"),
        (of_model("stop", [None, "é\x7f"]), 'stop is [null, "é\\x7f"]; expected a list of strings'),
        (of_model("stop", ["a", ""]), "stop is ['a', '']; expected non-empty strings"),
        (of_model("tools", [{"type": None}]), 'tools.0 is {"type": null}; expected a function'),
    ],
)
def test_values_are_shown_in_the_words_of_json(body: Any, found: str):
    assert found in refusal(CHAT, body)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("seed", 10**400),
        ("temperature", "x" * 9000),
        ("messages", {"x": "y" * 9000}),
        ("stop", ["x" * 9000, 1]),
        ("stop", ["x" * 900, ""]),
        ("tool_choice", {"type": "function", "function": {"name": "f" * 9000}}),
        ("tools", [{"type": "f" * 9000}]),
    ],
)
def test_long_values_are_shortened(name: str, value: Any):
    said = refusal(CHAT, of_model(name, value))
    assert "…" in said
    assert len(said) < 450


@pytest.mark.parametrize(
    ("path", "body", "where"),
    [
        (CHAT, of_model("tools", [{"type": "function", "function": {"name": "f", "parameters": []}}]), "function.parameters"),
        ("/responses", {"model": "base", "input": "hi", "tools": [{"type": "function", "name": "f", "parameters": []}]}, "parameters"),
        ("/messages", {**of_model("tools", [{"name": "f", "input_schema": []}]), "max_tokens": 1}, "input_schema"),
        (
            "/models/base:generateContent",
            {"contents": [{"parts": [{"text": "hi"}]}], "tools": [{"functionDeclarations": [{"name": "f", "parameters": []}]}]},
            "functionDeclarations.0.parameters",
        ),
    ],
)  # fmt: skip
def test_parameters_that_are_not_a_schema_are_named_by_their_path(path: str, body: Any, where: str):
    assert f"tools.0.{where} is []; expected an object" in refusal(path, body)


def test_a_thought_is_a_boolean():
    contents = [{"role": "model", "parts": [{"text": "hm", "thought": "x"}]}, {"parts": [{"text": "hi"}]}]
    said = refusal("/models/base:generateContent", {"contents": contents})
    assert said == "contents.0.parts.0.thought is 'x'; expected true or false"


@pytest.mark.parametrize("order", [5, "ab", [["a"]]])
def test_an_order_of_properties_that_is_no_list_of_names_is_refused(order: Any):
    schema = {"type": "OBJECT", "properties": {"a": {"type": "STRING", "format": ["x"]}}, "propertyOrdering": order}
    settings = {"responseMimeType": "application/json", "responseSchema": schema}
    body = {"contents": [{"parts": [{"text": "hi"}]}], "generationConfig": settings}
    assert "propertyOrdering of a schema is " in refusal("/models/base:generateContent", body)
