"""The messages, content blocks and tools of Anthropic's Messages API as those of a chat, and back."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from lightning_core.endpoint.dialects.chat_shape import check_role
from lightning_core.endpoint.dialects.exchange import Message
from lightning_core.errors import PolicyRequestError

_ROLES = ("user", "assistant", "system")


def to_chat(messages: Sequence[Mapping[str, Any]], *, check: bool) -> Sequence[Message]:
    """The chat messages that ``messages`` stand for. Raises `PolicyRequestError` for what is no part of a chat, unless ``check`` is off."""
    chat: list[Message] = []
    for i, message in enumerate(messages):
        content = message.get("content")
        if check:
            check_role(message.get("role"), _ROLES, f"messages[{i}]")
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else _blocks(content, f"messages[{i}]")
        if message.get("role") == "assistant":
            chat.append(_assistant(blocks, f"messages[{i}]", check=check))
        else:
            chat += _user(str(message.get("role")), blocks, f"messages[{i}]", check=check)
    return chat


def _blocks(content: Any, where: str) -> Sequence[Any]:
    if not isinstance(content, (list, type(None))):
        raise PolicyRequestError(f"{where}.content is {content!r}; expected a string or a list of blocks", param=where)
    return content or ()


def _assistant(blocks: Sequence[Any], where: str, *, check: bool) -> Message:
    texts: list[str] = []
    calls: list[dict[str, Any]] = []
    for block in blocks:
        match block:
            case {"type": "tool_use", "id": str(id), "name": str(name), "input": arguments}:
                # What was no JSON came back as the string that it is.
                written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
                calls.append({"id": id, "type": "function", "function": {"name": name, "arguments": written}})
            case {"type": "thinking" | "redacted_thinking"}:
                pass  # another model's, or known here
            case _:
                texts.append(text_of([block], where, check=check))
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    return {**message, "tool_calls": calls} if calls else message


def _user(role: str, blocks: Sequence[Any], where: str, *, check: bool) -> list[Message]:
    """Each tool result is a message of its own; the text around them is the user's."""
    chat: list[Message] = []
    texts: list[Any] = []

    def say() -> None:
        if texts:
            chat.append({"role": role, "content": text_of(texts, where, check=check)})
            texts.clear()

    for block in blocks:
        match block:
            case {"type": "tool_result", "tool_use_id": str(id)}:
                say()
                result = text_of(block.get("content") or "", where, check=check)
                content = f"Error: {result}" if block.get("is_error") else result
                chat.append({"role": "tool", "tool_call_id": id, "content": content})
            case _:
                texts.append(block)
    say()
    return chat or [{"role": role, "content": ""}]


def text_of(content: Any, where: str, *, check: bool) -> str:
    """The text of a string or of text blocks. Raises `PolicyRequestError` if there is anything else, unless ``check`` is off."""
    if isinstance(content, str):
        return content
    texts: list[str] = []
    for block in _blocks(content, where):
        match block:
            case {"type": "text", "text": str(text)}:
                texts.append(text)
            case _ if not check:
                texts.append(json.dumps(block))
            case _:
                raise PolicyRequestError(
                    f"{where} has a content block {block!r}; this model reads text, tool_use and tool_result blocks",
                    param=where,
                )
    return "".join(texts)


def to_blocks(message: Message) -> list[dict[str, Any]]:
    """The content blocks of a chat's assistant message."""
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
            arguments = function["arguments"]
        blocks.append({"type": "tool_use", "id": call["id"], "name": function["name"], "input": arguments})
    return blocks


def function_tool(tool: Mapping[str, Any], index: int, *, check: bool) -> Mapping[str, Any]:
    """A tool as chat completions write it. A schema's ``strict`` is not enforced, so the model is not told of it."""
    if tool.get("type") not in (None, "custom"):
        if check:
            raise PolicyRequestError(
                f"tools[{index}] has the type {tool.get('type')!r}; only the caller's own tools can be called here",
                param="tools",
            )
        return tool
    function = {name: tool[name] for name in ("name", "description") if tool.get(name) is not None}
    return {"type": "function", "function": {**function, "parameters": tool.get("input_schema") or {}}}
