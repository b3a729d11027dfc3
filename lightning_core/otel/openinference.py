"""OpenInference (Arize Phoenix and others) to ours.

Its lists are flattened into keys, such as ``llm.input_messages.0.message.role``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from lightning_core import trace as tr
from lightning_core.otel.flattened import as_text, nested_object, numbered_values, tool_call, unflatten

OPENINFERENCE_KIND = "openinference.span.kind"
_METHOD = re.compile(r"\.(?:a?run|a?kickoff|_execute_core|execute)$")
"""The suffixes that instrumentors add to an agent's name: the method that ran it."""


def from_openinference(name: str, attributes: Mapping[str, Any]) -> dict[str, Any] | None:
    """Our attributes for a span of this convention; None for any other span."""
    a = attributes
    metadata = _json(a.get("metadata"))
    match a.get(OPENINFERENCE_KIND):
        case "LLM":
            return {tr.OPERATION: "chat", **_call(a)}
        case "AGENT":
            agent = a.get("agent.name") or a.get("graph.node.id") or _METHOD.sub("", name)
            return {tr.OPERATION: "invoke_agent", tr.AGENT: str(agent)}
        case "TOOL":
            return {tr.OPERATION: "execute_tool", tr.TOOL: str(a.get("tool.name") or name), **_tool(a)}
        case "CHAIN" if metadata.get("lc_agent_name") == name:
            return {tr.OPERATION: "invoke_agent", tr.AGENT: name}
        case "CHAIN" if metadata.get("langgraph_node") == name:
            return {tr.NODE: name}
        case "CHAIN" if a.get("graph.node.id"):
            return {tr.NODE: str(a["graph.node.id"])}
        case None:
            return None
        case _:
            return {}


def _call(a: Mapping[str, Any]) -> dict[str, Any]:
    prompt = [message for entry in numbered_values(unflatten(a, "llm.input_messages.")) for message in _messages(entry)]
    answers = [
        message for entry in numbered_values(unflatten(a, "llm.output_messages.")) for message in _messages(entry)
    ]
    parameters = _json(a.get("llm.invocation_parameters"))
    model = str(a.get("llm.model_name") or parameters.get("model") or "")
    attributes: dict[str, Any] = {
        tr.REQUEST_MODEL: model,
        tr.RESPONSE_MODEL: model,
        tr.INPUT_MESSAGES: json.dumps(prompt, ensure_ascii=False),
    }
    if answers:
        attributes[tr.OUTPUT_MESSAGES] = json.dumps(answers, ensure_ascii=False)
    if response := _response_id(_json(a.get("output.value"))):
        attributes[tr.RESPONSE_ID] = response
    if a.get("llm.finish_reason"):
        attributes[tr.FINISH_REASONS] = (str(a["llm.finish_reason"]),)
    if isinstance(temperature := parameters.get("temperature"), (int, float)):
        attributes[tr.TEMPERATURE] = float(temperature)
    if tools := [tool for entry in numbered_values(unflatten(a, "llm.tools.")) if (tool := _tool_definition(entry))]:
        attributes[tr.TOOL_DEFINITIONS] = json.dumps(tools, ensure_ascii=False)
    for kind, target in (
        ("prompt", tr.INPUT_TOKENS),
        ("completion", tr.OUTPUT_TOKENS),
        ("prompt_details.cache_read", tr.CACHED_TOKENS),
    ):
        if isinstance(count := a.get(f"llm.token_count.{kind}"), (int, float)):
            attributes[target] = int(count)
    return attributes


def _tool_definition(entry: Any) -> Mapping[str, Any]:
    """The JSON schema of one entry of ``llm.tools``, in the form of chat completions; empty without one."""
    schema = _json(nested_object(entry, "tool").get("json_schema"))
    return schema if "function" in schema or "name" not in schema else {"type": "function", "function": dict(schema)}


def _response_id(output: Mapping[str, Any]) -> str | None:
    """The provider's response id, from its own JSON or from LangChain's."""
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
    message = nested_object(entry, "message")
    if message.get("role") == "function":  # AutoGen: the results of several tools, each as JSON
        for result in numbered_values(entry.get("function")):
            decoded = _json(result)
            yield {"role": "tool", "tool_call_id": decoded.get("call_id"), "content": as_text(decoded.get("content"))}
        return
    converted: dict[str, Any] = {"role": str(message.get("role") or "user"), "content": _content(message)}
    calls = [
        tool_call(
            call.get("id"),
            nested_object(call, "function").get("name"),
            nested_object(call, "function").get("arguments"),
        )
        for call in (nested_object(entry, "tool_call") for entry in numbered_values(message.get("tool_calls")))
    ]
    if calls:
        converted["tool_calls"] = calls
    for key in ("name", "tool_call_id"):
        if message.get(key):
            converted[key] = message[key]
    yield converted


def _content(message: Mapping[str, Any]) -> Any:
    if message.get("content") is not None or not message.get("contents"):
        return message.get("content")
    parts: list[dict[str, Any]] = []
    for entry in numbered_values(message["contents"]):
        part = nested_object(entry, "message_content")
        kind = str(part.get("type") or "text")
        parts.append({"type": kind, "text": part.get("text") or ""} if kind == "text" else {"type": kind})
    if all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    return parts


def _tool(a: Mapping[str, Any]) -> dict[str, Any]:
    attributes: dict[str, Any] = {}
    if (arguments := a.get("input.value")) is not None:
        attributes[tr.TOOL_ARGUMENTS] = as_text(arguments)
    if (result := a.get("output.value")) is not None:
        attributes[tr.TOOL_RESULT] = as_text(result)
    # A LangChain tool returns a message that contains the call's id.
    identity = a.get("tool_call.id") or nested_object(_json(result), "data").get("tool_call_id")
    if identity:
        attributes[tr.TOOL_CALL_ID] = str(identity)
    return attributes


def _json(text: Any) -> Mapping[str, Any]:
    """A JSON object from an attribute; empty if it is anything else."""
    try:
        value = json.loads(text) if isinstance(text, str) else text
    except ValueError:
        return {}
    return value if isinstance(value, Mapping) else {}
