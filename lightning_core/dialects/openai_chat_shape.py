"""The nested fields of chat completions: messages, tool calls and tools, and their checks."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from lightning_core.chat.json_text import MOST_SHOWN, show_json
from lightning_core.dialects.fields import (
    TEXT_ONLY,
    Fields,
    UnsupportedField,
    check_choice,
    check_function,
    check_variant,
    refused_tool,
)
from lightning_core.dialects.openai_custom_tools import custom_function, read_input, write_arguments
from lightning_core.dialects.requirements import ANY_TOOL, allowed_tools, check_tool_choice, other_kind
from lightning_core.errors import PolicyRequestError, shorten

_BOOKKEEPING = frozenset({"annotations", "cache_control", "id", "index", "provider_specific_fields"})
"""The fields that clients add to the parts of an earlier response, or for another provider's cache."""

_ONLY_ASSISTANT = UnsupportedField("only an assistant message has tool calls", unless=([],))
_ONLY_TOOL = UnsupportedField("only a message of the role 'tool' has it")

_INPUT = Fields(
    supported=frozenset({"role", "content", "name"}),
    ignored=_BOOKKEEPING,
    refused={"tool_calls": _ONLY_ASSISTANT, "tool_call_id": _ONLY_TOOL},
)
MESSAGES: Mapping[str, Fields] = {
    "system": _INPUT,
    "developer": _INPUT,
    "user": _INPUT,
    "assistant": Fields(
        supported=frozenset({"role", "content", "name", "refusal", "tool_calls", "reasoning_content"}),
        # Reasoning sampled here is known to the endpoint; other models' reasoning is not shown to this model.
        ignored=_BOOKKEEPING | {"parsed", "reasoning", "reasoning_details", "thinking_blocks"},
        refused={
            "audio": UnsupportedField(TEXT_ONLY),
            "function_call": UnsupportedField("use tool_calls"),
            "partial": UnsupportedField("an assistant message cannot be continued", unless=(False,)),
            "prefix": UnsupportedField("an assistant message cannot be continued", unless=(False,)),
            "tool_call_id": _ONLY_TOOL,
        },
    ),
    "tool": Fields(
        supported=frozenset({"role", "content", "name", "tool_call_id"}),
        ignored=_BOOKKEEPING,
        refused={"tool_calls": _ONLY_ASSISTANT},
    ),
}
"""Fields of a message, by its role. ``name`` is given to the chat template."""

_PART = _BOOKKEEPING | {"extras", "logprobs", "prompt_cache_breakpoint"}
PARTS: Mapping[str, Fields] = {
    "text": Fields(supported=frozenset({"type", "text"}), ignored=_PART),
    "input_text": Fields(supported=frozenset({"type", "text"}), ignored=_PART),
    "refusal": Fields(supported=frozenset({"type", "refusal"}), ignored=_PART),
}
"""Fields of a content part, by its type."""

TOOL_CALL = Fields(
    supported=frozenset({"id", "type", "function.name", "function.arguments"}),
    ignored=frozenset({
        "cache_control", "extra_content", "index", "provider_specific_fields", "function.parsed_arguments",
        "function.provider_specific_fields",
    }),
)  # fmt: skip
TOOL = Fields(
    supported=frozenset({"type", "function.name", "function.description", "function.parameters"}),
    # Without a schema of the answer, arguments are not constrained, so the model is not shown `strict`.
    ignored=frozenset({"cache_control", "function.strict", "function.cache_control"}),
)
CUSTOM_TOOL = Fields(supported=frozenset({"type", "custom.name", "custom.description", "custom.format"}))
TOOL_CHOICES = {
    "function": Fields(supported=frozenset({"type", "function.name"})),
    "custom": Fields(supported=frozenset({"type", "custom.name"})),
    "allowed_tools": Fields(supported=frozenset({"type", "allowed_tools.mode", "allowed_tools.tools"})),
}


_TEXTS = ("name", "tool_call_id", "refusal")


_SPEAKERS = frozenset({"system", "user", "assistant"})


def check_messages(messages: Sequence[Any]) -> None:
    """Raise `PolicyRequestError` for the first message that is not supported."""
    ids: set[str] = set()
    for i, message in enumerate(messages):
        if (
            type(message) is dict
            and len(message) == 2
            and type(role := message.get("role")) is str
            and role in _SPEAKERS
            and type(message.get("content")) is str
        ):
            continue
        path = f"messages.{i}"
        if not isinstance(message, dict):
            raise PolicyRequestError(f"{path} is {show_json(message)}; expected an object", param=path)
        role = check_role(message.get("role"), MESSAGES, path)
        MESSAGES[role].check(message, path)
        for name in _TEXTS:
            if name in message and not isinstance(message[name], (str, type(None))):
                where = f"{path}.{name}"
                raise PolicyRequestError(f"{where} is {show_json(message[name])}; expected a string", param=where)
        if isinstance(content := message.get("content"), list):
            for j, part in enumerate(content):
                if isinstance(part, Mapping):
                    check_variant(PARTS, part, f"{path}.content.{j}")
        if (calls := message.get("tool_calls")) is not None:
            ids |= _check_calls(calls, f"{path}.tool_calls")
        if role == "tool":
            check_result(message.get("tool_call_id"), ids, f"{path}.tool_call_id")


def check_role(role: Any, roles: Collection[str], path: str) -> str:
    """The role of a message. Raises `PolicyRequestError` if it is not one of ``roles``."""
    check_choice(role, roles, f"{path}.role")
    return role


def check_result(call_id: str | None, ids: Collection[str], path: str) -> None:
    """Raise `PolicyRequestError` if ``call_id`` is not the id of an earlier tool call."""
    if call_id not in ids:
        known = shorten(", ".join(map(repr, sorted(ids))), MOST_SHOWN)
        raise PolicyRequestError(
            f"{path} is {show_json(call_id)}; expected the id of an earlier tool call ({known or 'there is none'}). "
            "Keep the assistant message with the call in front of its result",
            param=path,
        )


def call_ids(messages: Iterable[Mapping[str, Any]]) -> set[str]:
    """The ids of all tool calls in ``messages``."""
    return {call["id"] for message in messages for call in message.get("tool_calls") or () if call.get("id")}


def _check_calls(calls: Any, path: str) -> set[str]:
    """The ids of an assistant message's tool calls."""
    if not isinstance(calls, list):
        raise PolicyRequestError(f"{path} is {show_json(calls)}; expected a list", param=path)
    ids: set[str] = set()
    for i, call in enumerate(calls):
        where = f"{path}.{i}"
        match call:
            case {"function": {"name": str(), "arguments": str()}} if call.get("type", "function") == "function":
                TOOL_CALL.check(call, where)
            case _:
                raise PolicyRequestError(
                    f"{where} is {show_json(call)}; expected a function with a name and with arguments as a string",
                    param=where,
                )
        call_id = call.get("id")
        if isinstance(call_id, str):
            ids.add(call_id)
        elif call_id is not None:
            raise PolicyRequestError(f"{where}.id is {show_json(call_id)}; expected a string", param=f"{where}.id")
    return ids


def check_tools(tools: Sequence[Mapping[str, Any]], *, unique: bool = False) -> None:
    """Raise `PolicyRequestError` for the first tool that is not a valid function, and with ``unique`` for a repeated name."""
    names: set[str] = set()
    for i, tool in enumerate(tools):
        match tool:
            case {
                "type": "function",
                "function": {"name": str(name), **more},
            } if name and _is(more.get("description"), str) and _is(more.get("parameters"), Mapping):
                if unique and name in names:
                    raise PolicyRequestError(
                        f"tools has two tools with the name {show_json(name)}; expected a different name for each",
                        param="tools",
                    )
                names.add(name)
            case {"type": str(kind)} if kind not in ("function", "custom"):
                raise refused_tool(kind, f"tools.{i}.type", ["function", "custom"])
            case _:
                raise PolicyRequestError(
                    f"tools.{i} is {show_json(tool)}; expected a function with a name, and optionally a description and parameters",
                    param=f"tools.{i}",
                )


def function_tool(tool: Mapping[str, Any], index: int) -> Mapping[str, Any]:
    """``tool`` with the fields that the model is shown.

    Raises `PolicyRequestError` for fields that are not supported.
    """
    match tool:
        case {"type": "function", "function": dict(function)}:
            TOOL.check(tool, f"tools.{index}")
            check_function(function, f"tools.{index}.function")
            shown = {name: function[name] for name in _SHOWN if function.get(name) is not None}
            return {"type": "function", "function": shown}
        case {"type": "custom", "custom": {"name": str(name)} as custom}:
            CUSTOM_TOOL.check(tool, f"tools.{index}")
            match custom.get("format"):
                case {"type": "grammar", "grammar": dict(grammar)}:
                    return custom_function(name, custom.get("description"), grammar=grammar)
                case _:
                    return custom_function(name, custom.get("description"))
        case _:
            return tool


def read_tool_choice(
    body: Mapping[str, Any], tools: Sequence[Mapping[str, Any]]
) -> tuple[Sequence[Mapping[str, Any]], str | None]:
    """The tools that the model is shown, and the required one."""
    choice = body.get("tool_choice")
    if isinstance(choice, Mapping):
        check_variant(TOOL_CHOICES, choice, "tool_choice")
    match choice:
        case None | "auto":
            return tools, None
        case "none":
            return (), None
        case "required":
            tool = ANY_TOOL
        case {"type": "function", "function": {"name": str(tool)}} | {"type": "custom", "custom": {"name": str(tool)}}:
            pass
        case {"type": "allowed_tools", "allowed_tools": {"mode": "auto" | "required" as mode, "tools": list(allowed)}}:
            tools = allowed_tools([_name(entry) for entry in allowed], tools)
            tool = ANY_TOOL if mode == "required" else None
        case _:
            raise PolicyRequestError(
                f"tool_choice is {show_json(choice)}; expected 'auto', 'none', 'required', a function with a name, or allowed_tools with "
                "a mode and tools",
                param="tool_choice",
            )
    return tools, check_tool_choice(tool, tools)


def _name(entry: Any) -> str:
    match entry:
        case {"type": "function", "function": {"name": str(name)}} | {"type": "custom", "custom": {"name": str(name)}}:
            return name
        case _:
            return other_kind(entry)


def with_functions(messages: Sequence[Any]) -> Sequence[Any]:
    """``messages`` with calls of free-form tools as calls of functions."""
    return [
        {**message, "tool_calls": [_as_function(call) for call in calls]}
        if isinstance(message, dict)
        and isinstance(calls := message.get("tool_calls"), list)
        and any(map(_is_custom, calls))
        else message
        for message in messages
    ]


def _is_custom(call: Any) -> bool:
    return isinstance(call, dict) and call.get("type") == "custom"


def _as_function(call: Any) -> Any:
    match call:
        case {"type": "custom", "custom": {"name": str(name), "input": str(text)}}:
            function = {"name": name, "arguments": write_arguments(text)}
            return {**{k: v for k, v in call.items() if k != "custom"}, "type": "function", "function": function}
        case _:
            return call


def with_custom(message: Mapping[str, Any], tools: Any) -> Mapping[str, Any]:
    """A response with calls of the free-form ``tools`` as the client expects them."""
    custom = {tool["custom"]["name"] for tool in tools or () if tool.get("type") == "custom"}
    if not custom or not message.get("tool_calls"):
        return message
    return {**message, "tool_calls": [_as_custom(call, custom) for call in message["tool_calls"]]}


def _as_custom(call: Mapping[str, Any], names: Collection[str]) -> Mapping[str, Any]:
    function = call.get("function") or {}
    if function.get("name") not in names:
        return call
    written = {"name": function["name"], "input": read_input(function["arguments"])}
    return {"id": call["id"], "type": "custom", "custom": written}


_SHOWN = ("name", "description", "parameters")


def _is(value: Any, kind: type) -> bool:
    return value is None or isinstance(value, kind)
