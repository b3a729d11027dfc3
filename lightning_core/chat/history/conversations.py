"""Names the cause for which a prompt does not continue its agent's conversation, and the first message that differs.

A reason is ``CAUSE: DETAIL``. Nothing is compared while prompts continue. Conversations are places in the rollout's tree of messages
(``places.py``), so they keep no messages of their own.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from mmap import mmap
from typing import Any, Literal, get_args

from lightning_core.chat.chat import RenderedPrompt
from lightning_core.chat.history.places import Place
from lightning_core.chat.messages import (
    EXCERPT_AFTER,
    Message,
    compared,
    excerpt,
    remove_from_system,
    thought_of,
    with_calls,
)

Cause = Literal[
    "clock", "tools", "roles", "shortened", "rewritten", "results", "ids", "reasoning", "stopped", "handoff", "leaked", "examples",
    "ambiguous", "template", "rendering",
]  # fmt: skip
"""``clock``: a message differs in numbers and dates only; ``tools``: the tools, ``tool_choice`` or the schema of the response differ;
``roles``: a message came back from another role; ``shortened``: earlier messages are missing; ``results``: the result of a tool was
cleared or replaced; ``ids``: a result has another call id; ``reasoning``: the reasoning of a response came back edited; ``rewritten``:
any other change of earlier messages; ``stopped``: a stop string ended the earlier response; ``handoff``: another agent's conversation;
``leaked``: another rollout's; ``examples``: responses from none of these; ``ambiguous``: several responses have the text that came
back; ``template``: the chat template renders earlier turns differently; ``rendering``: earlier turns were rendered after few messages, and
the template renders them differently in their conversation."""
CHANGES: tuple[Cause, ...] = (
    "clock", "tools", "roles", "shortened", "rewritten", "results", "ids", "reasoning", "stopped",
)  # fmt: skip
"""The causes in a conversation of the agent itself."""
ADVICE: Mapping[Cause, str] = {
    "clock": "compute the time once for each rollout, or put it into the newest message",
    "tools": "give all calls of a conversation the same tools and response schema",
    "roles": "send each message back under the role that it had",
    "shortened": "each summary or cut of a history is a row; make it rarely, or pass the whole history",
    "rewritten": "pass earlier messages back as they were returned, and append new ones",
    "results": "keep the results of tools as they were, or clear many at once and rarely: each time is a row",
    "ids": "pass each result back with the id of its call",
    "reasoning": "send reasoning back as it was returned, or leave it out",
    "stopped": "let the model end its responses, without stop strings in the request",
    "ambiguous": "send responses back with their reasoning and call ids",
    "template": "set policy.chat_template_kwargs so that the template keeps earlier turns as they were, if it allows it",
    "leaked": "give each rollout its own thread, session or checkpointer, or set rollouts.fresh: true",
}
"""By cause; the others are as intended."""

_MOST_CONVERSATIONS = 8
"""Conversations that are kept for each agent."""
_MOST_AGENTS = 512
"""Agents whose conversations are kept. Clients choose their names."""
_DIGEST_SIZE = 8
_OTHER_ROLE = {"user": "assistant", "assistant": "user"}
_DATES = re.compile(
    r"\d+|\b(?:jan(?:uary)?|feb(?:ruary)?|mar(?:ch)?|apr(?:il)?|may|june?|july?|aug(?:ust)?|sept?(?:ember)?|oct(?:ober)?|nov(?:ember)?"
    r"|dec(?:ember)?|(?:mon|tues|wednes|thurs|fri|satur|sun)day|mon|tue|wed|thu|fri|sat|sun|am|pm)\b",
    re.IGNORECASE,
)
"""Numbers, months, days of the week and halves of a day."""


class SampledConversations:
    """The conversations that rollouts sampled lately, by key. Processes may share it: each entry has a digest of itself.

    A conversation replaces another one with the same slot.
    """

    SIZE = 32 << 16
    """Bytes of its memory."""

    def __init__(self, memory: memoryview | None = None) -> None:
        """``memory``: zeros, or what others have written; None: its own."""
        self._memory = memoryview(mmap(-1, self.SIZE)) if memory is None else memory

    def add(self, key: bytes, rollout: str) -> None:
        """Note that ``rollout`` sampled the conversation ``key`` (`Place.conversation`)."""
        self._memory[self._slot(key)] = _entry(key + _digest(rollout.encode()))

    def is_from_another(self, key: bytes, rollout: str) -> bool:
        """Whether a rollout other than ``rollout`` sampled the conversation ``key`` last."""
        found = bytes(self._memory[self._slot(key)])
        own = found[len(key) : -_DIGEST_SIZE] == _digest(rollout.encode())
        return found == _entry(found[:-_DIGEST_SIZE]) and found.startswith(key) and not own

    def _slot(self, key: bytes) -> slice:
        start = int.from_bytes(key[:2]) * 32
        return slice(start, start + 32)


def _entry(body: bytes) -> bytes:
    return body + _digest(body)


def _digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=_DIGEST_SIZE).digest()


@dataclass(frozen=True, slots=True, eq=False)
class _Conversation:
    end: Place
    """Of its last response."""
    setting: str
    given: int
    """The number of responses in its first prompt, such as examples."""

    @property
    def messages(self) -> tuple[Message, ...]:
        return _without_instructions([place.message for place in self.end.path()], self.setting)

    def responses(self) -> set[str]:
        """The responses that were sampled in it, as they are compared."""
        places = [place for place in self.end.path() if place.role == "assistant"]
        return {with_calls(place.message) for place in places[self.given :]} - {""}


@dataclass(slots=True, kw_only=True)
class Conversations:
    """The latest conversations of one rollout, by agent. Thread-safe."""

    rollout: str
    sampled: SampledConversations = field(default_factory=SampledConversations)
    """Of all rollouts."""
    _latest: dict[str | None, tuple[_Conversation, ...]] = field(default_factory=dict[Any, Any])
    _lock: threading.Lock = field(default_factory=threading.Lock)
    """Held to change ``_latest``."""

    def add(self, agent: str | None, prompt: RenderedPrompt, response: Place) -> None:
        """Record the place of a response (`Chat.remember`)."""
        begins = prompt.context == "new"
        path = set[int]() if begins else set(map(id, response.path()))
        examples = len(_responses(prompt.messages)) if begins and cause_of(prompt.reason) not in CHANGES else None
        with self._lock:
            latest = self._latest.get(agent, ())
            continued = next((c for c in reversed(latest) if id(c.end) in path), None)
            given = (
                min((c.given for c in latest if continued in (None, c)), default=0) if examples is None else examples
            )
            made = _Conversation(response, prompt.tools, given)
            kept = (*(c for c in latest if c is not continued), made)[-_MOST_CONVERSATIONS:]
            # In the order of the agents' latest responses. A new dict: other threads read the old one meanwhile.
            others = [(name, found) for name, found in self._latest.items() if name != agent]
            self._latest = dict([*others[1 - _MOST_AGENTS :], (agent, kept)])
        if response.turn is not None:
            self.sampled.add(response.conversation, self.rollout)

    def explain(self, agent: str | None, prompt: RenderedPrompt, *, demonstrations: int = 0) -> str:
        """The reason ``prompt``, which has responses, continues no conversation of ``agent``.

        ``demonstrations``: the number of messages after the system prompt that the endpoint added, from wherever they are.
        """
        messages = _messages_of(prompt)
        responses, latest = _responses(messages), self._latest.get(agent, ())
        own = {shown for c in latest for shown in c.responses()}
        if not any(with_calls(messages[i]) in own for i in responses) and (
            found := self._from_others(agent, prompt, demonstrations)
        ):
            return found
        earlier = [c for c in reversed(latest) if len(responses) > c.given]
        if earlier:
            return _change(max(earlier, key=lambda c: _common(c.messages, messages)), messages, prompt.tools)
        first = responses[0]
        return _reason("examples", f"message {first} (assistant) was not sampled in this rollout", messages[first])

    def explain_branch(self, agent: str | None, prompt: RenderedPrompt, *, demonstrations: int = 0) -> str | None:
        """The reason ``prompt``, which continues recorded tokens, does not continue later ones of ``agent``; None if it needs none.

        It needs one if it has a later response that differs from what was sampled there, and is not another agent's.
        """
        path = prompt.place.path() if prompt.place else []
        recorded = max((i for i, place in enumerate(path) if place.turn is not None), default=len(path))
        given = any(place.role == "assistant" for place in path[recorded + 1 :])
        longer = [
            c
            for c in reversed(self._latest.get(agent, ()))
            if given and c.end is not path[recorded] and path[recorded] in c.end.path()
        ]
        messages = _messages_of(prompt)
        if not longer or self._from_others(agent, prompt, demonstrations):
            return None
        return _change(max(longer, key=lambda c: _common(c.messages, messages)), messages, prompt.tools)

    def _from_others(self, agent: str | None, prompt: RenderedPrompt, demonstrations: int) -> str | None:
        """The reason ``prompt`` has a response of another agent or of another rollout; None if it has none."""
        messages = _messages_of(prompt)
        latest = tuple(self._latest.items())  # other threads add agents
        others = {shown: a for a, cs in latest if a != agent for c in cs for shown in c.responses()}
        start = next((i for i, m in enumerate(messages) if m["role"] != "system"), 0) + demonstrations
        responses = [i for i in _responses(messages) if i >= start]
        for i in responses:
            if (shown := with_calls(messages[i])) in others:
                who = "an agent without a name" if others[shown] is None else f"agent {others[shown]!r}"
                return _reason("handoff", f"message {i} (assistant) is a response of {who}", messages[i])
        path = prompt.place.path()[len(prompt.messages) - len(messages) :] if prompt.place else []
        for i in responses:
            if self.sampled.is_from_another(path[i].conversation, self.rollout):
                return _reason("leaked", f"message {i} (assistant) was sampled in another rollout", messages[i])
        return None


def cause_of(reason: str | None) -> Cause | None:
    """The cause of ``reason``; None for a response that came back in another form."""
    if (reason or "").startswith("the template "):
        return "template"
    name = (reason or "").partition(":")[0]
    return next((cause for cause in get_args(Cause) if cause == name), None)


def _reason(cause: Cause, detail: str, message: Message) -> str:
    return f"{cause}: {detail}: {excerpt(with_calls(message), 0)}"


def _messages_of(prompt: RenderedPrompt) -> tuple[Message, ...]:
    """The messages of ``prompt`` without its instructions (`Chat.render`), which are compared as a part of its setting."""
    return _without_instructions(prompt.messages, prompt.tools)


def _without_instructions(messages: Sequence[Message], setting: str) -> tuple[Message, ...]:
    if not setting:  # no chat
        return tuple(messages)
    _, instructions, _ = json.loads(setting)
    return remove_from_system(messages, "\n".join(line for _, line in instructions))


def _change(earlier: _Conversation, now: Sequence[Message], setting: str) -> str:
    """The first difference between ``earlier`` and the start of the messages ``now``."""
    before = earlier.messages
    changed_at = [
        i for i, pair in enumerate(zip(before, now, strict=False)) if not _same(pair) or _is_thought_edited(*pair)
    ]
    at = changed_at[0] if changed_at else min(len(before), len(now))
    if at == len(before):
        if earlier.setting == setting:
            return _reason("stopped", f"message {at - 1} (assistant) ended at a stop string of the request", before[-1])
        return f"tools: the same messages {_setting_change(earlier.setting, setting)}"
    # An agent that plays both sides has another system prompt for each.
    turn = next((i for i in changed_at if before[i]["role"] != "system"), None)
    if turn is not None and with_calls(before[turn]) == with_calls(now[turn]):
        role, other = now[turn]["role"], before[turn]["role"]
        if _OTHER_ROLE.get(role) == other:
            return _reason("roles", f"message {turn} is from the {role}, and was from the {other}", now[turn])
    role = before[at]["role"]
    if at == len(now):
        return f"shortened: message {at} ({role}) and later ones are missing: {excerpt(with_calls(before[at]), 0)}"
    was, text = with_calls(before[at]), with_calls(now[at])
    difference = _first_difference(was, text)
    where = f"message {at} ({now[at]['role']})"
    changed = f"{where} was {excerpt(was, difference)} and is now {excerpt(text, difference)}"
    if was == text and _is_thought_edited(before[at], now[at]):
        was, text = thought_of(before[at]), thought_of(now[at])
        difference = _first_difference(was, text)
        return (
            f"reasoning: the reasoning of {where} was {excerpt(was, difference)} and is now {excerpt(text, difference)}"
        )
    if was == text and role == now[at]["role"] == "tool":
        ids = [message.get("tool_call_id") for message in (before[at], now[at])]
        return f"ids: {where} had the tool_call_id {ids[0]!r} and now has {ids[1]!r}: {excerpt(text, difference)}"
    if was == text:
        return f"rewritten: {where} has the same text, but another role, name or tool_call_id: {excerpt(text, 0)}"
    if role == now[at]["role"] and _DATES.sub("0", was) == _DATES.sub("0", text):
        return f"clock: {changed}"
    if len(now) < len(before):
        return f"shortened: {changed}; there were {len(before)} messages, and now there are {len(now)}"
    return f"{'results' if role == now[at]['role'] == 'tool' else 'rewritten'}: {changed}"


def _setting_change(before: str, now: str) -> str:
    """The difference between two settings of prompts with the same messages (`Chat.render`)."""
    (tools_before, required_before, _), (tools, required, _) = json.loads(before), json.loads(now)
    if tools_before != tools:
        old, new = ([_tool_name(tool) for tool in listed] for listed in (tools_before, tools))
        if old == new:
            return f"have other definitions of the tools {new}"
        return f"had the tools {old} and now have {new}"
    for name in dict([*required_before, *required]):
        was, text = dict(required_before).get(name, ""), dict(required).get(name, "")
        if was != text:
            at = _first_difference(was, text)
            return f"have another {name}: it was {excerpt(was, at)} and is now {excerpt(text, at)}"
    return "are for another model"


def _tool_name(tool: Any) -> str:
    function = tool.get("function") if isinstance(tool, dict) else None
    return str(function.get("name")) if isinstance(function, dict) else str(tool)[:EXCERPT_AFTER]


def _responses(messages: Sequence[Message]) -> list[int]:
    return [i for i, message in enumerate(messages) if message["role"] == "assistant"]


def _same(pair: tuple[Message, Message]) -> bool:
    return compared(pair[0]) == compared(pair[1])


def _common(one: Iterable[Message], other: Iterable[Message]) -> int:
    return sum(map(_same, zip(one, other, strict=False)))


def _is_thought_edited(before: Message, now: Message) -> bool:
    """Whether ``now`` has reasoning, and another than ``before``; clients may leave it out."""
    return now["role"] == "assistant" and thought_of(now) not in ("", thought_of(before))


def _first_difference(one: str, other: str) -> int:
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one.startswith(other[low:middle], low) else (low, middle - 1)
    return low
