"""The requests of Google's Gemini API over plain HTTP: paths, keys, settings and refusals."""

from __future__ import annotations

import json
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from google.genai import types
from jsonschema import ValidationError, validate

from lightning_core.dialects import gemini
from lightning_core.dialects.gemini_contents import to_parts
from tests.dialects.test_fields import Spy
from tests.dialects.test_gemini import ADD, BASE, HI, Person
from tests.endpoint.serving import client_in_rollout, serve, serve_backend

POINT = {"type": "OBJECT", "properties": {"x": {"type": "NUMBER", "format": "float"}}}


def test_json_schemas_constrain_the_answer():
    backend = Spy()
    with client_of(backend) as client:
        for config in (
            {"responseMimeType": "application/json"},
            {"responseMimeType": "application/json", "responseJsonSchema": Person.model_json_schema()},
            {
                "response_mime_type": "application/json",
                "response_schema": {
                    "type": "OBJECT",
                    "propertyOrdering": ["age", "name"],
                    "properties": {
                        "name": {"type": "STRING", "maxLength": "9"},
                        "age": {"type": "INTEGER", "nullable": True, "format": "int32"},
                        "size": {"type": "INTEGER", "enum": ["1", "2"]},
                        "mood": {"type": "STRING", "format": "enum", "enum": ["good"], "nullable": True},
                        "born": {"anyOf": [{"type": "STRING", "format": "date"}, POINT], "nullable": True},
                        "path": {"type": "ARRAY", "items": POINT},
                        "more": {"type": "OBJECT", "properties": {}, "additionalProperties": True},
                    },
                    "required": ["name"],
                },
            },
        ):
            assert client.post(BASE, json={**HI, "generation_config": config}).status_code == 200
    anything, person, google = (json.loads(params.json_schema or "null") for params in backend.sampling)
    assert anything == {"type": "object"}
    assert person == Person.model_json_schema()
    point = {"type": "object", "properties": {"x": {"type": "number"}}, "additionalProperties": False}
    assert google == {
        "type": "object",
        "properties": {
            "age": {"type": ["integer", "null"]},
            "name": {"type": "string", "maxLength": 9},
            "size": {"type": "integer", "enum": [1, 2]},
            "mood": {"type": ["string", "null"], "enum": ["good", None]},
            "born": {"anyOf": [{"type": "string", "format": "date"}, point, {"type": "null"}]},
            "path": {"type": "array", "items": point},
            "more": {"type": "object", "properties": {}, "additionalProperties": True},
        },
        "required": ["name"],
        "additionalProperties": False,
    }
    assert list(google["properties"])[:2] == ["age", "name"]
    validate({"name": "x", "born": None, "path": [{"x": 1}]}, google)
    with pytest.raises(ValidationError, match="Additional properties"):
        validate({"name": "x", "height": 3}, google)


@contextmanager
def client_of(backend: Any) -> Generator[httpx.Client]:
    with serve_backend(backend) as endpoint, client_in_rollout(endpoint, seed=1) as (_, client):
        yield client


def test_settings_reach_the_backend():
    backend = Spy()
    settings = {
        "temperature": 0,
        "topP": 0.5,
        "maxOutputTokens": 5,
        "seed": 7,
        "candidateCount": 2,
        "stopSequences": [";"],
    }
    with client_of(backend) as client:
        answer = client.post(BASE, json={**HI, "generationConfig": settings}).json()
    first, second = backend.sampling
    assert (first.temperature, first.top_p, first.max_tokens, first.seed) == (0.0, 0.5, 5, 7)
    assert second.seed == 8
    assert [c["content"]["parts"] for c in answer["candidates"]] == [[{"text": "one"}]] * 2
    assert [c["index"] for c in answer["candidates"]] == [0, 1]


PATHS = [
    "/v1beta/models/base",
    "/v1/models/base",
    "/v1alpha/models/base",
    "/v1/projects/p/locations/global/publishers/google/models/base",
    "/v1beta1/publishers/google/models/base",
]


@pytest.mark.parametrize("path", PATHS)
def test_the_paths_of_both_clouds_and_the_three_ways_to_send_a_key(path: str):
    with serve() as endpoint, client_in_rollout(endpoint) as (run, client):
        root, key = endpoint.url.removesuffix("/v1"), str(client.headers["authorization"]).removeprefix("Bearer ")
        for query, headers in (
            ("", {"x-goog-api-key": key}),
            (f"?key={key}", {}),
            ("", {"authorization": f"Bearer {key}"}),
        ):
            answer = httpx.post(f"{root}{path}:generateContent{query}", json=HI, headers=headers)
            assert answer.json()["candidates"][0]["content"] == {"role": "model", "parts": [{"text": "hello"}]}
            events = httpx.post(f"{root}{path}:streamGenerateContent{query or '?'}&alt=sse", json=HI, headers=headers)
            assert events.headers["content-type"].startswith("text/event-stream")
            chunks = [json.loads(line[6:]) for line in events.text.splitlines() if line.startswith("data: ")]
            array = httpx.post(f"{root}{path}:streamGenerateContent{query}", json=HI, headers=headers).json()
            for found in (chunks, array):
                text = "".join(part["text"] for chunk in found for part in chunk["candidates"][0]["content"]["parts"])
                assert text == "hello"
    assert [call.model for call in run.trace.calls] == ["base"] * 9
    assert not any(key in str(value) for span in run.spans for value in span.attributes.values())


def test_a_key_in_the_url_is_not_in_errors_logs_or_spans(caplog: pytest.LogCaptureFixture):
    with serve() as endpoint, client_in_rollout(endpoint) as (run, client):
        key = str(client.headers["authorization"]).removeprefix("Bearer ")
        for path in ("/models/m:generateContent", "/models/base:predict", "/models/base:generateContent"):
            answer = httpx.post(f"{endpoint.url}{path}?key={key}", json={**HI, "cachedContent": 1})
            assert answer.status_code in (400, 404)
            assert key not in answer.text
        wrong = httpx.post(f"{endpoint.url}{BASE}?key=lr-guess", json=HI)
        assert (wrong.status_code, wrong.json()["error"]["status"]) == (401, "UNAUTHENTICATED")
        assert "lr-guess" not in wrong.text
    assert len(run.trace.calls) == 3
    assert not any(key in str(span) for span in run.spans)
    assert key not in caplog.text


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"contents": []}, "contents"),
    ({"contents": [{"role": "wizard", "parts": []}]}, "contents.0.role"),
    ({"contents": [{"parts": [{"inlineData": {"mimeType": "image/png", "data": ""}}]}]}, "contents.0.parts.0.inlineData"),
    ({"contents": [{"parts": [{"file_data": {"fileUri": "gs://x"}}]}]}, "contents.0.parts.0.fileData"),
    ({"contents": [{"parts": [{"functionResponse": {"name": "add", "response": {}}}]}]}, "functionResponse.name"),
    ({"contents": [{"parts": [{"functionResponse": {"name": "f", "id": "x"}}]}]}, "functionResponse.id"),
    ({"contents": [{"parts": "hi"}]}, "contents.0.parts"),
    ({"contents": [{"parts": [{"text": 5}]}]}, "contents.0.parts.0"),
    ({"contents": [{"role": "model", "parts": [{"text": "I"}]}]}, "cannot be continued"),
    ({"systemInstruction": "be kind"}, "systemInstruction"),
    ({"tools": [{"googleSearch": {}}]}, "tools"),
    ({"tools": [{"functionDeclarations": [{"description": "no name"}]}]}, "tools.0"),
    ({"tools": [{"functionDeclarations": [ADD, ADD]}]}, "two tools with the name"),
    ({"tools": [{"functionDeclarations": [{**ADD, "parametersJsonSchema": {}}]}]}, "parametersJsonSchema"),
    ({"toolConfig": {"functionCallingConfig": {"mode": "SOMETIMES"}}}, "functionCallingConfig.mode"),
    ({"toolConfig": {"functionCallingConfig": {"mode": "ANY"}}}, "tool_choice"),
    ({"toolConfig": {"functionCallingConfig": {"allowedFunctionNames": ["f"]}}}, "allowedFunctionNames"),
    ({"generationConfig": {"temperature": "hot"}}, "generationConfig.temperature"),
    ({"generationConfig": {"maxOutputTokens": 0}}, "generationConfig.maxOutputTokens"),
    ({"generationConfig": {"candidateCount": 0}}, "generationConfig.candidateCount"),
    ({"generationConfig": {"responseMimeType": "text/x.enum"}}, "generationConfig.responseMimeType"),
    ({"generationConfig": {"responseSchema": {}}}, "generationConfig.responseSchema"),
    ({"generationConfig": {"thinkingConfig": {"includeThoughts": 1}}}, "includeThoughts"),
    ({"generationConfig": 5}, "generationConfig"),
]  # fmt: skip


@pytest.mark.parametrize(("wrong", "name"), [*REFUSED, *(
    ({outer: {inner: "asked for"} if inner else "asked for"}, f"{name}")
    for name in gemini.FIELDS.refused for outer, _, inner in (name.partition("."),)
)])  # fmt: skip
def test_a_refusal_names_the_field(wrong: dict[str, Any], name: str):
    with serve() as endpoint, client_in_rollout(endpoint) as (run, client):
        answer = client.post(BASE, json={**HI, **wrong})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["code"], error["status"]) == (400, "INVALID_ARGUMENT")
    assert name in error["message"]
    assert all(failure.startswith("HostedToolError: ") for failure in run.infrastructure)
    assert [call.refused for call in run.trace.calls] == [error["message"]]


def test_reasoning_is_returned_if_the_request_includes_thoughts():
    message = {"role": "assistant", "content": "4", "reasoning_content": "2 + 2"}
    assert to_parts(message, thoughts=True) == [{"text": "2 + 2", "thought": True}, {"text": "4"}]
    assert to_parts(message, thoughts=False) == [{"text": "4"}]


def test_every_field_that_the_client_can_send_is_in_the_tables():
    """Fails if a new client has a field that is in no table."""

    def names(kind: Any) -> set[str]:
        return {field.alias or name for name, field in kind.model_fields.items()}

    def table(fields: Any) -> set[str]:
        return fields.supported | fields.ignored | fields.dropped.keys() | fields.refused.keys()

    config = {name.partition(".")[2] for name in table(gemini.FIELDS) if name.startswith("generationConfig.")}
    whole = table(gemini.FIELDS) - {f"generationConfig.{name}" for name in config}
    top = {name.partition(".")[0] for name in whole}
    # Options of the client itself, and one that has another name in the request.
    local = {
        "httpOptions",
        "shouldReturnHttpResponse",
        "automaticContinuation",
        "automaticFunctionCalling",
        "generationOutputConfig",
    }
    assert names(types.GenerateContentConfig) - config - top - local == set()
    assert names(types.GenerationConfig) - config == set()
    for fields, kind in (
        (gemini.NESTED["contents.N"], types.Content),
        (gemini.NESTED["tools.N"], types.Tool),
        (gemini.NESTED["tools.N.functionDeclarations.N"], types.FunctionDeclaration),
        (gemini.NESTED["toolConfig.functionCallingConfig"], types.FunctionCallingConfig),
        (gemini.NESTED["generationConfig.thinkingConfig"], types.ThinkingConfig),
    ):
        assert names(kind) == table(fields), kind
    part = gemini.NESTED["contents.N.parts.N"]
    assert names(types.Part) == {name.partition(".")[0] for name in table(part)}
    for outer, kind in (("functionCall", types.FunctionCall), ("functionResponse", types.FunctionResponse)):
        inner = {name.partition(".")[2] for name in table(part) if name.startswith(f"{outer}.")}
        assert names(kind) == inner


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            {"generationConfig": {"maxOutputTokens": 2, "max_output_tokens": 5}},
            "maxOutputTokens is 2, but max_output_tokens is 5; send one of them",
        ),
        (
            {"contents": [{"parts": [{"text": "a", "functionCall": {"name": "f"}}]}]},
            "text and functionCall; expected one",
        ),
        (
            {"contents": [{"role": "model", "parts": [{"functionCall": {"name": "f", "args": "x"}}]}, *HI["contents"]]},
            "contents.0.parts.0.functionCall.args is 'x'; expected an object",
        ),
        ({"generationConfig": {"stopSequences": "ab"}}, "stopSequences is 'ab'; expected a list of strings"),
    ],
)
def test_what_contradicts_itself_or_has_another_type_is_refused(body: dict[str, Any], message: str):
    with client_of(Spy()) as client:
        answer = client.post(BASE, json={**HI, **body})
        assert answer.status_code == 400
        assert message in answer.json()["error"]["message"]
        same = {"generationConfig": {"maxOutputTokens": 2, "max_output_tokens": 2}}
        assert client.post(BASE, json={**HI, **same}).status_code == 200
