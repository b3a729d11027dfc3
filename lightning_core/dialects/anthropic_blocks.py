"""Converts messages, blocks and tools of Anthropic's Messages API to a chat and back."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from types import NoneType
from typing import Any, cast

from lightning_core.chat.json_text import show_json
from lightning_core.chat.messages import READS_TEXT, Message
from lightning_core.dialects.fields import (
    NO_HOSTED_TOOLS,
    NO_SEARCH,
    Fields,
    UnsupportedField,
    check_function,
    check_left_out,
    check_variant,
    note,
    refused_tool,
)
from lightning_core.dialects.openai_chat_shape import check_result, check_role
from lightning_core.errors import PolicyRequestError

_ROLES = ("user", "assistant", "system")

MESSAGE = Fields(supported=frozenset({"role", "content"}), ignored=frozenset({"id", "output_config"}))

_DIRECT = UnsupportedField(NO_HOSTED_TOOLS, unless=({"type": "direct"},))
_TOOLSET = UnsupportedField(NO_HOSTED_TOOLS)
BLOCKS: Mapping[str, Fields] = {
    "text": Fields(
        supported=frozenset({"type", "text"}), ignored=frozenset({"cache_control", "citations", "parsed_output"})
    ),
    "tool_use": Fields(
        supported=frozenset({"type", "id", "name", "input"}),
        ignored=frozenset({"cache_control"}),
        refused={"caller": _DIRECT, "toolset_name": _TOOLSET},
    ),
    "tool_result": Fields(
        supported=frozenset({"type", "tool_use_id", "content", "is_error"}),
        ignored=frozenset({"cache_control"}),
        refused={"toolset_name": _TOOLSET},
    ),
    "tool_reference": Fields(supported=frozenset({"type", "tool_name"}), ignored=frozenset({"cache_control"})),
    # Reasoning sampled here is known to the endpoint; other models' reasoning is not shown to this model.
    "thinking": Fields(supported=frozenset({"type"}), ignored=frozenset({"thinking", "signature"})),
    "redacted_thinking": Fields(supported=frozenset({"type"}), ignored=frozenset({"data"})),
}
"""Fields of a content block, by its type."""

TOOL = Fields(
    supported=frozenset({"type", "name", "description", "input_schema", "input_examples", "defer_loading"}),
    # Arguments are never constrained to the schema, so the model is not shown `strict`.
    ignored=frozenset({"cache_control", "eager_input_streaming", "strict"}),
    refused={
        "allowed_callers": UnsupportedField(NO_HOSTED_TOOLS, unless=(["direct"], [])),
    },
)


_SEARCH = "tool_search_tool_"
_LEFT_OUT = ("web_search_", "web_fetch_", _SEARCH)
"""Starts of the types of a provider's tools that clients offer by default. They work without them."""


def to_chat(
    messages: Sequence[Mapping[str, Any]], *, check: bool, definitions: Mapping[str, str] | None = None
) -> Sequence[Message]:
    """The chat messages of ``messages``. ``definitions``: of the tools that a tool search may have found.

    Raises `PolicyRequestError` for unsupported content; with ``check`` False it becomes text.
    """
    chat: list[Message] = []
    ids: set[str] = set()
    for i, message in enumerate(messages):
        path = f"messages.{i}"
        if check:
            MESSAGE.check(message, path)
            check_role(message.get("role"), _ROLES, path)
        content, path = message.get("content"), f"{path}.content"
        role = message.get("role")
        if isinstance(content, str):
            chat.append({"role": str(role), "content": content})
            continue
        blocks = _blocks(content, path)
        if check:
            _check_blocks(blocks, path, ids)
        if role == "assistant":
            chat.append(_assistant(blocks, path, check=check))
        else:
            chat += _user(str(role), blocks, path, definitions or {}, check=check)
    return chat


def _blocks(content: Any, path: str) -> Sequence[Any]:
    if not isinstance(content, (list, type(None))):
        raise PolicyRequestError(f"{path} is {show_json(content)}; expected a string or a list of blocks", param=path)
    return content or ()


def _check_blocks(blocks: Sequence[Any], path: str, ids: set[str]) -> None:
    """Check the fields of ``blocks``.

    ``ids`` of tool calls are added to, and looked up for results.
    """
    for i, block in enumerate(blocks):
        if isinstance(block, dict):
            check_variant(BLOCKS, block, f"{path}.{i}")
        match block:
            case {"type": "tool_use", "id": str(id)}:
                ids.add(id)
            case {"type": "tool_result", "tool_use_id": str(id)}:
                check_result(id, ids, f"{path}.{i}.tool_use_id")
                if not isinstance(block.get("is_error"), (bool, type(None))):
                    where = f"{path}.{i}.is_error"
                    raise PolicyRequestError(
                        f"{where} is {show_json(block['is_error'])}; expected true or false", param=where
                    )
            case _:
                pass


def _assistant(blocks: Sequence[Any], path: str, *, check: bool) -> Message:
    texts: list[str] = []
    calls: list[dict[str, Any]] = []
    for i, block in enumerate(blocks):
        match block:
            case {"type": "tool_use", "id": str(id), "name": str(name), "input": dict() | str() as arguments}:
                # Arguments that were no JSON object were returned as a string, and come back as one.
                written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
                calls.append({"id": id, "type": "function", "function": {"name": name, "arguments": written}})
            case {"type": "thinking" | "redacted_thinking"}:
                pass
            case _:
                texts.append(_text(block, f"{path}.{i}", check=check))
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    return {**message, "tool_calls": calls} if calls else message


def _user(role: str, blocks: Sequence[Any], path: str, definitions: Mapping[str, str], *, check: bool) -> list[Message]:
    """One message for each tool result, and one for each run of text between them."""
    chat: list[Message] = []
    texts: list[str] = []

    def flush() -> None:
        if texts:
            chat.append({"role": role, "content": "".join(texts)})
            texts.clear()

    for i, block in enumerate(blocks):
        where = f"{path}.{i}"
        match block:
            case {"type": "tool_result", "tool_use_id": str(id)}:
                flush()
                inner = block.get("content")
                if isinstance(inner, list):
                    inner = [_found(part, definitions) for part in cast("list[Any]", inner)]
                result = text_of(inner, f"{where}.content", check=check)
                content = f"Error: {result}" if block.get("is_error") else result
                chat.append({"role": "tool", "tool_call_id": id, "content": content})
            case _:
                texts.append(_text(block, where, check=check))
    flush()
    return chat or [{"role": role, "content": ""}]


def _found(block: Any, definitions: Mapping[str, str]) -> Any:
    """A result of a tool search as the text of the tool's definition; other blocks unchanged."""
    match block:
        case {"type": "tool_reference", "tool_name": str(name)} if name in definitions:
            return {"type": "text", "text": f"{definitions[name]}\n"}
        case _:
            return block


def text_of(content: Any, path: str, *, check: bool) -> str:
    """The text of a string or of a list of text blocks.

    Raises `PolicyRequestError` for other blocks; with ``check`` False they become text.
    """
    if isinstance(content, str):
        return content
    texts: list[str] = []
    for i, block in enumerate(_blocks(content, path)):
        where = f"{path}.{i}"
        if check and isinstance(block, dict):
            check_variant(BLOCKS, block, where)
        texts.append(_text(block, where, check=check))
    return "".join(texts)


def _text(block: Any, path: str, *, check: bool) -> str:
    match block:
        case {"type": "text", "text": str(text)}:
            return text
        case _ if not check:
            return json.dumps(block)
        case _:
            raise PolicyRequestError(
                f"{path} is {show_json(block)}; expected a text, tool_use or tool_result block with all of its fields: {READS_TEXT}",
                param=path,
            )


def to_blocks(message: Message) -> list[dict[str, Any]]:
    """The content blocks of an assistant message."""
    blocks: list[dict[str, Any]] = []
    if message.get("reasoning_content"):
        blocks.append({"type": "thinking", "thinking": message["reasoning_content"], "signature": ""})
    if message.get("content"):
        blocks.append({"type": "text", "text": message["content"]})
    for call in message.get("tool_calls") or ():
        function = call["function"]
        try:
            arguments = json.loads(function["arguments"])
        except ValueError:
            arguments = None
        if not isinstance(arguments, dict):
            arguments = function["arguments"]
        blocks.append({"type": "tool_use", "id": call["id"], "name": function["name"], "input": arguments})
    return blocks


def read_tools(tools: Sequence[Mapping[str, Any]], *, check: bool) -> tuple[list[Mapping[str, Any]], dict[str, str]]:
    """The tools that the model is shown, as chat completions define them, and the definitions of all tools by name.

    A deferred tool is shown where a result of the client's tool search names it. Raises `PolicyRequestError` for tools that are not
    supported.
    """
    kinds = [str(tool.get("type") or "custom") for tool in tools]
    left_out = [kind for kind in kinds if kind.startswith(_LEFT_OUT)]
    if check:
        check_left_out(left_out, left=len(left_out) < len(tools))
    provider_searches = any(kind.startswith(_SEARCH) for kind in kinds)
    shown: list[Mapping[str, Any]] = []
    definitions: dict[str, str] = {}
    for i, (tool, kind) in enumerate(zip(tools, kinds, strict=True)):
        if check and kind in left_out:
            note(f"tools.{i} ({kind})", NO_SEARCH)
            continue
        function = _function_tool(tool, i, check=check)
        definitions[str(tool.get("name"))] = json.dumps(function.get("function", function), ensure_ascii=False)
        if not check or provider_searches or tool.get("defer_loading") is not True:
            shown.append(function)
    return shown, definitions


def _function_tool(tool: Mapping[str, Any], index: int, *, check: bool) -> Mapping[str, Any]:
    """``tool`` as chat completions define it, with the fields that the model is shown."""
    if tool.get("type") not in (None, "custom"):
        if check:
            path = f"tools.{index}.type"
            raise refused_tool(tool.get("type"), path, ["custom"])
        return tool
    if check:
        TOOL.check(tool, f"tools.{index}")
        check_function(tool, f"tools.{index}", "input_schema")
    function = {name: tool[name] for name in ("name", "description") if tool.get(name) is not None}
    examples = tool.get("input_examples")
    if not isinstance(examples, (list, NoneType)):
        path = f"tools.{index}.input_examples"
        raise PolicyRequestError(f"{path} is {show_json(examples)}; expected a list of objects", param=path)
    if examples:
        written = "\n".join(json.dumps(example, ensure_ascii=False) for example in examples)
        function["description"] = f"{function.get('description', '')}\nExamples of the input:\n{written}".lstrip()
    return {"type": "function", "function": {**function, "parameters": tool.get("input_schema") or {}}}
