"""Rollouts as OpenAI's fine-tuning data: one conversation a line, with tools.

Each conversation of a chosen agent is one line: the messages of its last call, and the response. The loss is on all messages of the
assistant, so those that no recorded call has sampled, and responses that were cut, get the weight 0.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from lightning_core.chat.history.message_key import other_parts, plain_text
from lightning_core.tools.interchange.conversations import CallChain, call_chains, is_same
from lightning_core.tools.interchange.target_format import ExportedRollout, TargetFormat
from lightning_core.trace import Call


def _write(rollout: ExportedRollout, left_out: Counter[str]) -> list[Mapping[str, Any]]:
    lines = [line for chain in call_chains(rollout.calls) if (line := _line(chain, left_out)) is not None]
    if not lines:
        left_out["rollouts without a conversation that can be written"] += 1
    return lines


def _line(chain: CallChain, left_out: Counter[str]) -> Mapping[str, Any] | None:
    while chain.calls and (reason := _refusal(chain.calls[-1])):
        left_out[reason] += 1
        chain.calls.pop()
    if not chain.calls:
        return None
    last = chain.calls[-1]
    messages = [*last.messages, last.response or {}]
    if any(other_parts(message) for message in messages):
        left_out["conversations with images or other parts that are no text, which were not recorded"] += 1
        return None
    if not all(isinstance(tool, Mapping) and tool.get("type") == "function" for tool in last.tools or ()):
        left_out["conversations with tools that are not functions"] += 1
        return None
    sampled = {len(call.messages): call for call in chain.calls}
    written = [_message(message, sampled.get(i), left_out) for i, message in enumerate(messages)]
    return {"messages": written, **({"tools": list(last.tools)} if last.tools else {})}


def _refusal(call: Call) -> str | None:
    """The reason a conversation cannot end with this call, or None."""
    if call.error is not None:
        return "calls that failed"
    if not call.messages or call.response is None:
        return "calls without recorded messages"
    if not plain_text(call.response) and not call.response.get("tool_calls"):
        return "calls with an empty response"
    return "calls whose response was cut" if call.finish_reason == "length" else None


def _message(message: Mapping[str, Any], call: Call | None, left_out: Counter[str]) -> dict[str, Any]:
    """A message as the format has it; ``call``: the call whose response is at this position."""
    role = "system" if message.get("role") == "developer" else message.get("role")
    written: dict[str, Any] = {"role": role}
    text = plain_text(message)
    if text or not message.get("tool_calls"):
        written["content"] = text
    for key in ("name", "tool_call_id"):
        if message.get(key):
            written[key] = message[key]
    if role != "assistant":
        return written
    if message.get("reasoning_content"):
        left_out["reasoning of messages, for which the format has no field"] += 1
    if message.get("tool_calls"):
        written["tool_calls"] = list(message["tool_calls"])
    if call is None or call.finish_reason == "length" or not is_same(call.response or {}, message):
        written["weight"] = 0
    return written


OPENAI_TUNING = TargetFormat(
    name="openai",
    title="OpenAI fine-tuning data",
    write=_write,
    takes_failed=False,
    phase="train",
    one_document=False,
)
