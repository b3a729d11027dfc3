"""The items and tools of OpenAI's Responses API as the messages and tools of a chat."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from lightning_core.endpoint.dialects.chat_shape import check_role
from lightning_core.endpoint.dialects.exchange import Message
from lightning_core.errors import PolicyRequestError

_ROLES = ("user", "assistant", "system", "developer")


def items_to_messages(items: Any, *, check: bool) -> Sequence[Message]:
    """The chat messages that ``items`` stand for. Raises `PolicyRequestError` for what is no part of a chat, unless ``check`` is off."""
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    if not isinstance(items, list):
        raise PolicyRequestError(f"input is {items!r}; expected a string or a list of items", param="input")
    messages: list[dict[str, Any]] = []
    open_turn = False  # whether the last message is an assistant's that function calls may still belong to
    for i, item in enumerate(items):
        match item:
            case {"type": "function_call", "call_id": str(id), "name": str(name), "arguments": str(arguments)}:
                if not open_turn:
                    messages.append({"role": "assistant", "content": ""})
                call = {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
                messages[-1].setdefault("tool_calls", []).append(call)
                open_turn = True
            case {"type": "function_call_output", "call_id": str(id), "output": output}:
                messages.append({"role": "tool", "tool_call_id": id, "content": _text(output, i, check=check)})
                open_turn = False
            case {"role": str(role), "content": content} if item.get("type", "message") == "message":
                if check:
                    check_role(role, _ROLES, f"input[{i}]")
                messages.append({"role": role, "content": _text(content, i, check=check)})
                open_turn = role == "assistant"
            case {"type": "reasoning"}:
                pass
            case _:
                if check:
                    raise PolicyRequestError(
                        f"input[{i}] is {item!r}; expected a message, function_call or function_call_output",
                        param=f"input[{i}]",
                    )
                messages.append({"role": "user", "content": json.dumps(item)})
                open_turn = False
    return messages


def _text(content: Any, index: int, *, check: bool) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, (list, type(None))):
        raise PolicyRequestError(
            f"input[{index}] has the content {content!r}; expected a string or a list of parts", param=f"input[{index}]"
        )
    texts: list[str] = []
    for part in content or ():
        match part:
            case {"type": "input_text" | "output_text" | "text", "text": str(text)}:
                texts.append(text)
            case {"type": "refusal", "refusal": str(text)}:
                texts.append(text)
            case _ if not check:
                texts.append(json.dumps(part))
            case _:
                raise PolicyRequestError(
                    f"input[{index}] has a content part {part!r}; this model reads text parts only",
                    param=f"input[{index}]",
                )
    return "".join(texts)


def function_tool(tool: Mapping[str, Any], index: int, *, check: bool) -> Mapping[str, Any]:
    """A tool as chat completions write it. A schema's ``strict`` is not enforced, so the model is not told of it."""
    if tool.get("type") != "function":
        if check:
            raise PolicyRequestError(
                f"tools[{index}] has the type {tool.get('type')!r}; only functions can be called here", param="tools"
            )
        return tool
    function = {name: tool[name] for name in ("name", "description", "parameters") if tool.get(name) is not None}
    return {"type": "function", "function": function}
