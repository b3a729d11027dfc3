"""The grammar of responses to requests with tools and a JSON schema, in the chat template of each model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import cache
from random import Random
from typing import Annotated, Any, Literal

import pytest
from jsonschema import validate
from pydantic import BaseModel, Field, JsonValue, RootModel

from lightning_core.backends.backend import SamplingParams
from lightning_core.chat.chat import Chat, Memory, RenderedPrompt
from lightning_core.chat.output_grammar import AllowedCalls
from lightning_core.chat.tool_calls.call_syntax import find_syntax
from lightning_core.errors import PolicyRequestError
from tests.chat.chat_families import encode, make_chat
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


def tool(name: str, parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def render(chat: Chat, **variables: Any) -> RenderedPrompt:
    return chat.render([{"role": "user", "content": "x"}], None, Memory(), variables=variables)


def respond(name: str, count: int, *, most: int = 400, **calls: Any) -> list[dict[str, Any]]:
    """Responses that a model may sample, as the endpoint reads them, without those that did not end."""
    chat = walker(name).chat
    prompt = render(chat)
    settings: dict[str, Any] = {"tools": TOOLS, "required": False, "one": False, **calls}
    allowed = AllowedCalls(**settings)
    grammar = chat.output_grammar(SCHEMA, allowed, prompt.text)
    params = SamplingParams(max_tokens=most, stop_token_ids=chat.stop_token_ids, grammar=grammar)
    responses: list[dict[str, Any]] = []
    for seed in range(count):
        ids = walker(name).walk(params, Random(seed))
        if ids[-1] in chat.stop_token_ids:
            text = chat.text(ids)
            responses.append(
                chat.read(text, tools=True, thinking=prompt.thinking, declared=settings["tools"], is_json=True)
            )
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
        ({"not": {}}, {}, r"this JSON schema is not supported: Unimplemented keys: \[\"not\"\]. Rewrite"),
        (SCHEMA, {"type": "strin"}, "this JSON schema is not supported: Invalid type: strin. Rewrite"),
    ],
)
def test_a_refusal_names_the_schema_that_is_not_supported(
    schema: dict[str, Any], parameters: dict[str, Any], message: str
) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    chat = walker("similar to qwen2_5").chat
    grammar = chat.output_grammar(schema, AllowedCalls(tools=tools, required=False, one=False), "")
    with pytest.raises(PolicyRequestError, match=message):
        walker("similar to qwen2_5").walk(SamplingParams(max_tokens=9, grammar=grammar), Random(0))


class Point(BaseModel):
    x: int
    label: Literal["a'b", 'c"d'] | None = None


class Line(BaseModel):
    start: Point
    points: list[Point] = Field(max_length=2)
    fixed: Literal["only"]
    mixed: Literal[1, "three", None, True]
    short: Annotated[str, Field(min_length=1, max_length=3)]
    short_or_none: Annotated[str, Field(max_length=2)] | None = None
    either: int | Literal["all"] = 3
    size: Annotated[int, Field(ge=1, le=9)]


class Step(BaseModel):
    kind: Literal["step"]
    count: int


class Turn(BaseModel):
    kind: Literal["turn"]
    left: bool


POINT = Point.model_json_schema()
PARAMETERS: dict[str, Any] = {
    "fields": Line.model_json_schema(),
    "reference": {"$ref": "#/$defs/Point", "$defs": {"Point": POINT}},
    "all_of": {"allOf": [POINT, {"properties": {"y": {"type": "integer"}}, "required": ["y"]}]},
    "union": RootModel[Step | Turn].model_json_schema(),
    "undeclared": {"type": "object", "required": ["x"], "additionalProperties": {"enum": ["p", 2]}},
    "none": {"type": "object"},
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=needs_wheel if name in FORMATS else ()) for name in TEMPLATES]
)
def test_sampled_arguments_satisfy_the_schemas_of_the_tools(name: str) -> None:
    chat = walker(name).chat
    syntax = chat.template.call_syntax
    quotes = syntax is not None and syntax.parameters is not None and syntax.parameters.after_text
    called: set[str] = set()
    for key, parameters in PARAMETERS.items():
        for message in respond(name, 3, tools=[tool(key, parameters)], required=True, one=True, most=1500):
            (call,) = message["tool_calls"]
            arguments = json.loads(call["function"]["arguments"])
            if quotes and key == "fields":  # the contents of nested arguments are not guaranteed
                arguments |= {"start": {"x": 1}, "points": []}
            validate(arguments, parameters)
            called.add(key)
    assert called == PARAMETERS.keys()


CHOICES = {
    "anyOf": [{"enum": [1, "three", "it's"]}, {"const": None}, {"$ref": "#/$defs/B"}],
    "$defs": {"B": {"type": "boolean"}},
}
WRITTEN: list[tuple[dict[str, Any], list[Any], list[Any]]] = [
    (CHOICES, [1, "three", "it's", None, True, False], [2, "four"]),
    (POINT["properties"]["label"], ["a'b", 'c"d', None], ["a"]),
    ({}, ["three", 3, 2.5, {"a": [1]}, [], True], []),
    ({"type": "string", "maxLength": 3}, ["", "abc"], ["abcd"]),
    ({"type": "string", "maxLength": 3, "anyOf": [{"maxLength": 5}]}, ["abc"], ["abcd"]),
    ({"type": "integer", "multipleOf": 2, "allOf": [{"multipleOf": 3}]}, [6], [2, 3]),
    ({"anyOf": [{"type": "string", "maxLength": 3}, {"type": "object"}]}, ["abc", {"abcd": 5}], []),
    ({"allOf": [{"type": ["integer", "string"]}, {"type": "integer"}], "title": "X"}, [12], ["a"]),
]
"""Schemas of a parameter, values that may be sampled, and others."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=needs_wheel if name in FORMATS else ()) for name in TEMPLATES]
)
def test_values_of_a_parameter_are_allowed_as_the_template_writes_them(name: str) -> None:
    wrong: list[Any] = []
    for schema, values, others in WRITTEN:
        parameters = {
            "type": "object",
            "properties": {"x": schema},
            "required": ["x"],
            "$defs": schema.get("$defs", {}),
        }
        wrong += [(schema, value) for value in values if not may_call(name, parameters, {"x": value})]
        wrong += [(schema, value) for value in others if may_call(name, parameters, {"x": value})]
    assert not wrong


def may_call(name: str, parameters: dict[str, Any], arguments: dict[str, Any]) -> bool:
    """Whether a model may sample a call of a tool, as the template writes it."""
    chat = walker(name).chat
    tools = [tool("f", parameters)]
    grammar = chat.output_grammar(SCHEMA, AllowedCalls(tools=tools, required=True, one=True), "")
    function = {"name": "f", "arguments": arguments}
    call = {"id": chat.template.ids.example("f", 0), "type": "function", "function": function}
    ids = encode(family(name), chat.template._probe_response([call]))  # pyright: ignore[reportPrivateUsage]
    return walker(name).accepts(SamplingParams(max_tokens=1, stop_token_ids=chat.stop_token_ids, grammar=grammar), ids)


@needs_wheel
def test_parameters_of_any_name_are_refused_where_arguments_are_not_one_object() -> None:
    tools = [tool("f", RootModel[dict[str, JsonValue]].model_json_schema())]
    allowed = AllowedCalls(tools=tools, required=True, one=True)
    with pytest.raises(ValueError, match="the tool 'f' takes parameters of any name"):
        walker("glm4moe").chat.output_grammar(SCHEMA, allowed, "")
    assert walker("qwen3").chat.output_grammar(SCHEMA, allowed, "")


@pytest.mark.parametrize("required", [["count"], []])
def test_text_that_nothing_ends_is_refused_and_a_number_is_not(
    monkeypatch: pytest.MonkeyPatch, required: list[str]
) -> None:
    def write(calls: Sequence[Mapping[str, Any]]) -> str:
        named = [(call["function"]["name"], call["function"]["arguments"]) for call in calls]
        lines = [[name, *(f"{key}: {value}" for key, value in arguments.items())] for name, arguments in named]
        return "\n".join(line for call in lines for line in call)

    chat = make_chat(family("similar to qwen2_5"))
    monkeypatch.setattr(chat.template, "call_syntax", find_syntax(write, chat.template.ids.example))
    for kind, refused in (("string", True), ("integer", False)):
        parameters = {"type": "object", "properties": {"count": {"type": kind}}, "required": required}
        allowed = AllowedCalls(tools=[tool("f", parameters)], required=True, one=True)
        with pytest.raises(ValueError, match="form of its tool calls is not regular") if refused else nullcontext():
            chat.output_grammar(SCHEMA, allowed, "")


@needs_wheel
def test_a_tool_that_no_arguments_satisfy_is_refused() -> None:
    parameters = {"type": "object", "required": ["a"], "allOf": [{"additionalProperties": False}]}
    allowed = AllowedCalls(tools=[tool("f", parameters)], required=True, one=True)
    with pytest.raises(ValueError, match="no arguments satisfy the parameters of the tool 'f'"):
        walker("glm4moe").chat.output_grammar(SCHEMA, allowed, "")


@needs_wheel
@pytest.mark.parametrize("name", ["qwen3", "glm4moe", "qwen3_5_think"])
def test_no_reasoning_follows_a_prompt_that_closed_it(name: str) -> None:
    chat = walker(name).chat
    allowed = AllowedCalls(tools=TOOLS, required=False, one=False)
    closed = render(chat, enable_thinking=False)
    assert not closed.thinking
    assert chat.output_grammar(SCHEMA, None, closed.text) is None
    grammar = chat.output_grammar(SCHEMA, allowed, closed.text)
    params = SamplingParams(max_tokens=400, stop_token_ids=chat.stop_token_ids, grammar=grammar)
    for seed in range(8):
        text = chat.text(walker(name).walk(params, Random(seed)))
        assert text.startswith(("{", "<tool_call>"))


def messages_of(name: str, count: int, *, most: int = 200, **settings: Any) -> list[tuple[dict[str, Any], bool]]:
    """Responses without a schema that a model may sample, as the endpoint reads them, and whether they ended."""
    chat = walker(name).chat
    prompt = render(chat)
    grammar = chat.output_grammar(None, AllowedCalls(tools=TOOLS, **settings), prompt.text)
    params = SamplingParams(max_tokens=most, stop_token_ids=chat.stop_token_ids, grammar=grammar)
    found = [walker(name).walk(params, Random(seed)) for seed in range(count)]
    read = [chat.read(chat.text(ids), tools=True, thinking=prompt.thinking, declared=TOOLS) for ids in found]
    return list(zip(read, [ids[-1] in chat.stop_token_ids for ids in found], strict=True))


each_template = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=needs_wheel if name in FORMATS else ()) for name in TEMPLATES]
)


@each_template
def test_a_required_tool_is_called_whichever_tokens_are_sampled(name: str) -> None:
    ended = [message for message, over in messages_of(name, 6, most=400, required=True, one=False) if over]
    assert ended
    for message in ended:
        assert message["tool_calls"]
        for call in message["tool_calls"]:
            check_call(call)


@each_template
def test_at_most_one_call_beside_free_text(name: str) -> None:
    if walker(name).chat.tool_format.bare:
        with pytest.raises(ValueError, match="begin like text"):
            messages_of(name, 1, required=False, one=True)
        return
    for message, _ in messages_of(name, 6, required=False, one=True):
        assert len(message.get("tool_calls", ())) <= 1
    chat = walker(name).chat
    grammar = chat.output_grammar(None, AllowedCalls(tools=TOOLS, required=False, one=True), "")
    params = SamplingParams(max_tokens=9, stop_token_ids=chat.stop_token_ids, grammar=grammar)
    form = chat.tool_format
    call = chat.template._probe_response([example_call(chat)])  # pyright: ignore[reportPrivateUsage]
    text = "Well, 1 < 2.\n\n- OK [x] {y}\n"
    for said in (f"{form.answer}{text}", call, f"{text}{call}"):
        if said != f"{text}{call}" or form.split is None:
            assert walker(name).accepts(params, encode(family(name), said)), said
    assert not walker(name).accepts(params, encode(family(name), f"{form.answer}{text}{call}{call}"))


@pytest.mark.parametrize("name", ["minimax_m2", "deepseek_v3_2", "similar to chatml", "similar to qwen2_5"])
def test_the_mark_of_a_call_is_in_no_text_so_any_text_can_end(name: str) -> None:
    """Whether the vocabulary has a token for it or not."""
    chat = walker(name).chat
    grammar = chat.output_grammar(None, AllowedCalls(tools=TOOLS, required=False, one=True), "")
    params = SamplingParams(max_tokens=9, stop_token_ids=chat.stop_token_ids, grammar=grammar)
    (mark,) = chat.tool_format.opens
    call = chat.template._probe_response([example_call(chat)])  # pyright: ignore[reportPrivateUsage]
    (end, *_) = chat.stop_token_ids
    for text in ("Use < tags >", f"Use {call}"):
        assert walker(name).accepts(params, [*encode(family(name), text), end]), text
    for text in (f"Use {mark} tags", f"{mark}{{}}"):
        assert not walker(name).accepts(params, encode(family(name), text)), text


def example_call(chat: Chat) -> dict[str, Any]:
    function = {"name": "set_it", "arguments": {"count": 3}}
    return {"id": chat.template.ids.example("set_it", 0), "type": "function", "function": function}
