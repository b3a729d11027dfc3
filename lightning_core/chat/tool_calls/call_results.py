"""Matches results of tools to the calls of messages, by position first.

A result belongs to the message with calls before it, up to the next response. There it is matched by id, then by name, then by order:
clients repeat ids from turn to turn, replace them, or leave them out. Templates that write no ids show results in the order of calls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from lightning_core.chat.tool_calls.call_ids import IdStyle

NO_RESULT = "[no result]"
"""The result of a call that has none, before one that has."""


def arrange_results(messages: Sequence[dict[str, Any]], style: IdStyle, *, one_call: bool) -> list[dict[str, Any]]:
    """``messages`` with each result behind its calls, in their order, and with an id that the template accepts.

    Several results of one call become one message. Results of no call stay where they are, as ``orphan``. ``one_call``: messages with
    several calls are split into one for each, followed by its result; all but the first are a ``part`` of the same turn.
    """
    if not any(m["role"] == "tool" or m.get("tool_calls") for m in messages):
        return list(messages)
    arranged: list[dict[str, Any]] = []
    earlier: dict[str, str | None] = {}
    """The ids of calls, and what they are now."""
    count = start = 0
    while start < len(messages):
        stop = start + 1
        while stop < len(messages) and messages[stop]["role"] != "assistant":
            stop += 1
        first, *rest = messages[start:stop]
        calls: list[dict[str, Any]] = first.get("tool_calls") or []
        own = {str(call.get("id")) for call in calls}
        # The result of an earlier call belongs to no call here.
        late = [m["role"] == "tool" and str(m.get("tool_call_id")) in earlier.keys() - own for m in rest]
        results = [m for m, is_late in zip(rest, late, strict=True) if m["role"] == "tool" and not is_late]
        owners = iter(match_results(calls, results))
        ids = _accepted_ids(calls, style, count)
        answers: dict[int, dict[str, Any]] = {}
        others: list[dict[str, Any]] = []
        for m, is_late in zip(rest, late, strict=True):
            owner = None if m["role"] != "tool" or is_late else next(owners)
            if owner is None:
                others.append(_orphan(m, style, earlier))
            elif owner in answers:
                answers[owner]["content"] += f"\n{m['content']}"
            else:
                identified = {} if ids[owner] is None else {"tool_call_id": ids[owner]}
                answers[owner] = {**m, **identified}
        arranged += _with_results(first, ids, answers, one_call=one_call) if calls else [_orphan(first, style, earlier)]
        arranged += others
        earlier |= dict(zip((str(call.get("id")) for call in calls), ids, strict=True))
        count += len(calls)
        start = stop
    return arranged


def _with_results(
    asked: dict[str, Any], ids: Sequence[str | None], answers: Mapping[int, dict[str, Any]], *, one_call: bool
) -> list[dict[str, Any]]:
    """A message with calls, which get ``ids``, and their ``answers``, by the index of the call."""
    calls: list[dict[str, Any]] = [
        call if made is None else {**call, "id": made} for call, made in zip(asked["tool_calls"], ids, strict=True)
    ]
    results: list[list[dict[str, Any]]] = [[answers[i]] if i in answers else [] for i in range(len(calls))]
    for i in range(max(answers, default=0)):
        if not results[i]:
            identified = {} if ids[i] is None else {"tool_call_id": ids[i]}
            results[i] = [{"role": "tool", **identified, "content": NO_RESULT}]
    if not one_call:
        return [{**asked, "tool_calls": calls}, *chain.from_iterable(results)]
    turn: list[dict[str, Any]] = []
    for i, call in enumerate(calls):
        part = {"role": asked["role"], "content": "", "part": True} if i else asked
        turn += [{**part, "tool_calls": [call]}, *results[i]]
    return turn


def match_results(calls: Sequence[Mapping[str, Any]], results: Sequence[Mapping[str, Any]]) -> list[int | None]:
    """The index of the call of each of the ``results`` that follow a message with ``calls``; None if it has none.

    A repeated id belongs to each of its calls in turn. A result with the id of none belongs to a call without a result: the first of its
    name, or else the first.
    """
    by_id: dict[str, list[int]] = {}
    for i, call in enumerate(calls):
        if call.get("id") is not None:
            by_id.setdefault(str(call["id"]), []).append(i)
    owners: list[int | None] = []
    answered: set[int] = set()
    for m in results:
        same = by_id.get(str(m.get("tool_call_id")), [])
        owner = next((i for i in same if i not in answered), same[-1] if same else None)
        owners.append(owner)
        answered |= set() if owner is None else {owner}
    for n, m in enumerate(results):
        left = [i for i in range(len(calls)) if i not in answered]
        if owners[n] is None and left:
            owners[n] = owner = next((i for i in left if calls[i]["function"]["name"] == m.get("name")), left[0])
            answered.add(owner)
    return owners


def _accepted_ids(calls: Sequence[Mapping[str, Any]], style: IdStyle, count: int) -> list[str | None]:
    """Ids that the template accepts, each once: the same, or one made of it. None: the only call has none, and needs none."""
    ids: list[str | None] = []
    for i, call in enumerate(calls, count):
        identifier = None if call.get("id") is None else str(call["id"])
        if identifier is None and style is IdStyle.ANY and len(calls) == 1:
            ids.append(None)
        elif identifier is None or identifier in ids or not style.accepts(identifier):
            again = identifier is None or any(str(c.get("id")) == identifier for c in calls[: i - count])
            made = f"{'call' if identifier is None else identifier}_{i}" if again else identifier
            ids.append(style.make(str(made), call["function"]["name"], i))
        else:
            ids.append(identifier)
    return ids


def _orphan(message: dict[str, Any], style: IdStyle, made: Mapping[str, str | None]) -> dict[str, Any]:
    """A message that is not behind its call, if it has one. ``made``: the accepted ids of earlier calls."""
    if message["role"] != "tool":
        return message
    identifier = str(message.get("tool_call_id", "call"))
    accepted = made.get(identifier) or (identifier if style.accepts(identifier) else None)
    if accepted is None:
        accepted = style.make(identifier, str(message.get("name", "tool")), 0)
    identified = {} if style is IdStyle.ANY else {"tool_call_id": accepted}
    return {**message, **identified, "orphan": True}
