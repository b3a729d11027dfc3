"""OpenInference (Arize Phoenix and others) → ours. Its lists are flattened into keys, such as ``llm.input_messages.0.message.role``."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from lightning_core import trace as tr
from lightning_core.otel.flattened import as_text, collect, listed, nested, tool_call

_KIND = "openinference.span.kind"


def from_openinference(name: str, attributes: Mapping[str, Any]) -> dict[str, Any] | None:
    """The attributes that a span of this convention has in ours, beside its own; None if it is none."""
    a = attributes
    metadata = _json(a.get("metadata"))
    match a.get(_KIND):
        case "LLM":
            return {tr.OPERATION: "chat", **_call(a)}
        case "AGENT":
            return {tr.OPERATION: "invoke_agent", tr.AGENT: str(a.get("agent.name") or a.get("graph.node.id") or name)}
        case "TOOL":
            return {tr.OPERATION: "execute_tool", tr.TOOL: str(a.get("tool.name") or name), **_tool(a)}
        case "CHAIN" if metadata.get("lc_agent_name") == name:
            return {tr.OPERATION: "invoke_agent", tr.AGENT: name}
        case "CHAIN" if metadata.get("langgraph_node") == name:
            return {"lightning.node": name}
        case "CHAIN" if a.get("graph.node.id"):
            return {"lightning.node": str(a["graph.node.id"])}
        case None:
            return None
        case _:
            return {}


def _call(a: Mapping[str, Any]) -> dict[str, Any]:
    given = [message for entry in listed(collect(a, "llm.input_messages.")) for message in _messages(entry)]
    answers = [message for entry in listed(collect(a, "llm.output_messages.")) for message in _messages(entry)]
    model = str(a.get("llm.model_name") or "")
    found: dict[str, Any] = {
        "gen_ai.request.model": model,
        "gen_ai.response.model": model,
        "gen_ai.input.messages": json.dumps(given, ensure_ascii=False),
    }
    if answers:
        found["gen_ai.output.messages"] = json.dumps(answers, ensure_ascii=False)
    if response := _response_id(_json(a.get("output.value"))):
        found["gen_ai.response.id"] = response
    if a.get("llm.finish_reason"):
        found["gen_ai.response.finish_reasons"] = (str(a["llm.finish_reason"]),)
    if isinstance(temperature := _json(a.get("llm.invocation_parameters")).get("temperature"), (int, float)):
        found["gen_ai.request.temperature"] = float(temperature)
    for theirs, ours in (("prompt", "input"), ("completion", "output")):
        if isinstance(count := a.get(f"llm.token_count.{theirs}"), (int, float)):
            found[f"gen_ai.usage.{ours}_tokens"] = int(count)
    return found


def _response_id(output: Mapping[str, Any]) -> str | None:
    """The provider's id of a response, in its own JSON or in LangChain's."""
    if isinstance(identity := output.get("id"), str):
        return identity
    place: Any = output
    for key in ("generations", 0, 0, "message", "kwargs", "response_metadata", "id"):
        try:
            place = place[key]
        except (KeyError, IndexError, TypeError):
            return None
    return place if isinstance(place, str) else None


def _messages(entry: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    message = nested(entry, "message")
    if message.get("role") == "function":  # AutoGen's: the results of several tools, each as JSON
        for result in listed(entry.get("function")):
            told = _json(result)
            yield {"role": "tool", "tool_call_id": told.get("call_id"), "content": as_text(told.get("content"))}
        return
    found: dict[str, Any] = {"role": str(message.get("role") or "user"), "content": _content(message)}
    calls = [
        tool_call(call.get("id"), nested(call, "function").get("name"), nested(call, "function").get("arguments"))
        for call in (nested(wish, "tool_call") for wish in listed(message.get("tool_calls")))
    ]
    if calls:
        found["tool_calls"] = calls
    for key in ("name", "tool_call_id"):
        if message.get(key):
            found[key] = message[key]
    yield found


def _content(message: Mapping[str, Any]) -> Any:
    if message.get("content") is not None or not message.get("contents"):
        return message.get("content")
    parts: list[dict[str, Any]] = []
    for entry in listed(message["contents"]):
        part = nested(entry, "message_content")
        kind = str(part.get("type") or "text")
        parts.append({"type": kind, "text": part.get("text") or ""} if kind == "text" else {"type": kind})
    if all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    return parts


def _tool(a: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if (arguments := a.get("input.value")) is not None:
        found["gen_ai.tool.call.arguments"] = as_text(arguments)
    if (result := a.get("output.value")) is not None:
        found["gen_ai.tool.call.result"] = as_text(result)
    # LangChain's tools answer with a message that names the call.
    identity = a.get("tool_call.id") or nested(_json(result), "data").get("tool_call_id")
    if identity:
        found["gen_ai.tool.call.id"] = str(identity)
    return found


def _json(text: Any) -> Mapping[str, Any]:
    """A JSON object in an attribute, or an empty one: what other programs write there is theirs to say."""
    try:
        value = json.loads(text) if isinstance(text, str) else text
    except ValueError:
        return {}
    return value if isinstance(value, Mapping) else {}
