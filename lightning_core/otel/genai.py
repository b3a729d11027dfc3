"""OpenTelemetry's GenAI conventions to ours.

The attributes are the same; their messages consist of parts, ours have the form of chat
completions. The older form, messages as span events, is supported too.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, cast

from lightning_core import trace as tr
from lightning_core.otel.flattened import as_text, tool_call
from lightning_core.otel.otlp import GENAI_PREFIX, MESSAGE_EVENTS

_CALLS = ("chat", "text_completion", "generate_content")


def from_genai(name: str, attributes: Mapping[str, Any]) -> dict[str, Any] | None:
    """Our attributes for a span of this convention; None for any other span."""
    a = attributes
    match a.get(tr.OPERATION):
        case operation if operation in _CALLS:
            return {tr.OPERATION: "chat", **_call(a)}
        case "invoke_agent":
            return {tr.AGENT: str(a.get(tr.AGENT) or name.removeprefix("invoke_agent "))}
        case "execute_tool":
            return {tr.TOOL: str(a.get(tr.TOOL) or name.removeprefix("execute_tool ")), **_tool(a)}
        case _:
            return None


def _call(a: Mapping[str, Any]) -> dict[str, Any]:
    prompt, answers = _from_events(a)
    system = [{"role": "system", "content": _text(part)} for part in _objects(a.get(tr.SYSTEM_INSTRUCTIONS)) if part]
    prompt = [*system, *_read_messages(a.get(tr.INPUT_MESSAGES))] or prompt
    answers = _read_messages(a.get(tr.OUTPUT_MESSAGES)) or answers
    attributes: dict[str, Any] = {tr.INPUT_MESSAGES: json.dumps(prompt, ensure_ascii=False)}
    if answers:
        attributes[tr.OUTPUT_MESSAGES] = json.dumps(answers, ensure_ascii=False)
    return attributes


def _tool(a: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments and result of a tool, where a framework does not use the conventions' attributes for them."""
    attributes: dict[str, Any] = {}
    events = {str(event["name"]): event for event in _objects(a.get(MESSAGE_EVENTS))}
    for target, source, event, key in (
        (tr.TOOL_ARGUMENTS, "gcp.vertex.agent.tool_call_args", f"{GENAI_PREFIX}tool.message", "content"),
        (tr.TOOL_RESULT, "gcp.vertex.agent.tool_response", f"{GENAI_PREFIX}choice", "message"),
    ):
        value = a.get(source, events.get(event, {}).get(key))
        if value is not None and target not in a:
            attributes[target] = as_text(value)
    return attributes


def _read_messages(text: Any) -> list[dict[str, Any]]:
    return [converted for message in _objects(text) for converted in _convert(message)]


def _convert(message: Mapping[str, Any]) -> Iterable[dict[str, Any]]:
    """One message in our form; a message with several tool results becomes several."""
    if "parts" not in message:
        yield _flat_message(message, "user")
        return
    role = str(message.get("role") or "user")
    parts = _objects(message["parts"])
    results = [part for part in parts if part.get("type") == "tool_call_response"]
    for part in results:
        result = as_text(part.get("response", part.get("result")))
        yield {"role": "tool", "tool_call_id": str(part.get("id") or ""), "content": result}
    calls = [
        tool_call(part.get("id"), part.get("name"), part.get("arguments"))
        for part in parts
        if part.get("type") == "tool_call"
    ]
    content = [part for part in parts if part.get("type") not in ("tool_call", "tool_call_response")]
    if results and not calls and not content:
        return
    converted: dict[str, Any] = {"role": role, "content": _content(content)}
    if thought := "\n".join(_text(part) for part in content if part.get("type") == "reasoning"):
        converted["reasoning_content"] = thought
    yield {**converted, "tool_calls": calls} if calls else converted


def _content(parts: list[Mapping[str, Any]]) -> Any:
    texts = [_text(part) for part in parts if part.get("type", "text") == "text"]
    others = [{"type": str(part["type"])} for part in parts if part.get("type", "text") not in ("text", "reasoning")]
    if others:
        return [{"type": "text", "text": text} for text in texts] + others
    return "".join(texts) if texts else None


def _text(part: Mapping[str, Any]) -> str:
    return as_text(part.get("content", part.get("text", "")))


def _from_events(a: Mapping[str, Any]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Input and output messages from the events ``gen_ai.user.message``, ``gen_ai.choice``, …"""
    prompt: list[dict[str, Any]] = []
    answers: list[dict[str, Any]] = []
    for event in _objects(a.get(MESSAGE_EVENTS)):
        kind = str(event["name"]).removeprefix(GENAI_PREFIX).removesuffix(".message")
        if kind == "choice":
            message = _decode_json(event.get("message", event))
            answers.append(
                _flat_message(message if isinstance(message, Mapping) else {"content": message}, "assistant")
            )
        elif str(event["name"]).endswith(".message"):
            prompt.append(_flat_message(event, "user" if kind not in ("system", "assistant", "tool") else kind))
    return prompt, answers


def _flat_message(message: Mapping[str, Any], role: str) -> dict[str, Any]:
    converted: dict[str, Any] = {"role": str(message.get("role") or role), "content": message.get("content")}
    if calls := [_flat_tool_call(call) for call in _objects(message.get("tool_calls"))]:
        converted["tool_calls"] = calls
    if isinstance(thought := message.get("reasoning_content"), str) and thought:
        converted["reasoning_content"] = thought
    if identity := message.get("tool_call_id") or (converted["role"] == "tool" and message.get("id")):
        converted["tool_call_id"] = str(identity)
    return converted


def _flat_tool_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    source = cast("Mapping[str, Any]", function) if isinstance(function, Mapping) else call
    return tool_call(call.get("id"), source.get("name"), source.get("arguments"))


def _objects(value: Any) -> list[Mapping[str, Any]]:
    """The objects in a list, which may be encoded as JSON; empty for anything else."""
    decoded = _decode_json(value)
    items = cast("list[Any]", decoded) if isinstance(decoded, (list, tuple)) else []
    return [item for item in items if isinstance(item, Mapping)]


def _decode_json(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value
