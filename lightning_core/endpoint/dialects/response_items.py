"""Converts items and tools of OpenAI's Responses API to messages and tools of a chat."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

from lightning_core.chat.messages import Message
from lightning_core.endpoint.dialects.chat_shape import call_ids, check_result, check_role
from lightning_core.endpoint.dialects.fields import NO_HOSTED_TOOLS, Fields, RefusedField, check_variant
from lightning_core.errors import PolicyRequestError

_ROLES = ("user", "assistant", "system", "developer")

_DIRECT = RefusedField(NO_HOSTED_TOOLS, unless=({"type": "direct"},))
_NAMESPACE = RefusedField("tools have no namespaces here")
_BOOKKEEPING = frozenset({"id", "status", "provider_data"})

ITEMS: Mapping[str, Fields] = {
    "message": Fields(supported=frozenset({"type", "role", "content"}), ignored=_BOOKKEEPING | {"phase"}),
    "function_call": Fields(
        supported=frozenset({"type", "call_id", "name", "arguments"}),
        ignored=_BOOKKEEPING | {"parsed_arguments"},
        refused={
            "async": RefusedField("tool calls are not asynchronous here", unless=(False,)),
            "caller": _DIRECT,
            "namespace": _NAMESPACE,
        },
    ),
    "function_call_output": Fields(
        supported=frozenset({"type", "call_id", "output"}),
        ignored=_BOOKKEEPING | {"name"},
        refused={"caller": _DIRECT, "namespace": _NAMESPACE},
    ),
    # Reasoning sampled here is known to the endpoint; that of other models is not shown to this one.
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

TOOL = Fields(
    supported=frozenset({"type", "name", "description", "parameters"}),
    # Arguments are never constrained to the schema, so the model is not shown `strict`.
    ignored=frozenset({"strict"}),
    refused={
        "allowed_callers": RefusedField(NO_HOSTED_TOOLS, unless=(["direct"], [])),
        "async": RefusedField("tool calls are not asynchronous here", unless=(False,)),
        "defer_loading": RefusedField("the model is shown every tool at once", unless=(False,)),
        "output_schema": RefusedField("the model is not shown the form of a tool's output"),
    },
)


LOGPROBS = "message.output_text.logprobs"
INCLUDED = frozenset({
    LOGPROBS, "code_interpreter_call.outputs", "computer_call_output.output.image_url", "file_search_call.results",
    "message.input_image.image_url", "reasoning.encrypted_content", "web_search_call.action.sources", "web_search_call.results",
})  # fmt: skip
"""What ``include`` may name. All but the logprobs concern what no response here contains."""

TOOL_CHOICE = Fields(supported=frozenset({"type", "name"}))
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
    "tools.N": TOOL,
    "tool_choice": TOOL_CHOICE,
    **{f"text.format ({kind})": fields for kind, fields in FORMATS.items()},
}


def items_to_messages(items: Any, *, check: bool, earlier: Sequence[Message] = ()) -> Sequence[Message]:
    """The chat messages of ``items``, which follow ``earlier``.

    Raises `PolicyRequestError` for items that are not supported; with ``check`` False they become text.
    """
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    if not isinstance(items, list):
        raise PolicyRequestError(f"input is {items!r}; expected a string or a list of items", param="input")
    messages: list[dict[str, Any]] = []
    ids = call_ids(earlier) if check else set[str]()
    open_turn = False  # whether following function calls belong to the last message
    for i, item in enumerate(items):
        path = f"input.{i}"
        if check and isinstance(item, dict):
            check_variant(ITEMS, item, path, default="message")
        match item:
            case {"type": "function_call", "call_id": str(id), "name": str(name), "arguments": str(arguments)}:
                if not open_turn:
                    messages.append({"role": "assistant", "content": ""})
                call = {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
                messages[-1].setdefault("tool_calls", []).append(call)
                ids.add(id)
                open_turn = True
            case {"type": "function_call_output", "call_id": str(id), "output": output}:
                if check:
                    check_result(id, ids, f"{path}.call_id")
                content = _text(output, f"{path}.output", check=check)
                messages.append({"role": "tool", "tool_call_id": id, "content": content})
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
                        f"{path} is {item!r}; expected a message, a function_call or a function_call_output with all of its fields",
                        param=path,
                    )
                messages.append({"role": "user", "content": json.dumps(item)})
                open_turn = False
    return messages


def _text(content: Any, path: str, *, check: bool) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, (list, type(None))):
        raise PolicyRequestError(f"{path} is {content!r}; expected a string or a list of parts", param=path)
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
                    f"{path}.{i} is {part!r}; expected a text part: the model reads text only", param=f"{path}.{i}"
                )
    return "".join(texts)


def function_tool(tool: Mapping[str, Any], index: int, *, check: bool) -> Mapping[str, Any]:
    """``tool`` as chat completions define it, with the fields that the model is shown."""
    if tool.get("type") != "function":
        if check:
            path = f"tools.{index}.type"
            raise PolicyRequestError(
                f"{path} is {tool.get('type')!r}; expected 'function': {NO_HOSTED_TOOLS}", param=path
            )
        return tool
    if check:
        TOOL.check(tool, f"tools.{index}")
    function = {name: tool[name] for name in ("name", "description", "parameters") if tool.get(name) is not None}
    return {"type": "function", "function": function}
