"""Requests and responses as tracing products record them, as messages of chat completions.

They have the form of the API that was called: OpenAI's chat completions or Responses, Anthropic's Messages, LangChain's messages in
three serializations, or plain text. `message_forms` has one message; here are lists of them, requests and responses.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

from lightning_core.tools.interchange.message_forms import ChatMessage, convert_message, is_message


class RecordedExchange(NamedTuple):
    """A request and its response; None or empty is what was not recorded."""

    messages: list[ChatMessage]
    tools: list[Any] | None
    response: ChatMessage | None
    finish_reason: str | None


def read_exchange(request: Any, answer: Any) -> RecordedExchange:
    """The messages of ``request`` and of ``answer``, each JSON or text in any of the forms above.

    Raises ValueError for a message that has none of them.
    """
    request, answer = decode(request), decode(answer)
    message, reason = _response(answer)
    return RecordedExchange(list(_prompt(request)), find_tools(request), message, reason)


def decode(value: Any) -> Any:
    """``value``, or the JSON that it is the text of."""
    if not isinstance(value, str) or value.lstrip()[:1] not in ("{", "["):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value


def find_tools(request: Any) -> list[Any] | None:
    """The tool definitions of a request, in the form of chat completions; None without any."""
    body = mapping(request)
    places = (body, mapping(body.get("invocation_params")), mapping(body.get("kwargs")))
    found = next((place[key] for place in places for key in ("tools", "functions") if place.get(key)), None)
    return tool_definitions(found)


def tool_definitions(found: Any) -> list[Any] | None:
    """A list of tool definitions of any API, in the form of chat completions; None for anything else."""
    tools = [_tool(mapping(tool)) for tool in sequence(decode(found)) if isinstance(tool, Mapping)]
    return tools or None


def _tool(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    if "function" in tool or "name" not in tool:
        return tool
    parameters = tool.get("parameters") or tool.get("input_schema") or {"type": "object", "properties": {}}
    function = {"name": tool["name"], "description": tool.get("description"), "parameters": parameters}
    return {"type": "function", "function": {key: value for key, value in function.items() if value is not None}}


def _prompt(request: Any) -> Iterator[ChatMessage]:
    if isinstance(request, str):
        yield {"role": "user", "content": request}
        return
    if isinstance(request, Sequence):
        yield from _messages(cast("Sequence[Any]", request), "user")
        return
    body = mapping(request)
    if is_message(body):
        yield from convert_message(body, "user")
        return
    for key in ("system", "instructions"):
        if body.get(key):
            yield from convert_message({"role": "system", "content": body[key]}, "system")
    found = next((body[key] for key in ("messages", "input", "prompt", "prompts", "question") if body.get(key)), None)
    if found is not None:
        yield from _prompt(found)


def _response(answer: Any) -> tuple[ChatMessage | None, str | None]:
    """The message of a response, and the reason it ended."""
    if answer is None or answer in ("", {}, []):
        return None, None
    if isinstance(answer, str):
        return {"role": "assistant", "content": answer}, None
    if isinstance(answer, Sequence):
        items = list(cast("Sequence[Any]", answer))
        if len(items) == 1 and isinstance(items[0], (list, Mapping)) and not is_message(mapping(items[0])):
            return _response(items[0])
        return _joined(_messages(items, "assistant")), None
    body = mapping(answer)
    choices, generations = sequence(body.get("choices")), sequence(body.get("generations"))
    if choices:
        choice = mapping(choices[0])
        given = choice.get("message") or {"content": choice.get("text")}
        return _joined(convert_message(mapping(given), "assistant")), text_or_none(choice.get("finish_reason"))
    if generations:
        return _generation(generations[0])
    if sequence(body.get("output")) and not is_message(body):  # Responses
        return _joined(_messages(sequence(body["output"]), "assistant")), text_or_none(body.get("status"))
    if is_message(body):
        return _joined(convert_message(body, "assistant")), text_or_none(body.get("stop_reason"))
    found = next((body[key] for key in ("message", "messages", "output", "content", "text") if body.get(key)), None)
    return _response(found)


def _generation(found: Any) -> tuple[ChatMessage | None, str | None]:
    """LangChain's ``generations``: a list for each prompt, whose items have a text, and of chat models a message."""
    first = sequence(found)[0] if sequence(found) else found
    generation = mapping(first)
    given = mapping(generation.get("message"))
    metadata = mapping((mapping(given.get("kwargs")) or given).get("response_metadata"))
    info = mapping(generation.get("generation_info")) or metadata
    reason = text_or_none(info.get("finish_reason") or metadata.get("finish_reason"))
    return _joined(convert_message(given or {"content": generation.get("text")}, "assistant")), reason


def _messages(items: Iterable[Any], role: str) -> Iterator[ChatMessage]:
    for item in items:
        item = decode(item)
        if isinstance(item, str):
            yield {"role": role, "content": item}
        elif isinstance(item, Sequence):  # LangChain: a list for each prompt
            yield from _messages(cast("Sequence[Any]", item), role)
        else:
            yield from convert_message(mapping(item), role)


def _joined(messages: Iterable[ChatMessage]) -> ChatMessage | None:
    """One message of the parts of a response: its text, reasoning and tool calls."""
    parts = list(messages)
    if not parts:
        return None
    texts = [part["content"] for part in parts if isinstance(part.get("content"), str)]
    thoughts = [part["reasoning_content"] for part in parts if part.get("reasoning_content")]
    calls = [call for part in parts for call in part.get("tool_calls") or ()]
    content = "".join(texts) if texts or len(parts) > 1 else parts[0].get("content")
    message: ChatMessage = {"role": "assistant", "content": content or None}
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    return {**message, "tool_calls": calls} if calls else message


def mapping(value: Any) -> Mapping[str, Any]:
    """``value`` if it is an object, otherwise an empty one."""
    return cast("Mapping[str, Any]", value) if isinstance(value, Mapping) else {}


def sequence(value: Any) -> Sequence[Any]:
    """``value`` if it is a list, otherwise an empty one."""
    return cast("Sequence[Any]", value) if isinstance(value, (list, tuple)) else ()


def text_or_none(value: Any) -> str | None:
    """``value`` if it is a text that is not empty."""
    return value if isinstance(value, str) and value else None
