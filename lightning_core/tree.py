"""A rollout as text: an indented tree of who ran inside whom, what each was asked, what it said and what that was worth."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from lightning_core.store import CallCredit, RolloutRecord
from lightning_core.trace import Call, Event, Trace

_INDENT = "  "


def format_trace(
    record: RolloutRecord, trace: Trace, credit: Iterable[CallCredit] = (), *, width: int, full: bool = False
) -> str:
    """The tree of one rollout. Lines are cut at ``width`` columns and texts to one line, unless ``full``."""
    lines = list(_header(record, trace))
    lines += _children(trace, {row.call: row for row in credit}, full)
    return "\n".join(lines if full else (_cut(line, width) for line in lines))


def format_rollouts(records: Sequence[RolloutRecord], *, width: int) -> str:
    """A table of rollouts, one a line; errors are cut at ``width`` columns."""
    rows = [("N", "phase", "step", "task", "reward", "calls", "status")]
    for r in records:
        status = r.status if r.error is None else f"{r.status}: {r.error}"
        row = (r.ordinal, r.phase, r.step, _one_line(r.task_id), _number(r.reward), r.calls, _one_line(status))
        rows.append(tuple(str(cell) for cell in row))  # pyright: ignore[reportArgumentType]
    widths = [min(40, max(len(row[i]) for row in rows)) for i in range(6)] + [0]
    return "\n".join(
        _cut("  ".join(_cut(cell, w or len(cell)).ljust(w) for cell, w in zip(row, widths, strict=True)), width)
        for row in rows
    )


def format_agents(agents: Mapping[str | None, int], trained: Iterable[str] = ()) -> str:
    """Names of agents with their calls, as they can be written under ``agents.train``."""
    marks = set(trained)
    names = [
        f"{'(no agent)' if name is None else name} {count} {'call' if count == 1 else 'calls'}"
        f"{', trained' if name in marks else ''}"
        for name, count in agents.items()
    ]
    return f"agents: {'; '.join(names) or 'none'}"


def _header(record: RolloutRecord, trace: Trace) -> Iterator[str]:
    seconds = max(0, record.ended_ns - record.started_ns) / 1e9
    status = record.status if record.error is None else f"{record.status} ({_one_line(record.error)})"
    yield (
        f"rollout {record.ordinal}  {record.phase} at step {record.step}  reward {_number(record.reward)}  {status}  "
        f"{seconds:.1f} s"
    )
    yield f"task {record.task_id}: {_one_line(json.dumps(trace.task, ensure_ascii=False))}"
    named = [r for r in trace.rewards if r.call is None and (r.agent is not None or r.name is not None)]
    for reward in named:
        whose = "" if reward.agent is None else f" to agent {reward.agent}"
        yield f"reward {_number(reward.value)}{whose}{'' if reward.name is None else f' ({reward.name})'}"
    for kind, count in trace.counters.items():
        yield f"not recorded: {kind}, {count} times"


def _children(trace: Trace, credit: Mapping[str, CallCredit], full: bool) -> Iterator[str]:
    """Depth first from the root; what has no parent among the spans hangs on the root."""
    roots = [event for event in trace.events if event.kind == "rollout"]
    root = roots[0].id
    known = {item.id for item in (*trace.events, *trace.calls)}
    below: dict[str, list[Call | Event]] = {}
    for item in sorted((*trace.events, *trace.calls), key=lambda i: (i.start_ns, i.id)):
        if item.id != root:
            parent = item.parent if item.parent in known else root
            below.setdefault(parent or root, []).append(item)
    # A stack instead of recursion: an agent may nest as deep as it likes, and a foreign span may name itself as parent.
    todo = [(item, 0) for item in reversed(below.pop(root, []))]
    while todo:
        item, depth = todo.pop()
        indent = _INDENT * depth
        if isinstance(item, Call):
            for line in _call(item, trace, credit.get(item.id), full):
                yield indent + line
        else:
            yield indent + _event(item)
        todo += [(child, depth + 1) for child in reversed(below.pop(item.id, []))]


def _event(event: Event) -> str:
    error = "" if event.error is None else f"  failed: {_one_line(event.error)}"
    agent = "" if event.agent in (None, event.name) or event.kind == "agent" else f"  (agent {event.agent})"
    return f"{event.kind} {event.name}{agent}{error}"


def _call(call: Call, trace: Trace, credit: CallCredit | None, full: bool) -> Iterator[str]:
    parts = [f"call of {call.agent or 'no agent'}"]
    version = "" if call.policy_version is None else f" version {call.policy_version}"
    parts.append(f"{call.model}{version}")
    if call.prompt_ids is not None and call.output_ids is not None:
        parts.append(f"{len(call.prompt_ids)} → {len(call.output_ids)} tokens")
    if call.context is not None:
        parts.append(f"context {call.context}{f' ({call.context_reason})' if call.context_reason else ''}")
    if call.finish_reason not in (None, "stop"):
        parts.append(f"ended by {call.finish_reason}")
    if credit is not None:
        parts.append(f"reward {_number(credit.reward)}, advantage {credit.advantage:+.3f}, {credit.tokens} trained")
    parts += [f"given {_number(r.value)}{f' ({r.name})' if r.name else ''}" for r in trace.rewards if r.call == call.id]
    if call.error is not None:
        parts.append(f"failed: {_one_line(call.error)}")
    yield "  ".join(parts)
    messages = call.messages if full else call.messages[-1:]
    for message in messages:
        yield from _said(str(message.get("role", "?")), message, full)
    if call.response is not None:
        yield from _said(call.agent or "response", call.response, full)


def _said(who: str, message: Mapping[str, Any], full: bool) -> Iterator[str]:
    text = _text(message.get("content"))
    if text or not message.get("tool_calls"):
        if not full:
            yield f"{_INDENT}{who}: {_one_line(text)}"
        else:
            first, *rest = text.split("\n")
            yield f"{_INDENT}{who}: {first}"
            yield from (f"{_INDENT * 2}{line}" for line in rest)
    for wanted in message.get("tool_calls") or ():
        function = wanted.get("function") or {}
        yield f"{_INDENT}{who} uses {function.get('name', '?')} {_one_line(str(function.get('arguments', '')))}"


def _text(content: Any) -> str:
    """A message's content: a string, or a list of parts of which the texts are shown."""
    if isinstance(content, list):
        return "\n".join(str(part.get("text", f"<{part.get('type', '?')}>")) for part in content)
    return "" if content is None else str(content)


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.3f}"


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _cut(text: str, width: int) -> str:
    return text.rstrip() if len(text) <= width else text[: max(0, width - 1)] + "…"
