"""ATIF (Agent Trajectory Interchange Format) 1.x: one trace for each trajectory, with its sub-agents.

A step of an agent is one model call. Its prompt is everything before it in the same trajectory. Trajectories that `atif_export` wrote
have rewards, times and settings of calls under ``extra.lightning``, which are read back.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from lightning_core import trace as tr
from lightning_core.otel.flattened import tool_call
from lightning_core.tools.interchange.messages import RecordedExchange, mapping, sequence, tool_definitions
from lightning_core.tools.interchange.source_format import Document, Findings, ReadOptions, SourceFormat, SourceScore
from lightning_core.tools.interchange.spans import call_attributes, make_span, nanoseconds, span_id_of, trace_id_of
from lightning_core.trace import SpanRecord, pack

OWN = "lightning"
"""The key in ``extra`` of what the format has no field for."""
CALL_SETTINGS = {"temperature": tr.TEMPERATURE, "max_tokens": tr.MAX_TOKENS, "sequence": tr.SEQUENCE}
"""Keys of a step's ``extra.lightning``, with their attributes of a call."""


def recognize(document: Document) -> bool:
    """Whether ``document`` is a trajectory of any version 1."""
    return str(document.get("schema_version", "")).startswith("ATIF-v1")


def _read(documents: Sequence[Document], found: Findings, _: ReadOptions) -> None:
    for document in documents:
        if not recognize(document):
            found.refuse(None, "not a trajectory of ATIF 1.x")
            continue
        own = _own(document)
        identity = document.get("trajectory_id") or document.get("session_id") or _content_id(document)
        trace_id = trace_id_of(str(identity))
        with found.record_of(trace_id):
            calls = _trajectory(document, trace_id, "0", found)
            times = [time for call in calls for time in (call.start_ns, call.end_ns)] or [1]
            root = SpanRecord(
                name="rollout",
                trace_id=trace_id,
                span_id=span_id_of(f"root of {identity}"),
                parent_id=None,
                start_ns=max(0, min(times) - 2),
                end_ns=max(times),
                attributes={
                    tr.TASK_ID: str(own.get("task_id") or trace_id),
                    **({tr.TASK: json.dumps(own["task"], ensure_ascii=False)} if "task" in own else {}),
                },
                error=str(own["error"]) if own.get("error") else None,
            )
            found.names[trace_id] = str(identity)
            found.metadata[trace_id] = mapping(document.get("extra"))
            found.spans += [root, *_numbered(calls, root.span_id), *_rewards(own, root)]
            found.scores += [
                SourceScore(trace_id=trace_id, name=str(name), value=value)
                for name, value in mapping(document.get("extra")).items()
                if isinstance(value, (int, float))
            ]


def _numbered(calls: Sequence[SpanRecord], root: str) -> Iterator[SpanRecord]:
    """The spans below ``root``; calls of all agents get numbers in order of time, if the writer gave none."""
    number = 0
    for span in sorted(calls, key=lambda call: call.start_ns):
        number += span.attributes.get(tr.OPERATION) == "chat"
        yield replace(span, parent_id=span.parent_id or root, attributes={tr.SEQUENCE: number, **span.attributes})


def _rewards(own: Mapping[str, Any], root: SpanRecord) -> Iterator[SpanRecord]:
    for number, reward in enumerate(map(mapping, sequence(own.get("rewards")))):
        name = reward.get("name")
        yield reward_span(
            root,
            number,
            tr.check_reward(reward["value"]),
            name=name,
            call=reward.get("call"),
            agent=reward.get("agent"),
        )


def reward_span(
    root: SpanRecord, number: int, value: float, *, name: str | None, call: str | None = None, agent: str | None = None
) -> SpanRecord:
    """The span of the reward with this number in the rollout of ``root``."""
    given = {tr.REWARD_NAME: name, tr.REWARD_CALL: call, tr.REWARD_AGENT: agent}
    return SpanRecord(
        name=name or "",
        trace_id=root.trace_id,
        span_id=span_id_of(f"reward {number} of {root.trace_id}"),
        parent_id=root.span_id,
        start_ns=root.end_ns + number,
        end_ns=root.end_ns + number,
        attributes={
            tr.OPERATION: "reward",
            tr.REWARD_VALUE: value,
            **{key: text for key, text in given.items() if text is not None},
        },
    )


def _trajectory(trajectory: Document, trace_id: str, place: str, found: Findings) -> list[SpanRecord]:
    """The agent of a trajectory, its calls, and those of its sub-agents. ``place``: its position among all, for ids."""
    agent = mapping(trajectory["agent"])
    name = str(agent["name"])
    history: list[dict[str, Any]] = []
    spans: list[SpanRecord] = []
    agent_span = span_id_of(f"agent {place} of {trace_id}")
    tools = tool_definitions(agent.get("tool_definitions"))
    clock = 0
    for step in map(mapping, sequence(trajectory["steps"])):
        clock = nanoseconds(step["timestamp"]) if step.get("timestamp") else clock + 1
        if step["source"] != "agent":
            history += _given(step, found)
            continue
        own = _own(step)
        response = _message(step, found)
        if step.get("llm_call_count") != 0 and not step.get("is_copied_context"):
            if step.get("llm_call_count", 1) is not None and step.get("llm_call_count", 1) > 1:
                found.left_out["steps that are several model calls: they were read as one"] += 1
            model = step.get("model_name") or agent.get("model_name")
            exchange = RecordedExchange(
                list(history), tools, None if own.get("error") else response, own.get("finish_reason")
            )
            attributes = call_attributes(exchange, model=model, usage=step.get("metrics"))
            settings = {key: own[field] for field, key in CALL_SETTINGS.items() if own.get(field) is not None}
            start_ns = int(own.get("start_ns", clock))
            spans.append(
                make_span(
                    "call",
                    f"chat {model or ''}".strip(),
                    trace_id=trace_id,
                    span_id=span_id_of(own.get("id") or f"step {place}.{step['step_id']} of {trace_id}"),
                    parent_id=agent_span,
                    start_ns=start_ns,
                    end_ns=int(own.get("end_ns", start_ns)),
                    error=str(own["error"]) if own.get("error") else None,
                    attributes={**attributes, **settings, **_tokens(step), tr.AGENT: own.get("agent", name)},
                )
            )
        history += [response, *_results(step, found)]
    if trajectory.get("continued_trajectory_ref"):
        found.left_out["trajectories that continue in another file, which is a trace of its own"] += 1
    times = [time for call in spans for time in (call.start_ns, call.end_ns)] or [clock]
    first = make_span(
        "agent",
        name,
        trace_id=trace_id,
        span_id=agent_span,
        parent_id=None,
        start_ns=max(0, min(times) - 1),
        end_ns=max(times),
    )
    for number, nested in enumerate(map(mapping, sequence(trajectory.get("subagent_trajectories"))), 1):
        spans += _trajectory(nested, trace_id, f"{place}.{number}", found)
    return [first, *spans]


def _tokens(step: Mapping[str, Any]) -> dict[str, Any]:
    metrics = mapping(step.get("metrics"))
    fields = (
        ("prompt_token_ids", tr.PROMPT_IDS, "<u4"),
        ("completion_token_ids", tr.OUTPUT_IDS, "<u4"),
        ("logprobs", tr.LOGPROBS, "<f4"),
    )
    return {name: pack(metrics[key], dtype) for key, name, dtype in fields if metrics.get(key)}  # type: ignore[arg-type]


def _given(step: Mapping[str, Any], found: Findings) -> list[dict[str, Any]]:
    """A step of the user or the system as messages."""
    content = _content(step.get("message"), found)
    results = _results(step, found)
    return [*([{"role": str(step["source"]), "content": content}] if content or not results else []), *results]


def _message(step: Mapping[str, Any], found: Findings) -> dict[str, Any]:
    calls = [_call(mapping(call)) for call in sequence(step.get("tool_calls"))]
    content = _content(step["message"], found)
    message: dict[str, Any] = {"role": "assistant", "content": None if calls and not content else content}
    if step.get("reasoning_content"):
        message["reasoning_content"] = str(step["reasoning_content"])
    return {**message, "tool_calls": calls} if calls else message


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    arguments = _own(call).get("arguments", call.get("arguments"))
    return tool_call(call.get("tool_call_id"), call["function_name"], arguments)


def _results(step: Mapping[str, Any], found: Findings) -> Iterator[dict[str, Any]]:
    """The results of a step's tools as messages; one of no tool is a message of the user."""
    calls = sequence(step.get("tool_calls"))
    results = [mapping(result) for result in sequence(mapping(step.get("observation")).get("results"))]
    for result in results:
        identity = result.get("source_call_id")
        if identity is None and len(calls) == len(results) == 1:
            identity = mapping(calls[0]).get("tool_call_id")
        if any("trajectory_path" in mapping(ref) for ref in sequence(result.get("subagent_trajectory_ref"))):
            found.left_out["sub-agents whose trajectory is in another file"] += 1
        content = _content(result.get("content"), found)
        role = {"role": "user"} if identity is None else {"role": "tool", "tool_call_id": str(identity)}
        yield {**role, "content": content}


def _content(content: Any, found: Findings) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    parts = [mapping(part) for part in sequence(content)]
    if others := sum(part.get("type") != "text" for part in parts):
        found.left_out["parts of messages that are no text, such as images"] += others
    return "".join(str(part.get("text", "")) for part in parts if part.get("type") == "text")


def _own(item: Mapping[str, Any]) -> Mapping[str, Any]:
    return mapping(mapping(item.get("extra")).get(OWN))


def _content_id(document: Document) -> str:
    return hashlib.blake2b(json.dumps(document, sort_keys=True).encode(), digest_size=16).hexdigest()


ATIF = SourceFormat(name="atif", title="ATIF", recognize=recognize, read=_read)
