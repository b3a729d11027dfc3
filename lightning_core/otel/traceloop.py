"""OpenLLMetry (Traceloop) to ours.

Newer versions write GenAI messages; older ones flatten them into ``gen_ai.prompt.0.role``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from lightning_core import trace as tr
from lightning_core.otel.flattened import as_text, numbered_values, tool_call, unflatten

_KIND = "traceloop.span.kind"
_PROMPT = "gen_ai.prompt."
_COMPLETION = "gen_ai.completion."


def from_traceloop(name: str, attributes: Mapping[str, Any]) -> dict[str, Any] | None:
    """Our attributes for a span of this convention; None for any other span."""
    a = attributes
    entity = str(a.get("traceloop.entity.name") or name)
    match a.get(_KIND):
        case "agent":
            return {tr.OPERATION: "invoke_agent", tr.AGENT: entity}
        case "tool":
            return {tr.OPERATION: "execute_tool", tr.TOOL: entity, **_tool(a)}
        case "task":
            return {tr.NODE: entity}
        case None:
            flattened = any(key.startswith((_PROMPT, _COMPLETION)) for key in a)
            return {tr.OPERATION: "chat", **_call(a)} if flattened or "llm.request.type" in a else None
        case _:
            return {}


def _call(a: Mapping[str, Any]) -> dict[str, Any]:
    answers = numbered_values(unflatten(a, _COMPLETION))
    attributes: dict[str, Any] = {
        tr.INPUT_MESSAGES: json.dumps(
            [_message(entry) for entry in numbered_values(unflatten(a, _PROMPT))], ensure_ascii=False
        )
    }
    if answers:
        attributes[tr.OUTPUT_MESSAGES] = json.dumps([_message(entry) for entry in answers], ensure_ascii=False)
        reasons = tuple(str(e["finish_reason"]) for e in answers if isinstance(e, Mapping) and e.get("finish_reason"))
        if reasons:
            attributes[tr.FINISH_REASONS] = reasons
    return attributes


def _message(entry: Any) -> dict[str, Any]:
    if not isinstance(entry, Mapping):
        return {"role": "assistant", "content": as_text(entry)}
    converted: dict[str, Any] = {"role": str(entry.get("role") or "assistant"), "content": entry.get("content")}
    calls = [
        tool_call(call.get("id"), call.get("name"), call.get("arguments"))
        for call in numbered_values(entry.get("tool_calls"))
        if isinstance(call, Mapping)
    ]
    if calls:
        converted["tool_calls"] = calls
    if entry.get("tool_call_id"):
        converted["tool_call_id"] = entry["tool_call_id"]
    return converted


def _tool(a: Mapping[str, Any]) -> dict[str, Any]:
    pairs = (("traceloop.entity.input", tr.TOOL_ARGUMENTS), ("traceloop.entity.output", tr.TOOL_RESULT))
    return {target: as_text(a[source]) for source, target in pairs if source in a}
