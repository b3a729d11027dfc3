"""The orders of roles that a chat template renders, and other conversations written in them.

Templates raise an error for, or leave out, a system message after others, messages of one role in a row, or the assistant's at the start.
Such messages are written in a form that the template renders. It depends only on the messages before and up to the next response, so that
the text of a conversation begins with the texts of its prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_core.chat.raw_template import in_order

Message = dict[str, Any]

WRITTEN = "written"
"""The key of messages of the user that another role's text was written into. They are joined with the next message of the user."""
_FLAGS = (WRITTEN, "part", "orphan")
_MARKS = [f"probe_{i}" for i in range(5)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Roles:
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
    any_start: bool
    """A conversation without a message of the user at its start."""
    user_after_calls: bool
    """A message of the user after results, or after calls without any."""
    orphans: bool
    """A result without a call."""
    names: bool
    """The names of users."""


def find_roles(renders: Sequence[Callable[..., str]], enders: frozenset[str], call: Message, *, results: bool) -> Roles:
    """Render small conversations and search for their texts.

    ``renders``: each returns the text of messages, or "" for an error (`RawTemplate.attempt`). ``call``: a message with a call.
    ``results``: whether the template renders results.
    """

    def say(*roles: str) -> list[Message]:
        result = {"role": "tool", "tool_call_id": call["tool_calls"][0]["id"]}
        kinds = {"call": call, "tool": result}
        return [{"content": mark, **kinds.get(role, {"role": role})} for role, mark in zip(roles, _MARKS, strict=False)]

    def keeps(*roles: str) -> bool:
        messages = say(*roles)
        marks = [m["content"] for m in messages if m["content"] in _MARKS]
        return all(in_order(render(messages), marks) for render in renders)

    def ends_between(*roles: str) -> bool:
        texts = [render(say(*roles)).partition("probe_1")[2].partition("probe_2")[0] for render in renders]
        return all(any(ender in text for ender in enders) for text in texts)

    named = [{"role": "user", "content": "x", "name": "probe_name"}]
    # Some templates leave it out after results.
    system = keeps("system", "user", "assistant", "user") and (not results or keeps("system", "user", "call", "tool"))
    return Roles(
        system=keeps("system", "user") and system,
        systems=keeps("system", "system", "user"),
        late_system=keeps("user", "assistant", "system", "user")
        and keeps("system", "user", "assistant", "system", "user")
        and keeps("user", "system")
        and (not results or keeps("user", "call", "tool", "system")),
        users=keeps("user", "user") and keeps("user", "assistant", "user", "user"),
        assistants=keeps("user", "assistant", "assistant", "user")
        and ends_between("user", "assistant", "assistant", "user"),
        any_start=keeps("assistant", "user")
        and (not system or (keeps("system", "assistant", "user") and keeps("system"))),
        user_after_calls=keeps("user", "call", "user") and (not results or keeps("user", "call", "tool", "user")),
        orphans=keeps("user", "assistant", "tool"),
        names=all("probe_name" in render(named) for render in renders),
    )


def write_names(messages: Sequence[Message], roles: Roles) -> list[Message]:
    """``messages`` with the names of users in their text, if the template does not show them."""
    return [
        {**{k: v for k, v in m.items() if k != "name"}, "content": f"{m['name']}: {m['content']}".rstrip()}
        if not roles.names and m["role"] in ("user", "system") and m.get("name") not in (None, "", m["role"])
        else m
        for m in messages
    ]


def write_systems(messages: Sequence[Message], roles: Roles) -> list[Message]:
    """``messages`` with system messages where the template renders them; others are messages of the user with a label."""
    ready: list[Message] = []
    for m in messages:
        if m["role"] != "system" or not ready:
            ready.append(m)
        elif all(earlier["role"] == "system" for earlier in ready):
            ready = [*ready, m] if roles.systems else [_join(ready[0], m)]
        else:
            ready.append(m if roles.late_system else written("system", m["content"]))
    return ready


def written(label: str, text: str) -> Message:
    """A message of the user with ``text`` of another role."""
    return {"role": "user", "content": f"<{label}>\n{text}\n</{label}>", WRITTEN: True}


def fold_system(messages: list[Message]) -> list[Message]:
    """Move the system message to the start of the first message of the user, for templates without one."""
    system, *rest = messages
    if rest and rest[0]["role"] == "user":
        return [{**rest[0], "content": f"{system['content']}\n\n{rest[0]['content']}"}, *rest[1:]]
    return [{"role": "user", "content": system["content"]}, *rest]


def order_roles(messages: Sequence[Message], roles: Roles, *, generate: bool) -> list[Message]:
    """``messages`` in an order that the template renders: texts of the user are joined, and empty messages are between others.

    ``generate``: a response follows.
    """
    ready: list[Message] = []
    for m in messages:
        _append(ready, m, roles)
    if generate and ready[-1]["role"] in ("system", "assistant"):
        begun = any(m["role"] != "system" for m in ready)
        if not (roles.assistants if begun else roles.any_start):
            _append(ready, _blank("user"), roles)
    return [{k: v for k, v in m.items() if k not in _FLAGS} for m in ready]


def _append(ready: list[Message], m: Message, roles: Roles) -> None:
    role, last = m["role"], ready[-1] if ready else None
    before = None if last is None or (last["role"] == "system" and len(ready) == 1) else last["role"]
    if before is None and role not in ("user", "system") and not roles.any_start:
        ready.append(_blank("user"))
    elif role == before == "assistant" and not (roles.assistants or m.get("part")):
        _append(ready, _blank("user"), roles)
    elif role == before == "user" and last is not None and (last.get(WRITTEN) or not roles.users):
        ready[-1] = _join(last, m, "\n" if last.get(WRITTEN) else "\n\n")
        return
    elif (
        role == "user"
        and last is not None
        and (before == "tool" or last.get("tool_calls"))
        and not roles.user_after_calls
    ):
        ready.append(_blank("assistant"))
    ready.append(m)


def _blank(role: str) -> Message:
    return {"role": role, "content": ""}


def _join(first: Message, second: Message, between: str = "\n\n") -> Message:
    texts = [m["content"] for m in (first, second) if m["content"]]
    return {**first, "content": between.join(texts), WRITTEN: bool(second.get(WRITTEN))}
