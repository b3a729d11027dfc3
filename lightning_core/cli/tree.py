"""A rollout as text: an indented tree of who ran inside whom, what each was asked, what it said and what that was worth."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from lightning_core.records.store import CallCredit, RolloutRecord
from lightning_core.trace import Call, Event, Trace

_INDENT = "  "


def format_trace(
    trace: Trace,
    record: RolloutRecord | None = None,
    credit: Iterable[CallCredit] = (),
    *,
    width: int,
    full: bool = False,
) -> str:
    """The tree of one rollout; ``record`` says what its run knew of it. Lines are cut at ``width`` columns and texts to one line,
    unless ``full``.
    """
    lines = list(_header(trace, record))
    lines += _children(trace, {row.call: row for row in credit}, full)
    return "\n".join(lines if full else (_cut(line, width) for line in lines))


def format_rollouts(records: Sequence[RolloutRecord], *, width: int) -> str:
    """A table of rollouts, one a line; errors are cut at ``width`` columns."""
    rows = [
        (r.ordinal, r.phase, r.step, r.task_id, _number(r.reward), r.calls, _status(r.status, r.error)) for r in records
    ]
    return _table(("N", "phase", "step", "task", "reward", "calls", "status"), rows, width)


def format_traces(traces: Sequence[Trace], *, width: int) -> str:
    """A table of traces that no run of ours recorded, one a line, numbered from 1; errors are cut at ``width`` columns."""
    rows = [
        (n, t.task_id, _number(t.reward), len(t.calls), _status("ok" if t.error is None else "failed", t.error))
        for n, t in enumerate(traces, 1)
    ]
    return _table(("N", "task", "reward", "calls", "status"), rows, width)


def format_agents(agents: Mapping[str | None, int], trained: Iterable[str] = ()) -> str:
    """Names of agents with their calls, as they can be written under ``agents.train``."""
    marks = set(trained)
    names = [
        f"{'(no agent)' if name is None else name} {count} {'call' if count == 1 else 'calls'}"
        f"{', trained' if name in marks else ''}"
        for name, count in agents.items()
    ]
    return f"agents: {'; '.join(names) or 'none'}"


def _table(head: Sequence[str], rows: Iterable[Sequence[object]], width: int) -> str:
    """Columns as wide as their content, up to 40, but for the last."""
    cells = [list(head), *([_one_line(str(cell)) for cell in row] for row in rows)]
    widths = [min(40, max(map(len, column))) for column in zip(*cells, strict=True)]
    widths[-1] = 0
    return "\n".join(
        _cut("  ".join(_cut(cell, w or len(cell)).ljust(w) for cell, w in zip(row, widths, strict=True)), width)
        for row in cells
    )


def _status(status: str, error: str | None) -> str:
    return status if error is None else f"{status}: {_one_line(error)}"


def _header(trace: Trace, record: RolloutRecord | None) -> Iterator[str]:
    if record is None:
        yield f"trace {trace.rollout}  reward {_number(trace.reward)}  {_status('ok' if trace.error is None else 'failed', trace.error)}"
    else:
        seconds = max(0, record.ended_ns - record.started_ns) / 1e9
        yield (
            f"rollout {record.ordinal}  {record.phase} at step {record.step}  reward {_number(record.reward)}  "
            f"{_status(record.status, record.error)}  {seconds:.1f} s"
        )
    yield f"task {trace.task_id}: {_one_line(json.dumps(trace.task, ensure_ascii=False))}"
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
