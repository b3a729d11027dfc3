"""The grammar of responses to requests with tools and a JSON schema, in the chat template of each model."""

from __future__ import annotations

import json
from functools import cache
from random import Random
from typing import Any

import pytest

from lightning_core.backends.backend import SamplingParams
from lightning_core.chat.chat import Chat
from lightning_core.chat.output_grammar import AllowedCalls
from lightning_core.errors import PolicyRequestError
from tests.chat.grammar_walk import Walker
from tests.chat.native_templates import FORMATS, family, folder

needs_wheel = pytest.mark.skipif(folder() is None, reason="needs trl's wheel: pip install --no-deps trl")
TEMPLATES = ("deepseek_v3_2", "kimi_k2", "llama4", "magistral", "minimax_m2", "similar to llama3_1", "similar to mistral_v7",
             "similar to phi4_mini", "similar to qwen2_5", "deepseekv3", "gemma4_v5", "glm4moe", "gptoss", "lfm2_v2",
             "qwen3", "qwen3_5_think")  # fmt: skip
"""One template for each format of calls and each way to begin reasoning."""
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "set_it",
            "parameters": {
                "type": "object",
                "properties": {
                    "text": {"type": "string"},
                    "count": {"type": "integer", "minimum": -3, "maximum": 30},
                    "kind": {"enum": ["a'b", 'say "c"']},
                    "sure": {"type": "boolean"},
                    "maybe": {"type": ["string", "null"]},
                    "nested": {
                        "type": "object",
                        "properties": {"a": {"$ref": "#/$defs/A"}},
                        "additionalProperties": False,
                    },
                    "items": {"type": "array", "items": {"enum": ["x", 1]}, "maxItems": 2},
                },
                "required": ["count"],
                "additionalProperties": False,
                "not": {"type": "null"},
                "$defs": {"A": {"enum": ["x", "y"]}},
            },
        },
    },
    {"type": "function", "function": {"name": "stop-it"}},
]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"verdict": {"enum": ["right", "wrong"]}, "call": {"type": "string"}},
    "required": ["verdict", "call"],
    "additionalProperties": False,
}


@cache
def walker(name: str) -> Walker:
    return Walker(family(name))


def opens_thought(chat: Chat) -> bool:
    around = chat.template.reasoning
    prompt = chat.template.render([{"role": "user", "content": "x"}], None, generate=True)
    return around is not None and prompt.rstrip().endswith(around[0])


def respond(name: str, count: int, *, most: int = 400, **calls: Any) -> list[dict[str, Any]]:
    """Responses that a model may sample, as the endpoint reads them, without those that did not end."""
    chat = walker(name).chat
    thinking = opens_thought(chat)
    settings: dict[str, Any] = {"tools": TOOLS, "required": False, "one": False, **calls}
    allowed = AllowedCalls(**settings)
    grammar = chat.output_grammar(SCHEMA, allowed, thinking=thinking)
    params = SamplingParams(max_tokens=most, stop_token_ids=chat.stop_token_ids, grammar=grammar)
    responses: list[dict[str, Any]] = []
    for seed in range(count):
        ids = walker(name).walk(params, Random(seed))
        if ids[-1] in chat.stop_token_ids:
            text = chat.text(ids)
            responses.append(chat.read(text, tools=True, thinking=thinking, declared=TOOLS, is_json=True))
    return responses


def check_call(call: dict[str, Any]) -> None:
    arguments = json.loads(call["function"]["arguments"])
    properties = TOOLS[0]["function"]["parameters"]["properties"]
    if call["function"]["name"] == "stop-it":
        assert arguments == {}
        return
    assert call["function"]["name"] == "set_it"
    assert -3 <= arguments["count"] <= 30
    assert arguments.keys() <= properties.keys()
    assert arguments.get("kind", "a'b") in properties["kind"]["enum"]
    assert isinstance(arguments.get("sure", True), bool)
    assert isinstance(arguments.get("maybe", ""), (str, type(None)))
    assert isinstance(arguments.get("nested", {}), dict)
    assert isinstance(arguments.get("items", []), list)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=needs_wheel if name in FORMATS else ()) for name in TEMPLATES]
)
def test_any_sampled_tokens_are_calls_or_an_answer_of_the_schema(name: str) -> None:
    called = 0
    for message in respond(name, 8):
        calls = message.get("tool_calls", [])
        called += bool(calls)
        if calls:
            assert not message["content"]
            for call in calls:
                check_call(call)
        else:
            assert json.loads(message["content"])["verdict"] in ("right", "wrong")
    assert called


@pytest.mark.parametrize("name", ["similar to qwen2_5", "similar to mistral_v7", "llama4"])
def test_a_required_tool_and_one_call_are_guaranteed(name: str) -> None:
    for message in respond(name, 4, tools=TOOLS[1:], required=True, one=True):
        (call,) = message["tool_calls"]
        assert call["function"]["name"] == "stop-it"


def test_a_typed_answer_with_the_text_of_a_call_is_an_answer() -> None:
    """Nothing in a document is a call, and only the names of tools make an object a call of Llama's."""
    chat = walker("similar to llama3_1").chat
    for name, is_call in (("stop-it", True), ("Ann", False)):
        text = json.dumps({"name": name, "parameters": {}})
        message = chat.read(text, tools=True, declared=TOOLS, is_json=True)
        assert ("tool_calls" in message, message["content"]) == (is_call, None if is_call else text)
    text = '{"verdict": "right", "call": "<tool_call><function=f></function></tool_call>"}'
    coder = walker("similar to qwen2_5").chat
    assert coder.read(text, tools=True, declared=TOOLS, is_json=True)["content"] == text


@pytest.mark.parametrize(
    ("schema", "parameters", "message"),
    [
        ({"not": {}}, {}, r"this JSON schema is not supported: Unimplemented keys: \[\"not\"\]$"),
        (SCHEMA, {"type": "strin"}, "the JSON schema of a tool's parameters is not supported: Invalid type: strin$"),
    ],
)
def test_a_refusal_names_the_schema_that_is_not_supported(
    schema: dict[str, Any], parameters: dict[str, Any], message: str
) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    chat = walker("similar to qwen2_5").chat
    grammar = chat.output_grammar(schema, AllowedCalls(tools=tools, required=False, one=False), thinking=False)
    with pytest.raises(PolicyRequestError, match=message):
        walker("similar to qwen2_5").walk(SamplingParams(max_tokens=9, grammar=grammar), Random(0))
