"""Rollouts as console output: a table of rollouts, and the tree of one rollout's spans."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

from rich.console import Group
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from lightning_core.chat.tool_calls.unread_calls import has_unread_call
from lightning_core.errors import visible
from lightning_core.records.store import LEFT_OUT, CallCredit, RolloutRecord
from lightning_core.tools.cli.console import Column, make_table, one_line
from lightning_core.tools.runs.traces import merit
from lightning_core.trace import Call, Event, Trace

_INDENT = "  "
_REQUESTS = {
    "infrastructure": "failures outside the agent",
    "recovered": "failed model requests that a retry recovered",
    "waiting": "model requests without a response at the end",
    "given_up": "model requests that the agent cancelled",
    "unsettled": "model requests without an answer when the agent returned",
}
"""What the counters of requests count; the others count what could not be recorded."""


def make_tree(
    trace: Trace, record: RolloutRecord | None = None, credit: Iterable[CallCredit] = (), *, full: bool = False
) -> Group:
    """The header and the tree of one rollout; ``record`` adds the run's record of it.

    Each message is one line, and lines are cut at the terminal's width. With ``full``, all
    messages of each prompt are shown, and texts are wrapped instead.
    """
    header = [_text(line, full) for line in _header(trace, record)]
    return Group(*header, _tree(trace, {row.call: row for row in credit}, full))


def make_rollout_table(records: Sequence[RolloutRecord]) -> Table:
    """A table of rollouts, one per line."""
    columns = (
        Column("N"),
        Column("phase"),
        Column("step"),
        Column("task", cut=True, bounded=True),
        Column("reward"),
        Column("calls"),
        Column("status", cut=True),
    )
    return make_table(
        columns,
        (
            (
                str(r.ordinal),
                r.phase,
                str(r.step),
                r.task_id,
                counted_reward(r),
                str(r.calls),
                status_text(r.status, r.error),
            )
            for r in records
        ),
    )


def make_trace_table(traces: Sequence[tuple[int, Trace]]) -> Table:
    """A table of numbered traces that were not recorded by a run, one per line."""
    columns = (
        Column("N"),
        Column("task", cut=True, bounded=True),
        Column("reward"),
        Column("calls"),
        Column("status", cut=True),
    )
    return make_table(
        columns,
        (
            (
                str(number),
                trace.task_id,
                _number(merit(trace)),
                str(len(trace.calls)),
                status_text(_outcome(trace), trace.error),
            )
            for number, trace in traces
        ),
    )


def _outcome(trace: Trace) -> str:
    return "ok" if trace.error is None else "failed"


def counted_reward(record: RolloutRecord) -> str:
    """The reward that a rollout counts with: 0 for an agent that ended before it got one; "none" for a rollout that is left out."""
    if record.status in LEFT_OUT:
        return _number(None)
    return f"{_number(0.0)} (not given)" if record.reward is None else _number(record.reward)


def status_text(status: str, error: str | None) -> str:
    return status if error is None else f"{status}: {one_line(error)}"


def _header(trace: Trace, record: RolloutRecord | None) -> Iterator[str]:
    if record is None:
        outcome = status_text(_outcome(trace), trace.error)
        yield f"trace {trace.rollout}  reward {_number(merit(trace))}  {outcome}"
    else:
        seconds = max(0, record.ended_ns - record.started_ns) / 1e9
        yield (
            f"rollout {record.ordinal}  {record.phase} at step {record.step}  reward {counted_reward(record)}  "
            f"{status_text(record.status, record.error)}  {seconds:.1f} s"
        )
    yield f"task {one_line(trace.task_id)}: {one_line(json.dumps(trace.task, ensure_ascii=False))}"
    for reward in trace.rewards:
        if reward.call is None and (reward.agent is not None or reward.name is not None):
            target = "" if reward.agent is None else f" to agent {one_line(reward.agent)}"
            if reward.agent is not None and reward.agent not in trace.agents:
                target += ", which made no call"
            name = "" if reward.name is None else f" ({one_line(reward.name)})"
            yield f"reward {_number(reward.value)}{target}{name}"
    for kind, count in trace.counters.items():
        yield f"{_REQUESTS[kind]}: {count}" if kind in _REQUESTS else f"not recorded: {kind}, {count} times"


def _tree(trace: Trace, credit: Mapping[str, CallCredit], full: bool) -> Tree:
    """Events and calls below their parents; items with an unknown parent are top-level."""
    root = next(event.id for event in trace.events if event.kind == "rollout")
    items: dict[str, Call | Event] = {item.id: item for item in (*trace.events, *trace.calls)}
    children: dict[str, list[Call | Event]] = {}
    for item in sorted(items.values(), key=lambda i: (i.start_ns, i.id)):
        if item.id != root:
            parent = item.parent if item.parent in items else root
            children.setdefault(parent or root, []).append(item)
    tree, errors = Tree("", hide_root=True, guide_style="dim"), _Errors(items.values())
    # A stack, not recursion, since agents can be nested deeply; pop, since foreign spans can form a cycle.
    pending: list[tuple[Tree, Call | Event]] = [(tree, item) for item in reversed(children.pop(root, []))]
    while pending:
        parent, item = pending.pop()
        if isinstance(item, Call):
            label = "\n".join(_call_lines(item, trace, credit.get(item.id), errors, full))
        else:
            label = _event_line(item, errors)
        node = parent.add(_text(label, full))
        pending += [(node, child) for child in reversed(children.pop(item.id, []))]
    return tree


class _Errors:
    """Shows each error of a tree once, with its number, from the top down."""

    def __init__(self, items: Iterable[Call | Event]) -> None:
        self._counts = Counter(item.error for item in items if item.error is not None)
        self._shown: set[str] = set()

    def text(self, error: str) -> str:
        if error in self._shown:
            return "failed: as above"
        self._shown.add(error)
        times = f" ({self._counts[error]} times)" if self._counts[error] > 1 else ""
        return f"failed: {one_line(error)}{times}"


def _text(line: str, full: bool) -> Text:
    """``line`` cut at the terminal's width, or wrapped with ``full``; failures in red."""
    line = visible(line)
    text = Text(line, overflow="fold") if full else Text(line, no_wrap=True, overflow="ellipsis")
    text.highlight_regex(r"^(call of|agent|node|tool|rollout|trace) \S+", "bold")
    text.highlight_regex(r"  (failed|refused): .*", "red")
    return text


def _event_line(event: Event, errors: _Errors) -> str:
    error = "" if event.error is None else f"  {errors.text(event.error)}"
    is_own = event.agent is None or event.agent == event.name or event.kind == "agent"
    agent = "" if is_own else f"  (agent {one_line(str(event.agent))})"
    return f"{event.kind} {one_line(event.name)}{agent}{error}"


def _call_lines(call: Call, trace: Trace, credit: CallCredit | None, errors: _Errors, full: bool) -> Iterator[str]:
    parts = [f"call of {one_line(call.agent or 'no agent')}"]
    version = "" if call.policy_version is None else f" version {call.policy_version}"
    if call.model:  # unknown if a refused request could not be read
        parts.append(f"{one_line(call.model)}{version}")
    if call.prompt_ids is not None and call.output_ids is not None:
        parts.append(f"{len(call.prompt_ids)} → {len(call.output_ids)} tokens")
    if call.context is not None:
        parts.append(f"context {call.context}{f' ({call.context_reason})' if call.context_reason else ''}")
    if call.replays is not None:
        parts.append(f"answered from the record of call {call.replays}")
    if call.forks is not None:
        parts.append(f"sampled in place of call {call.forks}")
    if call.tools and call.response is not None and has_unread_call(call.response, call.tools):
        parts.append("a tool call as text, which the agent receives as text")
    if call.finish_reason not in (None, "stop"):
        parts.append(f"finish reason {call.finish_reason}")
    if credit is not None:
        use = "trained" if credit.advantage else "without gradient from rewards"
        parts.append(f"reward {_number(credit.reward)}, advantage {credit.advantage:+.3f}, {credit.tokens} {use}")
    parts += [
        f"call reward {_number(r.value)}{f' ({one_line(r.name)})' if r.name else ''}"
        for r in trace.rewards
        if r.call == call.id
    ]
    if call.refused is not None:
        parts.append(f"refused: {one_line(call.refused)}")
    elif call.error is not None:
        parts.append(errors.text(call.error))
    yield "  ".join(parts)
    messages = call.messages if full else call.messages[-1:]
    for message in messages:
        yield from _message_lines(one_line(str(message.get("role", "?"))), message, full)
    if call.response is not None:
        yield from _message_lines(one_line(call.agent or "response"), call.response, full)


def _message_lines(role: str, message: Mapping[str, Any], full: bool) -> Iterator[str]:
    text = _content_text(message.get("content"))
    if text or not message.get("tool_calls"):
        if not full:
            yield f"{_INDENT}{role}: {one_line(text)}"
        else:
            first, *rest = text.split("\n")
            yield f"{_INDENT}{role}: {first}"
            yield from (f"{_INDENT * 2}{line}" for line in rest)
    for function in _functions(message.get("tool_calls")):
        yield f"{_INDENT}{role} calls {one_line(str(function.get('name', '?')))} {one_line(str(function.get('arguments', '')))}"


def _functions(tool_calls: Any) -> Iterator[Mapping[str, Any]]:
    """What is called. A refused request may have anything there."""
    for call in cast("list[Any]", tool_calls) if isinstance(tool_calls, list) else ():
        function = call.get("function") if isinstance(call, Mapping) else None
        yield function if isinstance(function, Mapping) else {"arguments": call}


def _content_text(content: Any) -> str:
    """A message's content as text: a string, or the texts of a list of parts."""
    if isinstance(content, list):
        return "\n".join(
            str(part.get("text", f"<{part.get('type', '?')}>")) if isinstance(part, Mapping) else str(part)
            for part in cast("list[Any]", content)
        )
    return "" if content is None else str(content)


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.3f}"
