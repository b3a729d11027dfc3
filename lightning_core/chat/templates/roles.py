"""The orders of roles that a chat template renders, and other conversations written in them.

Templates raise an error for, or leave out, a system message after others, messages of one role in a row, or the assistant's at the start.
Such messages are written in a form that the template renders. It depends only on the messages before and up to the next response, so that
the text of a conversation begins with the texts of its prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import takewhile
from typing import Any

from lightning_core.chat.templates.raw_template import in_order

_Message = dict[str, Any]

WRITTEN = "written"
"""The key of messages of the user that another role's text was written into. They are joined with the next message of the user."""
_FLAGS = (WRITTEN, "part", "orphan")
_MARKS = [f"probe_{i}" for i in range(6)]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleOrders:
    """What a template renders as it is."""

    system: bool
    """A system message at the start, which stays there."""
    systems: bool
    """Several at the start."""
    late_system: bool
    """One after other messages, in its place."""
    users: bool
    """Several messages of the user in a row."""
    assistants: bool
    """Several of the assistant, each with its end."""
    answers: bool
    """Several texts of the assistant with results between them."""
    any_start: bool
    """A conversation without a message of the user at its start."""
    user_after_calls: bool
    """A message of the user after results, or after calls without any."""
    orphans: bool
    """A result without a call."""
    names: bool
    """The names of users."""


def find_roles(
    render: Callable[[list[_Message]], str], enders: frozenset[str], call: _Message, *, results: bool
) -> RoleOrders:
    """Render small conversations and search for their texts.

    ``render``: returns the text of messages, or "" for an error (`RawTemplate.attempt`). ``call``: a message with a call.
    ``results``: whether the template renders results.
    """

    kinds = {"call": call, "tool": {"role": "tool", "tool_call_id": call["tool_calls"][0]["id"]}}

    @cache
    def say(*roles: str) -> str:
        pairs = zip(roles, _MARKS, strict=False)
        return render([{"content": mark, **kinds.get(role, {"role": role})} for role, mark in pairs])

    def keeps(*roles: str) -> bool:
        marks = [mark for role, mark in zip(roles, _MARKS, strict=False) if role != "call"]
        return in_order(say(*roles), marks)

    def ends(*roles: str) -> bool:
        """Whether they are kept, and the second message ends before the third."""
        between = say(*roles).partition("probe_1")[2].partition("probe_2")[0]
        return keeps(*roles) and any(ender in between for ender in enders)

    def begins(first: Sequence[str], more: Sequence[str]) -> bool:
        """Whether the last message of ``first`` is written in the same way with ``more``."""
        mark = _MARKS[len(first) - 1]
        return say(*first).partition(mark)[0] == say(*first, *more).partition(mark)[0]

    # Some templates leave it out after results.
    system = keeps("system", "user", "assistant", "user") and (not results or keeps("system", "user", "call", "tool"))
    user_after_calls = keeps("user", "call", "user") and (not results or keeps("user", "call", "tool", "user"))
    return RoleOrders(
        system=keeps("system", "user") and system,
        systems=keeps("system", "system", "user"),
        late_system=ends("user", "assistant", "system", "user")
        and keeps("system", "user", "assistant", "system", "user")
        and keeps("user", "system")
        and (not results or keeps("user", "call", "tool", "system")),
        users=keeps("user", "user") and keeps("user", "assistant", "user", "user"),
        assistants=ends("user", "assistant", "assistant", "user")
        and begins(("user", "assistant"), ("assistant", "user")),
        answers=not results or keeps("user", "assistant", "call", "tool", "assistant", "user"),
        any_start=keeps("assistant", "user")
        and (not system or (keeps("system", "assistant", "user") and keeps("system"))),
        user_after_calls=user_after_calls,
        orphans=keeps("user", "assistant", "tool") and keeps("user", "tool", "user"),
        names="probe_name" in render([{"role": "user", "content": "x", "name": "probe_name"}]),
    )


def write_names(messages: Sequence[_Message], roles: RoleOrders) -> list[_Message]:
    """``messages`` with the names of users in their text, if the template does not show them."""
    return [
        {**{k: v for k, v in m.items() if k != "name"}, "content": f"{m['name']}: {m['content']}".rstrip()}
        if not roles.names and m["role"] in ("user", "system") and m.get("name") not in (None, "", m["role"])
        else m
        for m in messages
    ]


def write_systems(messages: Sequence[_Message], roles: RoleOrders) -> list[_Message]:
    """``messages`` with system messages where the template renders them; others are messages of the user with a label."""
    ready: list[_Message] = []
    for m in messages:
        if m["role"] != "system" or not ready:
            ready.append(m)
        elif all(earlier["role"] == "system" for earlier in ready):
            ready = [*ready, m] if roles.systems else [_join(ready[0], m)]
        else:
            ready.append(m if roles.late_system else written("system", m["content"]))
    return ready


def written(label: str, text: str) -> _Message:
    """A message of the user with ``text`` of another role."""
    return {"role": "user", "content": f"<{label}>\n{text}\n</{label}>", WRITTEN: True}


def fold_system(messages: list[_Message]) -> list[_Message]:
    """Move the system message to the start of the first message of the user, for templates without one."""
    system, *rest = messages
    if rest and rest[0]["role"] == "user":
        return [{**rest[0], "content": f"{system['content']}\n\n{rest[0]['content']}"}, *rest[1:]]
    return [{"role": "user", "content": system["content"]}, *rest]


def order_roles(messages: Sequence[_Message], roles: RoleOrders, *, generate: bool) -> list[_Message]:
    """``messages`` in an order that the template renders: texts of the user are joined, and empty messages are between others.

    ``generate``: a response follows.
    """
    ready: list[_Message] = []
    for m in messages:
        _append(ready, m, roles)
    if generate and _needs_user(ready, {"role": "assistant"}, roles):
        _append(ready, _blank("user"), roles)
    return [{k: v for k, v in m.items() if k not in _FLAGS} for m in ready]


def _append(ready: list[_Message], m: _Message, roles: RoleOrders) -> None:
    last = ready[-1] if ready else {"role": None}
    alternate = (last["role"], m["role"]) in (("user", "assistant"), ("assistant", "user"))
    if alternate and not last.get("tool_calls"):
        pass
    elif _needs_user(ready, m, roles):
        _append(ready, _blank("user"), roles)
    elif m["role"] == last["role"] == "user" and (last.get(WRITTEN) or not roles.users):
        ready[-1] = _join(last, m, "\n" if last.get(WRITTEN) else "\n\n")
        return
    elif m["role"] == "user" and not roles.user_after_calls and _turn(ready) and not any(map(_answers, _turn(ready))):
        ready.append(_blank("assistant"))
    ready.append(m)


def _needs_user(ready: Sequence[_Message], m: _Message, roles: RoleOrders) -> bool:
    """Whether the template renders ``m`` only after a message of the user, and ``ready`` ends with none."""
    if m["role"] in ("user", "system"):
        return False
    if all(earlier["role"] == "system" for earlier in reversed(ready)):
        return not roles.any_start
    if m["role"] == "tool" or m.get("part"):
        return False
    if ready[-1]["role"] == "assistant":
        return not roles.assistants
    return not roles.answers and _answers(m) and any(_answers(earlier) for earlier in _turn(ready))


def _turn(ready: Sequence[_Message]) -> list[_Message]:
    """The messages of the assistant, and results, after the last one of the user."""
    return list(takewhile(lambda m: m["role"] not in ("user", "system"), reversed(ready)))


def _answers(m: _Message) -> bool:
    return m["role"] == "assistant" and not m.get("tool_calls")


def _blank(role: str) -> _Message:
    return {"role": role, "content": ""}


def _join(first: _Message, second: _Message, between: str = "\n\n") -> _Message:
    texts = [m["content"] for m in (first, second) if m["content"]]
    return {**first, "content": between.join(texts), WRITTEN: bool(second.get(WRITTEN))}
