"""Every field inside a request is supported, ignored, dropped with a note, or refused by path."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, get_type_hints

import httpx
import pytest
from anthropic import types as anthropic_types
from anthropic.types import beta
from openai.types import chat, shared_params
from openai.types import responses as openai_responses
from openai.types.chat import chat_completion_message_function_tool_call_param as tool_call_param
from openai.types.responses import namespace_tool_param
from openai.types.responses import response_input_item_param as item_param
from openai.types.shared_params import response_format_json_schema as json_schema_param

from lightning_core.dialects import anthropic_messages as messages
from lightning_core.dialects import openai_chat as chat_completions
from lightning_core.dialects import openai_responses as responses
from lightning_core.dialects import openai_responses_items as response_items
from lightning_core.dialects.dialect import Dialect
from lightning_core.dialects.fields import Fields, collect_notes
from lightning_core.endpoint.server import PolicyEndpoint
from lightning_core.testing.recording_server import recording_server
from tests.dialects.test_fields import LEAST
from tests.endpoint.serving import client_in_rollout, serve

SCHEMA: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}}
HI: dict[str, Any] = {"role": "user", "content": "hi"}
CALL: dict[str, Any] = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
CALLED: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT: dict[str, Any] = {"role": "tool", "tool_call_id": "call_1", "content": "3"}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "add", "description": "a + b", "parameters": SCHEMA}}

ITEM_CALL: dict[str, Any] = {"type": "function_call", "call_id": "call_1", "name": "add", "arguments": "{}"}
ITEM_RESULT: dict[str, Any] = {"type": "function_call_output", "call_id": "call_1", "output": "3"}
ITEM_TOOL: dict[str, Any] = {"type": "function", "name": "add", "description": "a + b", "parameters": SCHEMA}

USE: dict[str, Any] = {"type": "tool_use", "id": "call_1", "name": "add", "input": {}}
USED: dict[str, Any] = {"role": "assistant", "content": [USE]}
TOOL_RESULT: dict[str, Any] = {"type": "tool_result", "tool_use_id": "call_1", "content": "3"}
ANTHROPIC_TOOL: dict[str, Any] = {"name": "add", "description": "a + b", "input_schema": SCHEMA}

DOCUMENTED: list[tuple[Dialect, str, list[Any]]] = [
    (chat_completions, "messages.N (system)", [chat.ChatCompletionSystemMessageParam]),
    (chat_completions, "messages.N (developer)", [chat.ChatCompletionDeveloperMessageParam]),
    (chat_completions, "messages.N (user)", [chat.ChatCompletionUserMessageParam]),
    (chat_completions, "messages.N (assistant)", [chat.ChatCompletionAssistantMessageParam]),
    (chat_completions, "messages.N (tool)", [chat.ChatCompletionToolMessageParam]),
    (chat_completions, "messages.N.content.N (text)", [chat.ChatCompletionContentPartTextParam]),
    (chat_completions, "messages.N.content.N (refusal)", [chat.ChatCompletionContentPartRefusalParam]),
    (chat_completions, "messages.N.tool_calls.N", [chat.ChatCompletionMessageFunctionToolCallParam]),
    (chat_completions, "messages.N.tool_calls.N > function", [tool_call_param.Function]),
    (chat_completions, "tools.N", [chat.ChatCompletionFunctionToolParam]),
    (chat_completions, "tools.N > function", [shared_params.FunctionDefinition]),
    (chat_completions, "tool_choice (function)", [chat.ChatCompletionNamedToolChoiceParam]),
    (chat_completions, "tool_choice (custom)", [chat.ChatCompletionNamedToolChoiceCustomParam]),
    (chat_completions, "tool_choice (allowed_tools)", [chat.ChatCompletionAllowedToolChoiceParam]),
    (chat_completions, "tool_choice (allowed_tools) > allowed_tools", [chat.ChatCompletionAllowedToolsParam]),
    (chat_completions, "response_format (json_schema)", [shared_params.ResponseFormatJSONSchema]),
    (chat_completions, "response_format (json_schema) > json_schema", [json_schema_param.JSONSchema]),
    (
        responses,
        "input.N (message)",
        [openai_responses.EasyInputMessageParam, item_param.Message, openai_responses.ResponseOutputMessageParam],
    ),
    (responses, "input.N (function_call)", [openai_responses.ResponseFunctionToolCallParam]),
    (responses, "input.N (function_call_output)", [item_param.FunctionCallOutput]),
    (responses, "input.N (reasoning)", [openai_responses.ResponseReasoningItemParam]),
    (responses, "input.N.content.N (input_text)", [openai_responses.ResponseInputTextParam]),
    (responses, "input.N.content.N (output_text)", [openai_responses.ResponseOutputTextParam]),
    (responses, "input.N.content.N (refusal)", [openai_responses.ResponseOutputRefusalParam]),
    (responses, "tools.N (function)", [openai_responses.FunctionToolParam, namespace_tool_param.ToolFunction]),
    (responses, "tools.N (custom)", [openai_responses.CustomToolParam]),
    (responses, "tools.N (namespace)", [openai_responses.NamespaceToolParam]),
    (responses, "tools.N (tool_search)", [openai_responses.ToolSearchToolParam]),
    (responses, "input.N (custom_tool_call)", [openai_responses.ResponseCustomToolCallParam]),
    (responses, "input.N (custom_tool_call_output)", [openai_responses.ResponseCustomToolCallOutputParam]),
    (responses, "input.N (tool_search_call)", [item_param.ToolSearchCall]),
    (responses, "input.N (tool_search_output)", [openai_responses.ResponseToolSearchOutputItemParamParam]),
    (responses, "input.N (additional_tools)", [item_param.AdditionalTools]),
    (responses, "tool_choice (function)", [openai_responses.ToolChoiceFunctionParam]),
    (responses, "tool_choice (custom)", [openai_responses.ToolChoiceCustomParam]),
    (responses, "tool_choice (allowed_tools)", [openai_responses.ToolChoiceAllowedParam]),
    (responses, "text.format (json_schema)", [openai_responses.ResponseFormatTextJSONSchemaConfigParam]),
    (messages, "messages.N.content.N (text)", [anthropic_types.TextBlockParam, beta.BetaTextBlockParam]),
    (messages, "messages.N.content.N (tool_use)", [anthropic_types.ToolUseBlockParam, beta.BetaToolUseBlockParam]),
    (
        messages,
        "messages.N.content.N (tool_result)",
        [anthropic_types.ToolResultBlockParam, beta.BetaToolResultBlockParam],
    ),
    (messages, "messages.N.content.N (thinking)", [anthropic_types.ThinkingBlockParam]),
    (messages, "messages.N.content.N (redacted_thinking)", [anthropic_types.RedactedThinkingBlockParam]),
    (messages, "tools.N", [anthropic_types.ToolParam, beta.BetaToolParam]),
    (messages, "tool_choice (auto)", [anthropic_types.ToolChoiceAutoParam]),
    (messages, "tool_choice (any)", [anthropic_types.ToolChoiceAnyParam]),
    (messages, "tool_choice (tool)", [anthropic_types.ToolChoiceToolParam]),
    (messages, "tool_choice (none)", [anthropic_types.ToolChoiceNoneParam]),
    (messages, "output_config.format", [anthropic_types.JSONOutputFormatParam]),
]
"""An object inside a request, and the SDK types that describe it; after ``>``, a nested object."""


@pytest.mark.parametrize(("wire", "place", "types"), DOCUMENTED, ids=lambda v: v if isinstance(v, str) else None)
def test_the_table_covers_what_the_sdk_documents(wire: Dialect, place: str, types: list[Any]):
    """Fails if a new SDK documents a field that is in no table."""
    place, _, within = place.partition(" > ")
    fields = wire.NESTED[place]
    names = {*fields.supported, *fields.ignored, *fields.dropped, *fields.refused}
    if within:
        names = {n.removeprefix(f"{within}.") for n in names if n.startswith(f"{within}.")}
    known = {n.partition(".")[0] for n in names}
    documented = {field for kind in types for field in get_type_hints(kind)}
    assert documented - known == set()


def test_a_field_is_in_one_of_the_four():
    for wire in (chat_completions, responses, messages):
        for fields in wire.NESTED.values():
            names = [*fields.supported, *fields.ignored, *fields.dropped, *fields.refused]
            assert len(names) == len(set(names))


def test_include_may_name_what_the_sdk_documents():
    assert set(openai_responses.ResponseIncludable.__args__) == response_items.INCLUDED


@pytest.fixture(scope="module")
def endpoint() -> Iterator[PolicyEndpoint]:
    with serve(lambda prompt: "hello") as endpoint:
        yield endpoint


def post(client: httpx.Client, wire: Dialect, more: dict[str, Any]) -> httpx.Response:
    return client.post(wire.PATH, json={**LEAST[wire.PATH], **more})


def schema_format(**more: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, **more}}}


REFUSED: list[tuple[Dialect, dict[str, Any], str]] = [
    (chat_completions, {"messages": [HI, HI, {"role": "assistant", "content": "a", "prefix": True}]}, "messages.2.prefix"),
    (chat_completions, {"messages": [{**HI, "tool_calls": [CALL]}]}, "messages.0.tool_calls"),
    (chat_completions, {"messages": [{**HI, "tool_call_id": "call_1"}]}, "messages.0.tool_call_id"),
    (chat_completions, {"messages": [HI, {**CALLED, "audio": {"id": "a"}}]}, "messages.1.audio"),
    (chat_completions, {"messages": [HI, {"role": "assistant", "refusal": 5}]}, "messages.1.refusal"),
    (chat_completions, {"messages": [HI, CALLED, {**RESULT, "tool_call_id": "call_2"}]}, "messages.2.tool_call_id"),
    (chat_completions, {"messages": [HI, CALLED, {"role": "tool", "content": "3"}]}, "messages.2.tool_call_id"),
    (chat_completions, {"messages": [HI, RESULT]}, "messages.1.tool_call_id"),
    (chat_completions, {"messages": [HI, {**CALLED, "tool_calls": [{**CALL, "id": 5}]}]}, "messages.1.tool_calls.0.id"),
    (chat_completions, schema_format(description=5), "response_format.json_schema.description"),
    (responses, {"input": [HI, {**ITEM_CALL, "async": True}]}, "input.1.async"),
    (responses, {"input": [HI, ITEM_CALL, {**ITEM_RESULT, "call_id": "call_2"}]}, "input.2.call_id"),
    (responses, {"input": [HI, ITEM_RESULT]}, "input.1.call_id"),
    (responses, {"include": ["everything"]}, "include"),
    (
        messages,
        {"messages": [HI, USED, {"role": "user", "content": [{**TOOL_RESULT, "tool_use_id": "call_2"}]}]},
        "messages.2.content.0.tool_use_id",
    ),
    (messages, {"messages": [{"role": "user", "content": [TOOL_RESULT]}]}, "messages.0.content.0.tool_use_id"),
    (messages, {"messages": [HI, USED, {"role": "user", "content": [{**TOOL_RESULT, "is_error": "no"}]}]}, "messages.2.content.0.is_error"),
    (messages, {"tools": [{**ANTHROPIC_TOOL, "allowed_callers": ["code_execution_20250825"]}]}, "tools.0.allowed_callers"),
]  # fmt: skip


@pytest.mark.parametrize(("wire", "more", "path"), REFUSED, ids=[f"{w.PATH[1:]}-{path}" for w, _, path in REFUSED])
def test_a_nested_field_is_refused_by_its_path(
    endpoint: PolicyEndpoint, wire: Dialect, more: dict[str, Any], path: str
):
    with client_in_rollout(endpoint) as (run, client):
        answer = post(client, wire, more)
    assert answer.status_code == 400
    assert path in answer.json()["error"]["message"]
    if wire is not messages:
        assert answer.json()["error"]["param"] == path
    assert all(failure.startswith("HostedToolError: ") for failure in run.infrastructure)
    (call,) = run.trace.calls
    assert path in (call.refused or "")


DROPPED: list[tuple[Dialect, dict[str, Any], str]] = [
    (chat_completions, {"messages": [HI, {**CALLED, "mood": "glad"}]}, "messages.1.mood"),
    (chat_completions, {"messages": [HI, {**CALLED, "tool_calls": [{**CALL, "when": 1}]}]}, "messages.1.tool_calls.0.when"),
    (
        chat_completions,
        {"messages": [HI, {**CALLED, "tool_calls": [{**CALL, "function": {**CALL["function"], "when": 1}}]}]},
        "messages.1.tool_calls.0.function.when",
    ),
    (
        chat_completions,
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi", "size": 3}]}]},
        "messages.0.content.0.size",
    ),
    (chat_completions, {"tools": [TOOL, {**TOOL, "when": 1}]}, "tools.1.when"),
    (chat_completions, {"tools": [{**TOOL, "function": {**TOOL["function"], "examples": [1]}}]}, "tools.0.function.examples"),
    (
        chat_completions,
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "add", "arguments": "{}"}}},
        "tool_choice.function.arguments",
    ),
    (chat_completions, schema_format(examples=[1]), "response_format.json_schema.examples"),
    (chat_completions, {"response_format": {"type": "text", "json_schema": {"schema": SCHEMA}}}, "response_format.json_schema"),
    (responses, {"input": [{**HI, "mood": "glad"}]}, "input.0.mood"),
    (responses, {"input": [{**HI, "name": "bob"}]}, "input.0.name"),
    (responses, {"input": [{"role": "user", "content": [{"type": "input_text", "text": "hi", "size": 3}]}]}, "input.0.content.0.size"),
    (responses, {"tools": [{**ITEM_TOOL, "output_schema": SCHEMA}]}, "tools.0.output_schema"),
    (responses, {"tools": [{**ITEM_TOOL, "when": 1}]}, "tools.0.when"),
    (responses, {"tools": [ITEM_TOOL], "tool_choice": {"type": "function", "name": "add", "when": 1}}, "tool_choice.when"),
    (responses, {"text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA, "when": 1}}}, "text.format.when"),
    (responses, {"reasoning": {"depth": 3}}, "reasoning.depth"),
    (responses, {"stream_options": {"include_usage": True}}, "stream_options.include_usage"),
    (messages, {"messages": [{**HI, "mood": "glad"}]}, "messages.0.mood"),
    (messages, {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi", "size": 3}]}]}, "messages.0.content.0.size"),
    (
        messages,
        {"messages": [HI, USED, {"role": "user", "content": [{**TOOL_RESULT, "content": [{"type": "text", "text": "3", "size": 1}]}]}]},
        "messages.2.content.0.content.0.size",
    ),
    (messages, {"system": [{"type": "text", "text": "be kind", "size": 3}]}, "system.0.size"),
    (messages, {"tools": [ANTHROPIC_TOOL], "tool_choice": {"type": "any", "name": "add"}}, "tool_choice.name"),
    (messages, {"thinking": {"type": "adaptive", "depth": 3}}, "thinking.depth"),
    (messages, {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA, "when": 1}}}, "output_config.format.when"),
]  # fmt: skip


@pytest.mark.parametrize(("wire", "more", "path"), DROPPED, ids=[f"{w.PATH[1:]}-{path}" for w, _, path in DROPPED])
def test_a_nested_field_without_effect_is_noted_by_its_path(
    endpoint: PolicyEndpoint, wire: Dialect, more: dict[str, Any], path: str
):
    with client_in_rollout(endpoint) as (run, client):
        assert post(client, wire, more).status_code == 200
    (call,) = run.trace.calls
    (noted,) = call.dropped
    assert noted.startswith(f"{re.sub(r'[0-9]+', 'N', path)}: ")


CACHED = {"cache_control": {"type": "ephemeral"}}
PLAIN_TEXT: dict[str, Any] = {"type": "text", "text": "hi"}
CALL_EXTRAS: dict[str, Any] = {
    "index": 0,
    "provider_specific_fields": {"a": 1},
    "function": {**CALL["function"], "parsed_arguments": {}},
}
ANSWER_EXTRAS: dict[str, Any] = {
    "refusal": None,
    "audio": None,
    "function_call": None,
    "annotations": [],
    "parsed": None,
    "provider_specific_fields": {"a": 1},
    "reasoning": "hm",
    "thinking_blocks": [],
    "prefix": False,
}
IGNORED: list[tuple[Dialect, dict[str, Any], dict[str, Any]]] = [
    (chat_completions, {"messages": [HI]}, {"messages": [{**HI, **CACHED, "tool_calls": None, "unheard_of": None}]}),
    (chat_completions, {"messages": [HI]}, {"messages": [{"role": "user", "content": [{**PLAIN_TEXT, **CACHED}]}]}),
    (
        chat_completions,
        {"messages": [HI, CALLED, RESULT]},
        {"messages": [HI, {**CALLED, **ANSWER_EXTRAS, "tool_calls": [{**CALL, **CALL_EXTRAS}]}, {**RESULT, **CACHED}]},
    ),
    (
        chat_completions,
        {"tools": [TOOL]},
        {"tools": [{**TOOL, **CACHED, "function": {**TOOL["function"], "strict": True}}]},
    ),
    (chat_completions, {"tools": [TOOL]}, {"tools": [{**TOOL, "function": {**TOOL["function"], "strict": None}}]}),
    (chat_completions, schema_format(), schema_format(name="other", strict=True, description=None)),
    (
        responses,
        {"input": [HI, ITEM_CALL, ITEM_RESULT]},
        {
            "input": [
                {**HI, "type": "message", "id": "msg_1", "status": "completed", "phase": None},
                {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x"},
                {
                    **ITEM_CALL,
                    "id": "fc_1",
                    "status": "completed",
                    "parsed_arguments": {},
                    "caller": {"type": "direct"},
                },
                {**ITEM_RESULT, "id": "fco_1", "status": None},
            ]
        },
    ),
    (
        responses,
        {"input": [HI, {"role": "assistant", "content": "hello"}, HI]},
        {
            "input": [
                HI,
                {
                    "role": "assistant",
                    "phase": "final_answer",
                    "content": [{"type": "output_text", "text": "hello", "annotations": [], "logprobs": []}],
                },
                HI,
            ]
        },
    ),
    (responses, {"tools": [ITEM_TOOL]}, {"tools": [{**ITEM_TOOL, "strict": True, "defer_loading": False}]}),
    (responses, {}, {"include": ["reasoning.encrypted_content"], "reasoning": {"effort": "low", "summary": "auto"}}),
    (
        messages,
        {"messages": [HI, USED, {"role": "user", "content": [TOOL_RESULT]}]},
        {
            "messages": [
                {"role": "user", "content": [{**PLAIN_TEXT, **CACHED, "citations": None}]},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "hm", "signature": "s"},
                        {**USE, **CACHED, "caller": {"type": "direct"}},
                    ],
                },
                {"role": "user", "content": [{**TOOL_RESULT, **CACHED, "is_error": False}]},
            ]
        },
    ),
    (
        messages,
        {"tools": [ANTHROPIC_TOOL]},
        {"tools": [{**ANTHROPIC_TOOL, **CACHED, "strict": True, "eager_input_streaming": True, "input_examples": []}]},
    ),
    (messages, {}, {"thinking": {"type": "enabled", "budget_tokens": 1024}}),
]


@pytest.mark.parametrize(("wire", "plain", "more"), IGNORED)
def test_bookkeeping_of_clients_changes_nothing(
    endpoint: PolicyEndpoint, wire: Dialect, plain: dict[str, Any], more: dict[str, Any]
):
    with client_in_rollout(endpoint) as (run, client):
        for extra in (plain, more):
            answer = post(client, wire, extra)
            assert answer.status_code == 200, answer.text
    first, second = (call.prompt_ids for call in run.trace.calls)
    assert first is not None
    assert second is not None
    assert first.tolist() == second.tolist()


def prompt_text(run: Any) -> str:
    (call,) = run.trace.calls
    return bytes(i for i in call.prompt_ids.tolist() if i < 256).decode()


@pytest.mark.parametrize(
    ("wire", "more"),
    [
        (chat_completions, schema_format(description="a sum")),
        (
            responses,
            {"text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA, "description": "a sum"}}},
        ),
    ],
)
def test_the_model_sees_the_description_of_a_schema(endpoint: PolicyEndpoint, wire: Dialect, more: dict[str, Any]):
    with client_in_rollout(endpoint) as (run, client):
        assert post(client, wire, more).status_code == 200
    assert "The JSON is for: a sum" in prompt_text(run)


@pytest.mark.parametrize(
    "turn",
    [
        {"role": "assistant", "content": None, "refusal": "I won't."},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "I won't."}]},
    ],
)
def test_the_model_sees_an_earlier_refusal(endpoint: PolicyEndpoint, turn: dict[str, Any]):
    with client_in_rollout(endpoint) as (run, client):
        assert post(client, chat_completions, {"messages": [HI, turn, HI]}).status_code == 200
    assert "assistant\nI won't." in prompt_text(run)


@pytest.mark.parametrize("wire", [chat_completions, responses, messages], ids=lambda wire: wire.PATH)
def test_a_forwarded_request_keeps_its_unknown_fields(wire: Dialect):
    field = "input" if wire is responses else "messages"
    more = {field: [{**HI, "mood": "glad"}], "tools": [{"type": "odd", "x": 1}]}
    with recording_server() as server:
        with serve(upstream=f"{server.url}/v1") as endpoint, client_in_rollout(endpoint) as (_, client):
            post(client, wire, {"model": "elsewhere", **more})
        (noted,) = server.requests
    assert noted.body == {**LEAST[wire.PATH], "model": "elsewhere", **more}


def test_tables_find_the_path_of_an_inner_object():
    fields = Fields(supported=frozenset({"a.b.c", "d"}))
    with collect_notes() as notes:
        fields.check({"a": {"b": {"c": 1}}, "d": {"anything": 1}, "e": None}, "x")
        assert notes == {}
        fields.check({"a": {"b": {"z": 1}}}, "x.7")
    assert notes == {"x.N.a.b.z": "unknown field"}
    with pytest.raises(Exception, match=r"x\.a\.b is 5; expected an object"):
        fields.check({"a": {"b": 5}}, "x")
