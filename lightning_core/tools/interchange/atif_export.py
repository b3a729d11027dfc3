"""Rollouts as trajectories of ATIF 1.7.

Each conversation of an agent is a trajectory: the first is the document, the others are its ``subagent_trajectories``. A step of an
agent is one model call, with its token ids and logprobs. Messages of an assistant that no recorded call has sampled are steps with
``is_copied_context``.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from lightning_core import trace as tr
from lightning_core.chat.history.message_key import other_parts, plain_text
from lightning_core.tools.interchange.atif import OWN
from lightning_core.tools.interchange.conversations import CallChain, call_chains
from lightning_core.tools.interchange.target_format import ExportedRollout, TargetFormat
from lightning_core.trace import Call, SpanRecord

VERSION = "ATIF-v1.7"
_UNNAMED = "agent"
"""The name of an agent whose calls have none; the format requires one."""


def _write(rollout: ExportedRollout, left_out: Counter[str]) -> list[Mapping[str, Any]]:
    trace = rollout.trace
    chains = call_chains(rollout.calls)
    if not chains:
        left_out["rollouts without a call of the chosen agents"] += 1
        return []
    spans = {span.span_id: span for span in rollout.spans}
    written = [_trajectory(chain, trace.rollout, number, spans, left_out) for number, chain in enumerate(chains)]
    document = written[0]
    own: dict[str, Any] = {"task_id": trace.task_id}
    if trace.task is not None:
        own["task"] = trace.task
    if trace.rewards:
        own["rewards"] = [_without_none(_fields(reward)) for reward in trace.rewards]
    if trace.error is not None:
        own["error"] = trace.error
    document["extra"] = {**({} if trace.reward is None else {"reward": trace.reward}), OWN: own}
    if written[1:]:
        document["subagent_trajectories"] = written[1:]
    return [document]


def _fields(reward: tr.Reward) -> dict[str, Any]:
    return {"value": reward.value, "call": reward.call, "agent": reward.agent, "name": reward.name}


def _trajectory(
    chain: CallChain, rollout: str, place: int, spans: Mapping[str, SpanRecord], left_out: Counter[str]
) -> dict[str, Any]:
    steps: list[dict[str, Any]] = []
    for position, call in enumerate(chain.calls):
        for message in chain.added(position):
            _add_message(steps, message, left_out)
        steps.append(_call_step(call, spans.get(call.id), left_out))
    steps = [{"step_id": number, **step} for number, step in enumerate(steps, 1)]
    first = chain.calls[0]
    agent: dict[str, Any] = {"name": chain.agent or _UNNAMED, "version": "unknown", "model_name": first.model or None}
    agent["tool_definitions"] = list(first.tools) if first.tools else None
    metrics = [step.get("metrics", {}) for step in steps]
    totals = {
        f"total_{name}": sum(found) if (found := [m[name] for m in metrics if name in m]) else None
        for name in ("prompt_tokens", "completion_tokens", "cached_tokens")
    }
    return {
        "schema_version": VERSION,
        "session_id": rollout,
        "trajectory_id": rollout if place == 0 else f"{rollout}-{place}",
        "agent": _without_none(agent),
        "steps": steps,
        "final_metrics": _without_none({**totals, "total_steps": len(steps)}),
    }


def _add_message(steps: list[dict[str, Any]], message: Mapping[str, Any], left_out: Counter[str]) -> None:
    """Add a message of a prompt: a step, or the result of a tool that the step before has called."""
    text = _text(message, left_out)
    match message.get("role"):
        case "assistant":
            steps.append({"source": "agent", **_said(message, left_out), "is_copied_context": True})
        case "tool":
            identity = message.get("tool_call_id")
            calls = [call["tool_call_id"] for call in steps[-1].get("tool_calls", ())] if steps else []
            if identity not in calls:
                steps.append({"source": "system", "message": ""})
            results = steps[-1].setdefault("observation", {"results": []})["results"]
            results.append({"source_call_id": str(identity or ""), "content": text})
        case role:
            steps.append({"source": "user" if role == "user" else "system", "message": text})


def _call_step(call: Call, span: SpanRecord | None, left_out: Counter[str]) -> dict[str, Any]:
    attributes: Mapping[str, Any] = {} if span is None else span.attributes
    own = {
        "id": call.id,
        "sequence": call.sequence,
        "start_ns": call.start_ns,
        "end_ns": call.end_ns,
        "temperature": call.temperature,
        "max_tokens": call.max_tokens,
        "finish_reason": call.finish_reason,
        "error": call.error,
    }
    extra = _without_none(own) | ({} if call.agent is not None else {"agent": None})
    counts = (
        ("prompt_tokens", tr.INPUT_TOKENS, call.prompt_ids),
        ("completion_tokens", tr.OUTPUT_TOKENS, call.output_ids),
        ("cached_tokens", tr.CACHED_TOKENS, None),
    )
    metrics = {
        name: int(attributes[key]) if key in attributes else None if ids is None else len(ids)
        for name, key, ids in counts
    }
    arrays = {
        "prompt_token_ids": call.prompt_ids,
        "completion_token_ids": call.output_ids,
        "logprobs": call.logprobs,
    }
    lists = {name: None if array is None else array.tolist() for name, array in arrays.items()}
    moment = datetime.fromtimestamp(call.start_ns // 1_000_000_000, UTC).replace(
        microsecond=call.start_ns // 1000 % 1_000_000
    )
    step: dict[str, Any] = {
        "source": "agent",
        "timestamp": moment.isoformat().replace("+00:00", "Z"),
        "model_name": call.model or None,
        **_said(call.response or {}, left_out),
        "metrics": _without_none({**metrics, **lists}) or None,
        "llm_call_count": 1,
        "extra": {OWN: extra},
    }
    return _without_none(step)


def _said(message: Mapping[str, Any], left_out: Counter[str]) -> dict[str, Any]:
    """Text, reasoning and tool calls of an assistant's message."""
    said: dict[str, Any] = {"message": _text(message, left_out)}
    if message.get("reasoning_content"):
        said["reasoning_content"] = message["reasoning_content"]
    calls = [_tool_call(call) for call in message.get("tool_calls") or ()]
    return {**said, "tool_calls": calls} if calls else said


def _tool_call(call: Mapping[str, Any]) -> dict[str, Any]:
    """The format has arguments as an object; their text is kept beside it, if it cannot be made from the object."""
    function = call.get("function") or call.get("custom") or {}
    text = function.get("arguments", function.get("input"))
    try:
        arguments = json.loads(text) if isinstance(text, str) else text
    except ValueError:
        arguments = None
    written: dict[str, Any] = {
        "tool_call_id": str(call.get("id") or ""),
        "function_name": str(function.get("name") or ""),
        "arguments": arguments if isinstance(arguments, dict) else {},
    }
    if isinstance(text, str) and json.dumps(written["arguments"], ensure_ascii=False) != text:
        written["extra"] = {OWN: {"arguments": text}}
    return written


def _text(message: Mapping[str, Any], left_out: Counter[str]) -> str:
    if number := len(other_parts(message)):
        left_out["parts of messages that are no text, such as images"] += number
    return plain_text(message)


def _without_none(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}


ATIF_EXPORT = TargetFormat(name="atif", title=VERSION, write=_write)
