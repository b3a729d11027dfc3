"""One message of OpenAI, Anthropic or LangChain as messages of chat completions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from lightning_core.otel.flattened import as_text, tool_call

ChatMessage = dict[str, Any]

_ROLES = {
    "human": "user",
    "ai": "assistant",
    "AIMessageChunk": "assistant",
    "model": "assistant",
    "developer": "system",
}
_LANGCHAIN = {
    "HumanMessage": "user", "AIMessage": "assistant", "SystemMessage": "system", "ToolMessage": "tool", "FunctionMessage": "tool",
}  # fmt: skip
_TYPES = ("human", "ai", "system", "tool", "AIMessageChunk")


def is_message(value: Mapping[str, Any]) -> bool:
    """Whether ``value`` is a message, rather than a request or a response that has some."""
    return (
        ("role" in value and ("content" in value or "tool_calls" in value or "parts" in value))
        or value.get("lc") is not None
        or (value.get("type") in _TYPES and ("data" in value or "content" in value))
    )


def convert_message(message: Mapping[str, Any], role: str) -> Iterator[ChatMessage]:
    """The messages that ``message`` is in chat completions: several if it has the results of several tools.

    ``role``: of a message without one. Raises ValueError for an item that is no message.
    """
    if message.get("lc") is not None:
        name = str((message.get("id") or ("",))[-1]).removesuffix("Chunk")
        if name not in _LANGCHAIN and "role" not in message.get("kwargs", {}):
            raise ValueError(f"expected a message of LangChain, found a {name or 'value without a class'}")
        yield from _with_role(message["kwargs"], _LANGCHAIN.get(name) or str(message["kwargs"]["role"]))
        return
    kind = message.get("type")
    if kind in _TYPES and isinstance(message.get("data"), Mapping):
        message = cast("Mapping[str, Any]", message["data"])
    match kind:
        case "function_call" | "custom_tool_call":
            arguments = message.get("arguments", message.get("input"))
            calls = [tool_call(message.get("call_id") or message.get("id"), message.get("name"), arguments)]
            yield {"role": "assistant", "content": None, "tool_calls": calls}
        case "function_call_output" | "custom_tool_call_output":
            yield _result(message.get("call_id"), message.get("output"))
        case "reasoning":
            parts = [*_list(message.get("summary")), *_list(message.get("content"))]
            thought = "\n".join(str(part.get("text", "")) for part in parts if isinstance(part, Mapping))
            yield {"role": "assistant", "content": None, **({"reasoning_content": thought} if thought else {})}
        case _:
            given = message.get("role") or (kind if kind in _TYPES else None) or role
            yield from _with_role(message, str(given))


def _with_role(message: Mapping[str, Any], role: str) -> Iterator[ChatMessage]:
    role = _ROLES.get(role, role)
    if "content" not in message and not message.get("tool_calls") and "parts" not in message:
        raise ValueError(f"expected a message with content, found the keys {sorted(message)!r:.100}")
    extra: Mapping[str, Any] = message.get("additional_kwargs") or {}
    calls = [_call(call) for call in _list(message.get("tool_calls")) or _list(extra.get("tool_calls"))]
    if role in ("tool", "function"):
        yield _result(message.get("tool_call_id") or message.get("id"), _plain(message.get("content")))
        return
    texts: list[Any] = []
    thoughts: list[str] = []
    results: list[ChatMessage] = []
    content = message.get("content", message.get("parts"))
    for part in _list(content):
        block: Mapping[str, Any] = part if isinstance(part, Mapping) else {"type": "text", "text": part}
        match block.get("type"):
            case "tool_use":
                if not any(call["id"] == block.get("id") for call in calls):
                    calls.append(tool_call(block.get("id"), block.get("name"), block.get("input")))
            case "tool_result":
                results.append(_result(block.get("tool_use_id"), _plain(block.get("content"))))
            case "thinking" | "reasoning":
                thoughts.append(str(block.get("thinking") or block.get("text") or block.get("content") or ""))
            case "text" | "input_text" | "output_text" | None:
                texts.append(str(block.get("text") or block.get("content") or ""))
            case "function_call":  # LangChain's content of the Responses API; the call is in tool_calls too
                continue
            case kind:
                texts.append({"type": str(kind)})
    yield from results
    if results and not texts and not calls:
        return
    thought = message.get("reasoning_content") or extra.get("reasoning_content") or "\n".join(filter(None, thoughts))
    converted: ChatMessage = {
        "role": role,
        "content": _content(texts) if isinstance(content, (list, tuple)) else content,
    }
    if isinstance(thought, str) and thought:
        converted["reasoning_content"] = thought
    if isinstance(message.get("name"), str) and role != "assistant":
        converted["name"] = message["name"]
    yield {**converted, "tool_calls": calls} if calls else converted


def _call(call: Any) -> dict[str, Any]:
    """A tool call of OpenAI, or of LangChain (``name``, ``args``)."""
    if not isinstance(call, Mapping):
        raise ValueError(f"expected a tool call, found {call!r:.100}")
    given = cast("Mapping[str, Any]", call)
    function = given.get("function")
    source = cast("Mapping[str, Any]", function) if isinstance(function, Mapping) else given
    return tool_call(given.get("id"), source.get("name"), source.get("arguments", source.get("args")))


def _result(identity: Any, content: Any) -> ChatMessage:
    return {"role": "tool", "tool_call_id": str(identity or ""), "content": as_text("" if content is None else content)}


def _plain(content: Any) -> Any:
    """The text of a tool's result; anything but a list of texts stays as it is."""
    parts = _list(content)
    if parts and all(isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in parts):
        return "".join(part["text"] for part in parts)
    return content


def _content(texts: Sequence[Any]) -> Any:
    if all(isinstance(text, str) for text in texts):
        return "".join(texts) or None
    return [{"type": "text", "text": text} if isinstance(text, str) else text for text in texts]


def _list(value: Any) -> list[Any]:
    return list(cast("Sequence[Any]", value)) if isinstance(value, (list, tuple)) else []
