"""The messages and functions of a chat, checked as far as rendering them relies on."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from lightning_core.errors import PolicyRequestError

_ROLES = ("system", "developer", "user", "assistant", "tool")
_NOT_TEXT = ("audio", "function_call")
"""Fields of a message that hold what a chat of text cannot."""


def check_messages(messages: Sequence[Any]) -> None:
    """Raises `PolicyRequestError` naming the message of chat completions that is none."""
    for i, message in enumerate(messages):
        where = f"messages[{i}]"
        if not isinstance(message, Mapping):
            raise PolicyRequestError(f"{where} is {message!r}; expected an object", param=where)
        check_role(message.get("role"), _ROLES, where)
        for name in ("name", "tool_call_id"):
            if not isinstance(message.get(name), (str, type(None))):
                raise PolicyRequestError(f"{where}.{name} is {message[name]!r}; expected a string", param=where)
        for name in _NOT_TEXT:
            if message.get(name) is not None:
                raise PolicyRequestError(f"{where}.{name}: this model reads text and tool calls only", param=where)
        _check_calls(message.get("tool_calls"), where)


def check_role(role: Any, roles: Collection[str], where: str) -> None:
    """Raises `PolicyRequestError` if a message's role is none of ``roles``."""
    if not isinstance(role, str) or role not in roles:
        raise PolicyRequestError(f"{where}.role is {role!r}; expected one of {list(roles)!r}", param=where)


def _check_calls(calls: Any, where: str) -> None:
    if not isinstance(calls, (list, type(None))):
        raise PolicyRequestError(f"{where}.tool_calls is {calls!r}; expected a list", param=where)
    for call in calls or ():
        match call:
            case {"function": {"name": str(), "arguments": str()}} if call.get("type", "function") == "function":
                pass
            case _:
                raise PolicyRequestError(
                    f"{where}.tool_calls has {call!r}; expected a function with a name and arguments as a string",
                    param=where,
                )


def check_tools(tools: Sequence[Mapping[str, Any]]) -> None:
    """Raises `PolicyRequestError` for a tool that is no function as chat completions write it."""
    for i, tool in enumerate(tools):
        match tool:
            case {
                "type": "function",
                "function": {"name": str(name), **more},
            } if name and _is(more.get("description"), str) and _is(more.get("parameters"), Mapping):
                pass
            case _:
                raise PolicyRequestError(
                    f"tools[{i}] is {tool!r}; expected a function with a name, a description and parameters",
                    param="tools",
                )


def _is(value: Any, kind: type) -> bool:
    return value is None or isinstance(value, kind)
