"""OpenTelemetry's own GenAI conventions → ours, which are these but for the form of messages: theirs have parts, ours are chat
completions'. Before there were message attributes, messages were span events; that form is read too."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, cast

from lightning_core import trace as tr
from lightning_core.otel.flattened import as_text, tool_call
from lightning_core.otel.otlp import MESSAGE_EVENTS

_CALLS = ("chat", "text_completion", "generate_content")


def from_genai(name: str, attributes: Mapping[str, Any]) -> dict[str, Any] | None:
    """The attributes that a span of this convention has in ours, beside its own; None if it is none."""
    a = attributes
    match a.get(tr.OPERATION):
        case operation if operation in _CALLS:
            return {tr.OPERATION: "chat", **_call(a)}
        case "invoke_agent":
            return {tr.AGENT: str(a.get(tr.AGENT) or name.removeprefix("invoke_agent "))}
        case "execute_tool":
            return {tr.TOOL: str(a.get(tr.TOOL) or name.removeprefix("execute_tool "))}
        case _:
            return None


def _call(a: Mapping[str, Any]) -> dict[str, Any]:
    given, answers = _from_events(a)
    system = [
        {"role": "system", "content": _text(part)} for part in _objects(a.get("gen_ai.system_instructions")) if part
    ]
    given = [*system, *_all_of(a.get("gen_ai.input.messages"))] or given
    answers = _all_of(a.get("gen_ai.output.messages")) or answers
    found: dict[str, Any] = {"gen_ai.input.messages": json.dumps(given, ensure_ascii=False)}
    if answers:
        found["gen_ai.output.messages"] = json.dumps(answers, ensure_ascii=False)
    return found


def _all_of(text: Any) -> list[dict[str, Any]]:
    return [found for message in _objects(text) for found in _messages(message)]


def _messages(message: Mapping[str, Any]) -> Iterable[dict[str, Any]]:
    """One message of theirs as ours; one that holds the results of several tools becomes several."""
    if "parts" not in message:
        yield _said(message, "user")
        return
    role = str(message.get("role") or "user")
    parts = _objects(message["parts"])
    results = [part for part in parts if part.get("type") == "tool_call_response"]
    for part in results:
        content = part.get("response", part.get("result"))
        yield {"role": "tool", "tool_call_id": str(part.get("id") or ""), "content": as_text(content)}
    calls = [
        tool_call(part.get("id"), part.get("name"), part.get("arguments"))
        for part in parts
        if part.get("type") == "tool_call"
    ]
    said = [part for part in parts if part.get("type") not in ("tool_call", "tool_call_response")]
    if results and not calls and not said:
        return
    found: dict[str, Any] = {"role": role, "content": _content(said)}
    yield {**found, "tool_calls": calls} if calls else found


def _content(parts: list[Mapping[str, Any]]) -> Any:
    texts = [_text(part) for part in parts if part.get("type", "text") == "text"]
    others = [{"type": str(part["type"])} for part in parts if part.get("type", "text") not in ("text", "reasoning")]
    if others:
        return [{"type": "text", "text": text} for text in texts] + others
    return "".join(texts) if texts else None


def _text(part: Mapping[str, Any]) -> str:
    return as_text(part.get("content", part.get("text", "")))


def _from_events(a: Mapping[str, Any]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Messages in ``gen_ai.user.message``, ``gen_ai.choice`` and the like."""
    given: list[dict[str, Any]] = []
    answers: list[dict[str, Any]] = []
    for event in _objects(a.get(MESSAGE_EVENTS)):
        kind = str(event["name"]).removeprefix("gen_ai.").removesuffix(".message")
        if kind == "choice":
            message = _decoded(event.get("message", event))
            answers.append(_said(message if isinstance(message, Mapping) else {"content": message}, "assistant"))
        elif str(event["name"]).endswith(".message"):
            given.append(_said(event, "user" if kind not in ("system", "assistant", "tool") else kind))
    return given, answers


def _said(told: Mapping[str, Any], role: str) -> dict[str, Any]:
    found: dict[str, Any] = {"role": str(told.get("role") or role), "content": told.get("content")}
    if calls := [_asked(call) for call in _objects(told.get("tool_calls"))]:
        found["tool_calls"] = calls
    if identity := told.get("tool_call_id") or (found["role"] == "tool" and told.get("id")):
        found["tool_call_id"] = str(identity)
    return found


def _asked(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    told = cast("Mapping[str, Any]", function) if isinstance(function, Mapping) else call
    return tool_call(call.get("id"), told.get("name"), told.get("arguments"))


def _objects(value: Any) -> list[Mapping[str, Any]]:
    """The objects of a list, which may be JSON; what is no such thing has none."""
    decoded = _decoded(value)
    items = cast("list[Any]", decoded) if isinstance(decoded, (list, tuple)) else []
    return [item for item in items if isinstance(item, Mapping)]


def _decoded(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value
