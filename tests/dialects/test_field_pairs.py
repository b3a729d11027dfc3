"""Every pair of request fields: both have their effect, or they have the joint meaning of a table, or the refusal names both.

The model has no weights: it samples any tokens that the request's constraint allows, and else what its prompt requires.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from types import ModuleType
from typing import Any, cast

import httpx
import pytest

from lightning_core.backends.backend import SamplingParams
from lightning_core.dialects import (
    anthropic_messages,
    gemini,
    openai_chat,
    openai_responses,
)
from lightning_core.dialects.dialect import Dialect
from lightning_core.dialects.exchange import UpstreamResponse
from lightning_core.endpoint.server import PolicyEndpoint
from tests.chat.chat_families import FAMILIES
from tests.chat.grammar_walk import WalkBackend
from tests.endpoint.serving import HI, client_in_rollout

QWEN = next(family for family in FAMILIES if family.name == "qwen2_5")
STOP = "points"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"verdict": {"enum": ["right", "wrong"]}, STOP: {"type": "integer", "minimum": 1, "maximum": 3}},
    "required": ["verdict", STOP],
    "additionalProperties": False,
}
PARAMETERS = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}


def script(prompt: str) -> str:
    """Text, where nothing is constrained."""
    return f"some {STOP} here<|im_end|>"


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The answer to one request."""

    http: httpx.Response
    responses: Sequence[UpstreamResponse]
    prompts: Sequence[str]
    params: Sequence[SamplingParams]

    @property
    def calls(self) -> list[list[str]]:
        """The names of the functions that each response calls."""
        return [[call["function"]["name"] for call in r.message.get("tool_calls") or ()] for r in self.responses]

    def shows(self, *names: str) -> bool:
        """Whether the prompts list exactly these tools."""
        return all((f'"{name}"' in prompt) == (name in names) for prompt in self.prompts for name in ("add", "sub"))

    @property
    def documents(self) -> list[dict[str, Any]]:
        """The complete responses without calls."""
        whole = [r for r in self.responses if not r.message.get("tool_calls") and r.finish_reason != "length"]
        return [json.loads(r.message["content"]) for r in whole]


EFFECTS: dict[str, Callable[[Answer], bool]] = {
    "none": lambda a: True,
    "shows both": lambda a: a.shows("add", "sub"),
    "shows sub": lambda a: a.shows("sub"),
    "shows nothing": lambda a: a.shows() and not any(a.calls),
    "calls": lambda a: all(a.calls),
    "calls sub": lambda a: {name for calls in a.calls for name in calls} <= {"sub"},
    "one call": lambda a: (
        all(len(calls) < 2 for calls in a.calls) and all("at most one function" in p for p in a.prompts)
    ),
    "document": lambda a: all(d.keys() == {"verdict", STOP} for d in a.documents),
    "object": lambda a: all(isinstance(d, dict) for d in a.documents),
    "calls constrained": lambda a: all(p.grammar is not None for p in a.params),
    "constrained": lambda a: all(p.constraint is not None for p in a.params),
    "cut": lambda a: not any(STOP in (r.message.get("content") or "") for r in a.responses),
    "at most 300": lambda a: {p.max_tokens for p in a.params} == {300},
    "two": lambda a: len(a.responses) == 2,
    "temperature": lambda a: {p.temperature for p in a.params} == {0.5},
    "top_p": lambda a: {p.top_p for p in a.params} == {0.9},
    "seed": lambda a: a.params[0].seed == 7 and len({p.seed for p in a.params}) == len(a.params),
    "streamed": lambda a: a.http.headers["content-type"].startswith("text/event-stream"),
    "counted": lambda a: a.responses[0].output_tokens is not None,
    "logprobs": lambda a: '"logprob"' in a.http.text or any(a.calls),
    "token ids": lambda a: '"token_ids"' in a.http.text,
    "system": lambda a: all("Be brief." in p for p in a.prompts),
    "continued": lambda a: all("an earlier question" in p for p in a.prompts),
}


@dataclass(frozen=True)
class Setting:
    """A value of the field ``name``, and its effects."""

    name: str
    body: Mapping[str, Any]
    effects: tuple[str, ...] = ("none",)


def function(name: str) -> dict[str, Any]:
    return {"name": name, "parameters": PARAMETERS}


CHAT_TOOLS = {"tools": [{"type": "function", "function": function(name)} for name in ("add", "sub")]}
CHAT_SUB = {"type": "function", "function": {"name": "sub"}}
RESPONSES_TOOLS = {"tools": [{"type": "function", **function(name)} for name in ("add", "sub")]}
RESPONSES_SUB = {"type": "function", "name": "sub"}
MESSAGES_TOOLS = {"tools": [{"name": name, "input_schema": PARAMETERS} for name in ("add", "sub")]}
GEMINI_TOOLS = {
    "tools": [{"functionDeclarations": [{"name": n, "parametersJsonSchema": PARAMETERS} for n in ("add", "sub")]}]
}

NONE, REQUIRED, NAMED, ALLOWED = (
    ("shows nothing",),
    ("shows both", "calls", "calls constrained"),
    ("shows both", "calls", "calls sub", "calls constrained"),
    ("shows sub", "calls sub"),
)


def gemini_choice(effects: tuple[str, ...], **choice: Any) -> Setting:
    return Setting(
        "toolConfig.functionCallingConfig", {**GEMINI_TOOLS, "toolConfig": {"functionCallingConfig": choice}}, effects
    )


def generation(name: str, value: Any, *effects: str, **more: Any) -> Setting:
    return Setting(f"generationConfig.{name}", {"generationConfig": {name: value, **more}}, effects or ("none",))


JSON = {"responseMimeType": "application/json"}
SETTINGS: dict[Dialect, list[Setting]] = {
    openai_chat: [
        Setting("enable_thinking", {"enable_thinking": False}),
        Setting("thinking.type", {"thinking": {"type": "disabled"}}),
        Setting("tools", CHAT_TOOLS, ("shows both",)),
        Setting("tool_choice", {**CHAT_TOOLS, "tool_choice": "none"}, NONE),
        Setting("tool_choice", {**CHAT_TOOLS, "tool_choice": "auto"}, ("shows both",)),
        Setting("tool_choice", {**CHAT_TOOLS, "tool_choice": "required"}, REQUIRED),
        Setting("tool_choice", {**CHAT_TOOLS, "tool_choice": CHAT_SUB}, NAMED),
        *(
            Setting(
                "tool_choice",
                {
                    **CHAT_TOOLS,
                    "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [CHAT_SUB]}},
                },
                effects,
            )
            for mode, effects in (("auto", ALLOWED), ("required", (*ALLOWED, "calls")))
        ),
        Setting(
            "parallel_tool_calls",
            {**CHAT_TOOLS, "parallel_tool_calls": False},
            ("shows both", "one call", "calls constrained"),
        ),
        Setting("temperature", {"temperature": 0.5}, ("temperature",)),
        Setting("top_p", {"top_p": 0.9}, ("top_p",)),
        Setting("max_tokens", {"max_tokens": 300}, ("at most 300",)),
        Setting("max_completion_tokens", {"max_completion_tokens": 300}, ("at most 300",)),
        Setting("n", {"n": 2}, ("two",)),
        Setting("stop", {"stop": STOP}, ("cut",)),
        Setting("stream", {"stream": True}, ("streamed",)),
        Setting(
            "stream_options.include_usage",
            {"stream": True, "stream_options": {"include_usage": True}},
            ("streamed", "counted"),
        ),
        Setting("seed", {"seed": 7}, ("seed",)),
        Setting("logprobs", {"logprobs": True}, ("logprobs",)),
        Setting("return_token_ids", {"return_token_ids": True}, ("token ids",)),
        Setting(
            "response_format",
            {"response_format": {"type": "json_schema", "json_schema": {"name": "v", "schema": SCHEMA}}},
            ("constrained", "document"),
        ),
        Setting("response_format", {"response_format": {"type": "json_object"}}, ("constrained", "object")),
        Setting("chat_template_kwargs", {"chat_template_kwargs": {"reasoning_effort": "low"}}),
        Setting("reasoning_effort", {"reasoning_effort": "low"}),
    ],
    openai_responses: [
        Setting("instructions", {"instructions": "Be brief."}, ("system",)),
        Setting("previous_response_id", {"previous_response_id": "EARLIER"}, ("continued",)),
        Setting("tools", RESPONSES_TOOLS, ("shows both",)),
        Setting("tool_choice", {**RESPONSES_TOOLS, "tool_choice": "none"}, NONE),
        Setting("tool_choice", {**RESPONSES_TOOLS, "tool_choice": "required"}, REQUIRED),
        Setting("tool_choice", {**RESPONSES_TOOLS, "tool_choice": RESPONSES_SUB}, NAMED),
        *(
            Setting(
                "tool_choice",
                {**RESPONSES_TOOLS, "tool_choice": {"type": "allowed_tools", "mode": mode, "tools": [RESPONSES_SUB]}},
                effects,
            )
            for mode, effects in (("auto", ALLOWED), ("required", (*ALLOWED, "calls")))
        ),
        Setting(
            "parallel_tool_calls",
            {**RESPONSES_TOOLS, "parallel_tool_calls": False},
            ("shows both", "one call", "calls constrained"),
        ),
        Setting(
            "text.format",
            {"text": {"format": {"type": "json_schema", "name": "v", "schema": SCHEMA}}},
            ("constrained", "document"),
        ),
        Setting("temperature", {"temperature": 0.5}, ("temperature",)),
        Setting("top_p", {"top_p": 0.9}, ("top_p",)),
        Setting("max_output_tokens", {"max_output_tokens": 300}, ("at most 300",)),
        Setting("stream", {"stream": True}, ("streamed",)),
        Setting("include", {"include": ["message.output_text.logprobs"]}, ("logprobs",)),
        Setting("reasoning.effort", {"reasoning": {"effort": "low"}}),
    ],
    anthropic_messages: [
        Setting("thinking.type", {"thinking": {"type": "disabled"}}),
        Setting("system", {"system": "Be brief."}, ("system",)),
        Setting("tools", MESSAGES_TOOLS, ("shows both",)),
        Setting(
            "tool_choice", {**MESSAGES_TOOLS, "tool_choice": {"type": "none", "disable_parallel_tool_use": True}}, NONE
        ),
        Setting(
            "tool_choice",
            {**MESSAGES_TOOLS, "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
            ("shows both", "one call", "calls constrained"),
        ),
        Setting("tool_choice", {**MESSAGES_TOOLS, "tool_choice": {"type": "any"}}, REQUIRED),
        Setting(
            "tool_choice",
            {**MESSAGES_TOOLS, "tool_choice": {"type": "tool", "name": "sub", "disable_parallel_tool_use": True}},
            (*NAMED, "one call"),
        ),
        Setting("temperature", {"temperature": 0.5}, ("temperature",)),
        Setting("top_p", {"top_p": 0.9}, ("top_p",)),
        Setting("stop_sequences", {"stop_sequences": [STOP]}, ("cut",)),
        Setting("stream", {"stream": True}, ("streamed",)),
        Setting("max_tokens", {"max_tokens": 300}, ("at most 300",)),
        Setting("output_config.effort", {"output_config": {"effort": "low"}}),
        Setting(
            "output_config.format",
            {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
            ("constrained", "document"),
        ),
    ],
    cast("Dialect", gemini): [
        Setting("systemInstruction", {"systemInstruction": {"parts": [{"text": "Be brief."}]}}, ("system",)),
        Setting("tools", GEMINI_TOOLS, ("shows both",)),
        gemini_choice(NONE, mode="NONE"),
        gemini_choice(REQUIRED, mode="ANY"),
        gemini_choice(NAMED, mode="ANY", allowedFunctionNames=["sub"]),
        gemini_choice(ALLOWED, mode="VALIDATED", allowedFunctionNames=["sub"]),
        generation("temperature", 0.5, "temperature"),
        generation("topP", 0.9, "top_p"),
        generation("maxOutputTokens", 300, "at most 300"),
        generation("stopSequences", [STOP], "cut"),
        generation("candidateCount", 2, "two"),
        generation("seed", 7, "seed"),
        generation("responseMimeType", "application/json", "constrained"),
        generation("responseSchema", SCHEMA, "constrained", "document", **JSON),
        generation("responseJsonSchema", SCHEMA, "constrained", "document", **JSON),
        generation("thinkingConfig", {"includeThoughts": True}),
        Setting("stream", {"stream": True}, ("streamed",)),
    ],
}
"""Values of every supported field, each with what it needs to be accepted."""

NARROWED = {"shows nothing": {"shows both", "one call", "calls constrained"}, "shows sub": {"shows both"}}
"""The effects that a choice of tools replaces."""
REFUSED = [
    {"generationConfig.responseSchema", "generationConfig.responseJsonSchema"},
]
"""Pairs without a joint meaning."""
UNEQUAL: list[tuple[Dialect, dict[str, Any], tuple[str, str]]] = [
    (openai_chat, {"max_tokens": 3, "max_completion_tokens": 4}, ("max_tokens", "max_completion_tokens")),
    (
        cast("Dialect", gemini),
        {"generationConfig": {"responseSchema": SCHEMA, "responseMimeType": "text/plain"}},
        ("generationConfig.responseSchema", "generationConfig.responseMimeType"),
    ),
    (openai_chat, {"tool_choice": "required", "response_format": {"type": "json_object"}}, ("tool_choice", "tools")),
    (
        openai_responses,
        {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [RESPONSES_SUB]}},
        ("tool_choice", "tools"),
    ),
]
"""Values that contradict each other."""
LEAST: dict[Dialect, dict[str, Any]] = {
    openai_chat: {"model": "base", "messages": HI},
    openai_responses: {"model": "base", "input": "hi"},
    anthropic_messages: {"model": "base", "messages": HI, "max_tokens": 500},
    cast("Dialect", gemini): {"contents": [{"role": "user", "parts": [{"text": "hi"}]}]},
}


def joint_effects(a: Setting, b: Setting) -> set[str]:
    effects = {*a.effects, *b.effects}
    for narrower, replaced in NARROWED.items():
        if narrower in effects:
            effects -= replaced
    # A stop string ends a document too, wherever it appears.
    return effects - {"document", "object"} if "cut" in effects else effects


def merged(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    both = {key: merged(one[key], other[key]) for key in one.keys() & other.keys() if isinstance(one[key], Mapping)}
    return {**one, **other, **both}


@pytest.fixture(scope="module")
def backend() -> WalkBackend:
    return WalkBackend(QWEN, script)


@pytest.fixture(scope="module")
def endpoint(backend: WalkBackend) -> Iterator[PolicyEndpoint]:
    with PolicyEndpoint(backend, backend.walker.chat) as endpoint:
        yield endpoint


def post(client: httpx.Client, wire: Dialect, body: Mapping[str, Any]) -> httpx.Response:
    if wire is not cast("Dialect", gemini):
        return client.post(wire.PATH, json=body)
    method = "streamGenerateContent?alt=sse" if body.get("stream") else "generateContent"
    return client.post(f"/models/base:{method}", json={k: v for k, v in body.items() if k != "stream"})


def read(wire: Dialect, http: httpx.Response, *, stream: bool) -> Sequence[UpstreamResponse]:
    if not stream:
        return wire.read_response(http.json())
    reader = wire.stream_reader()
    for line in http.text.splitlines():
        if line.startswith("data: {"):
            reader.read(json.loads(line.removeprefix("data: ")))
    return reader.responses()


def test_every_supported_field_has_a_setting() -> None:
    for wire, settings in SETTINGS.items():
        assert wire.FIELDS.supported - {s.name for s in settings} <= {"model", "messages", "input", "contents"}


@pytest.mark.parametrize("wire", SETTINGS, ids=lambda wire: cast("ModuleType", wire).__name__.rpartition(".")[2])
def test_two_fields_have_both_effects_or_are_refused_by_name(
    endpoint: PolicyEndpoint, backend: WalkBackend, wire: Dialect
) -> None:
    wrong: list[str] = []
    with client_in_rollout(endpoint) as (_, client):
        earlier = "EARLIER"
        if wire is openai_responses:
            earlier = post(client, wire, {"model": "base", "input": "an earlier question"}).json()["id"]
        for a, b in combinations(SETTINGS[wire], 2):
            if a.name == b.name:
                continue
            body = {**LEAST[wire], **merged(a.body, b.body)}
            if "previous_response_id" in body:
                body["previous_response_id"] = earlier
            before = len(backend.sampled)
            http = post(client, wire, body)
            pair = f"{a.body} with {b.body}"
            if {a.name, b.name} in REFUSED:
                if http.status_code != 400 or not all(name in http.text for name in (a.name, b.name)):
                    wrong.append(f"{pair}: not refused by name: {http.text}")
                continue
            if http.status_code != 200:
                wrong.append(f"{pair}: {http.text}")
                continue
            sampled = backend.sampled[before:]
            responses = read(wire, http, stream=body.get("stream") is True)
            answer = Answer(
                http=http, responses=responses, prompts=[p for p, _ in sampled], params=[p for _, p in sampled]
            )
            wrong += [
                f"{pair}: not {effect!r}: {responses}" for effect in joint_effects(a, b) if not EFFECTS[effect](answer)
            ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(("wire", "body", "names"), UNEQUAL, ids=lambda v: str(v[0]) if isinstance(v, tuple) else "")
def test_values_that_contradict_each_other_are_refused_with_both_names(
    endpoint: PolicyEndpoint, wire: Dialect, body: dict[str, Any], names: tuple[str, str]
) -> None:
    with client_in_rollout(endpoint) as (_, client):
        http = post(client, wire, {**LEAST[wire], **body})
    assert http.status_code == 400
    assert all(name in http.json()["error"]["message"] for name in names)


def test_calls_that_cannot_be_constrained_are_an_instruction_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    """Calls of Llama begin like any JSON, so text without a call has no grammar."""
    family = next(family for family in FAMILIES if family.format == "llama")
    backend = WalkBackend(family, lambda prompt: f"text{family.eos}")
    with PolicyEndpoint(backend, backend.walker.chat) as endpoint, client_in_rollout(endpoint) as (_, client):
        for tool_choice, constrained in (("auto", False), ("required", True)):
            asked = {**LEAST[openai_chat], **CHAT_TOOLS, "parallel_tool_calls": False, "tool_choice": tool_choice}
            assert post(client, openai_chat, {**asked, "max_tokens": 20}).status_code == 200
            assert (backend.sampled[-1][1].grammar is not None) == constrained
    assert (
        "a request requires at most one call, which is only an instruction in its prompt here: its tool calls"
        in caplog.text
    )
