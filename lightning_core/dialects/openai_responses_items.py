"""Converts items and tools of OpenAI's Responses API to messages and tools of a chat."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

from lightning_core.chat.json_text import show_json
from lightning_core.chat.messages import READS_TEXT, Message
from lightning_core.dialects.fields import NO_HOSTED_TOOLS, Fields, UnsupportedField, check_variant
from lightning_core.dialects.openai_chat_shape import call_ids, check_result, check_role
from lightning_core.dialects.openai_custom_tools import write_arguments
from lightning_core.dialects.openai_responses_tools import LEFT_OUT, TOOLS, definitions, shown_name
from lightning_core.dialects.requirements import (
    ANY_TOOL,
    OutputRequirements,
    allowed_tools,
    check_tool_choice,
    other_kind,
    read_form,
)
from lightning_core.errors import PolicyRequestError

_ROLES = ("user", "assistant", "system", "developer")

_DIRECT = UnsupportedField(NO_HOSTED_TOOLS, unless=({"type": "direct"},))
_NOT_ASYNC = UnsupportedField("tool calls are not asynchronous here", unless=(False,))
_BOOKKEEPING = frozenset({"id", "internal_chat_message_metadata_passthrough", "provider_data", "status"})
_OUTPUT = Fields(
    supported=frozenset({"type", "call_id", "output"}),
    ignored=_BOOKKEEPING | {"name", "namespace"},
    refused={"caller": _DIRECT},
)

ITEMS: Mapping[str, Fields] = {
    "message": Fields(supported=frozenset({"type", "role", "content"}), ignored=_BOOKKEEPING | {"phase"}),
    "function_call": Fields(
        supported=frozenset({"type", "call_id", "name", "namespace", "arguments"}),
        ignored=_BOOKKEEPING | {"parsed_arguments"},
        refused={"async": _NOT_ASYNC, "caller": _DIRECT},
    ),
    "function_call_output": _OUTPUT,
    "custom_tool_call": Fields(
        supported=frozenset({"type", "call_id", "name", "namespace", "input"}),
        ignored=_BOOKKEEPING,
        refused={"async": _NOT_ASYNC, "caller": _DIRECT},
    ),
    "custom_tool_call_output": _OUTPUT,
    "tool_search_call": Fields(
        supported=frozenset({"type", "call_id", "arguments"}), ignored=_BOOKKEEPING | {"execution"}
    ),
    "tool_search_output": Fields(
        supported=frozenset({"type", "call_id", "tools"}), ignored=_BOOKKEEPING | {"execution"}
    ),
    "additional_tools": Fields(supported=frozenset({"type", "role", "tools"}), ignored=_BOOKKEEPING),
    # Reasoning sampled here is known to the endpoint; other models' reasoning is not shown to this model.
    "reasoning": Fields(
        supported=frozenset({"type"}), ignored=_BOOKKEEPING | {"content", "encrypted_content", "summary"}
    ),
}
"""Fields of an input item, by its type."""

_PART = frozenset({"annotations", "logprobs", "parsed", "prompt_cache_breakpoint"})
PARTS: Mapping[str, Fields] = {
    **dict.fromkeys(
        ("input_text", "output_text", "text"), Fields(supported=frozenset({"type", "text"}), ignored=_PART)
    ),
    "refusal": Fields(supported=frozenset({"type", "refusal"}), ignored=_PART),
}
"""Fields of a content part, by its type."""

LOGPROBS = "message.output_text.logprobs"
INCLUDED = frozenset({
    LOGPROBS, "code_interpreter_call.outputs", "computer_call_output.output.image_url", "file_search_call.results",
    "message.input_image.image_url", "reasoning.encrypted_content", "web_search_call.action.sources", "web_search_call.results",
})  # fmt: skip
"""The values of ``include``. All but the logprobs concern content that no response here has."""

_NAMED = Fields(supported=frozenset({"type", "name", "namespace"}))
TOOL_CHOICES = {
    "function": _NAMED,
    "custom": _NAMED,
    "allowed_tools": Fields(supported=frozenset({"type", "mode", "tools"})),
}
FORMATS = {
    "text": Fields(supported=frozenset({"type"})),
    "json_object": Fields(supported=frozenset({"type"})),
    "json_schema": Fields(
        supported=frozenset({"type", "schema", "description"}), ignored=frozenset({"name", "strict"})
    ),
}

NESTED = {
    **{f"input.N ({kind})": fields for kind, fields in ITEMS.items()},
    **{f"input.N.content.N ({kind})": fields for kind, fields in PARTS.items()},
    **{f"tools.N ({kind})": fields for kind, fields in TOOLS.items()},
    **{f"tool_choice ({kind})": fields for kind, fields in TOOL_CHOICES.items()},
    **{f"text.format ({kind})": fields for kind, fields in FORMATS.items()},
}


def items_to_messages(items: Any, *, check: bool, earlier: Sequence[Message] = (), skip: int = 0) -> Sequence[Message]:
    """The chat messages of ``items`` without the first ``skip`` ones, which follow ``earlier``.

    Raises `PolicyRequestError` for items that are not supported; with ``check`` False they become text.
    """
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    if not isinstance(items, list):
        raise PolicyRequestError(f"input is {show_json(items)}; expected a string or a list of items", param="input")
    messages: list[dict[str, Any]] = []
    ids = call_ids(earlier) if check else set[str]()
    open_turn = False  # whether following function calls belong to the last message
    for i, item in enumerate(items[skip:], skip):
        path = f"input.{i}"
        if check and isinstance(item, dict):
            check_variant(ITEMS, item, path, default="message")
        if (call := _call(item)) is not None:
            if not open_turn:
                messages.append({"role": "assistant", "content": ""})
            messages[-1].setdefault("tool_calls", []).append(call)
            ids.add(call["id"])
            open_turn = True
            continue
        match item:
            case {"type": "function_call_output" | "custom_tool_call_output", "call_id": str(id), "output": output}:
                if check:
                    check_result(id, ids, f"{path}.call_id")
                content = _text(output, f"{path}.output", check=check)
                messages.append({"role": "tool", "tool_call_id": id, "content": content})
                open_turn = False
            case {"type": "tool_search_output", "call_id": str(id)}:
                if check:
                    check_result(id, ids, f"{path}.call_id")
                content = definitions(item.get("tools"), f"{path}.tools")
                messages.append({"role": "tool", "tool_call_id": id, "content": content})
                open_turn = False
            case {"type": "additional_tools"}:
                content = f"Additional tools: {definitions(item.get('tools'), f'{path}.tools')}"
                messages.append({"role": "developer", "content": content})
                open_turn = False
            case {"role": str(role), "content": content} if item.get("type", "message") == "message":
                if check:
                    check_role(role, _ROLES, path)
                messages.append({"role": role, "content": _text(content, f"{path}.content", check=check)})
                open_turn = role == "assistant"
            case {"type": "reasoning"}:
                pass
            case _:
                if check:
                    raise PolicyRequestError(
                        f"{path} is {show_json(item)}; expected one of {[*ITEMS]!r} with all of its fields",
                        param=path,
                    )
                messages.append({"role": "user", "content": json.dumps(item)})
                open_turn = False
    return messages


def _call(item: Any) -> dict[str, Any] | None:
    """The tool call of an item as chat completions have it; None for other items."""
    match item:
        case {"type": "function_call", "call_id": str(id), "name": str(name), "arguments": str(arguments)}:
            pass
        case {"type": "custom_tool_call", "call_id": str(id), "name": str(name), "input": str(written)}:
            arguments = write_arguments(written)
        case {"type": "tool_search_call", "call_id": str(id), "arguments": written}:
            name, arguments = "tool_search", written if isinstance(written, str) else json.dumps(written)
        case _:
            return None
    function = {"name": shown_name(name, item.get("namespace")), "arguments": arguments}
    return {"id": id, "type": "function", "function": function}


def _text(content: Any, path: str, *, check: bool) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, (list, type(None))):
        raise PolicyRequestError(f"{path} is {show_json(content)}; expected a string or a list of parts", param=path)
    texts: list[str] = []
    for i, part in enumerate(cast("Sequence[Any]", content or ())):
        if check and isinstance(part, dict):
            check_variant(PARTS, part, f"{path}.{i}")
        match part:
            case {"type": "input_text" | "output_text" | "text", "text": str(text)}:
                texts.append(text)
            case {"type": "refusal", "refusal": str(text)}:
                texts.append(text)
            case _ if not check:
                texts.append(json.dumps(part))
            case _:
                raise PolicyRequestError(
                    f"{path}.{i} is {show_json(part)}; expected a text part: {READS_TEXT}", param=f"{path}.{i}"
                )
    return "".join(texts)


Functions = Sequence[Mapping[str, Any]]


def read_tool_choice(
    body: Mapping[str, Any], tools: Functions, later: Functions
) -> tuple[Functions, Functions, str | None]:
    """The tools that may be called, of the prompt's list and of its messages, and the required one."""
    choice = body.get("tool_choice")
    if isinstance(choice, Mapping):
        check_variant(TOOL_CHOICES, choice, "tool_choice")
    match choice:
        case None | "auto":
            return tools, later, None
        case "none":
            return (), (), None
        case "required":
            tool = ANY_TOOL
        case {"type": "function" | "custom", "name": str(name)}:
            tool = shown_name(name, choice.get("namespace"))
        case {"type": "allowed_tools", "mode": "auto" | "required" as mode, "tools": list(entries)}:
            left_out = [entry["type"] for entry in entries if _is_left_out(entry)]
            names = [_allowed_name(entry) for entry in entries if not _is_left_out(entry)]
            allowed = allowed_tools(names, [*tools, *later], left_out=left_out)
            tools, later = ([tool for tool in kind if tool in allowed] for kind in (tools, later))
            tool = ANY_TOOL if mode == "required" else None
        case _:
            raise PolicyRequestError(
                f"tool_choice is {show_json(choice)}; expected 'auto', 'none', 'required', a function with a name, or allowed_tools with "
                "a mode and tools",
                param="tool_choice",
            )
    return tools, later, check_tool_choice(tool, [*tools, *later])


def _is_left_out(entry: Any) -> bool:
    return isinstance(entry, Mapping) and str(entry.get("type")).startswith(LEFT_OUT)


def _allowed_name(entry: Any) -> str:
    match entry:
        case {"type": "function" | "custom", "name": str(name)}:
            return shown_name(name, entry.get("namespace"))
        case _:
            return other_kind(entry)


def read_requirements(body: Mapping[str, Any], *, tool: str | None, has_tools: bool) -> OutputRequirements:
    """The required form of a response. ``tool``: the required one."""
    form = read_form((body.get("text") or {}).get("format"), "text.format", FORMATS)
    one_call = has_tools and body.get("parallel_tool_calls") is False
    return OutputRequirements(**form, schema_field="text.format", tool=tool, one_call=one_call)
