"""OpenLLMetry (Traceloop) → ours. Its newer versions write GenAI's messages; before, they were flattened: ``gen_ai.prompt.0.role``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from lightning_core import trace as tr
from lightning_core.otel.flattened import as_text, collect, listed, tool_call

_KIND = "traceloop.span.kind"


def from_traceloop(name: str, attributes: Mapping[str, Any]) -> dict[str, Any] | None:
    """The attributes that a span of this convention has in ours, beside its own; None if it is none."""
    a = attributes
    entity = str(a.get("traceloop.entity.name") or name)
    match a.get(_KIND):
        case "agent":
            return {tr.OPERATION: "invoke_agent", tr.AGENT: entity}
        case "tool":
            return {tr.OPERATION: "execute_tool", tr.TOOL: entity, **_tool(a)}
        case "task":
            return {"lightning.node": entity}
        case None:
            flattened = any(key.startswith(("gen_ai.prompt.", "gen_ai.completion.")) for key in a)
            return {tr.OPERATION: "chat", **_call(a)} if flattened or "llm.request.type" in a else None
        case _:
            return {}


def _call(a: Mapping[str, Any]) -> dict[str, Any]:
    answers = listed(collect(a, "gen_ai.completion."))
    found: dict[str, Any] = {
        "gen_ai.input.messages": json.dumps(
            [_message(entry) for entry in listed(collect(a, "gen_ai.prompt."))], ensure_ascii=False
        )
    }
    if answers:
        found["gen_ai.output.messages"] = json.dumps([_message(entry) for entry in answers], ensure_ascii=False)
        reasons = tuple(str(e["finish_reason"]) for e in answers if isinstance(e, Mapping) and e.get("finish_reason"))
        if reasons:
            found["gen_ai.response.finish_reasons"] = reasons
    return found


def _message(entry: Any) -> dict[str, Any]:
    if not isinstance(entry, Mapping):
        return {"role": "assistant", "content": as_text(entry)}
    found: dict[str, Any] = {"role": str(entry.get("role") or "assistant"), "content": entry.get("content")}
    wishes = [wish for wish in listed(entry.get("tool_calls")) if isinstance(wish, Mapping)]
    calls = [tool_call(wish.get("id"), wish.get("name"), wish.get("arguments")) for wish in wishes]
    if calls:
        found["tool_calls"] = calls
    if entry.get("tool_call_id"):
        found["tool_call_id"] = entry["tool_call_id"]
    return found


def _tool(a: Mapping[str, Any]) -> dict[str, Any]:
    pairs = (("traceloop.entity.input", "arguments"), ("traceloop.entity.output", "result"))
    return {f"gen_ai.tool.call.{ours}": as_text(a[theirs]) for theirs, ours in pairs if theirs in a}
