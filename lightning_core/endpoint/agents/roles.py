"""Distinguishes the roles of a program whose calls have no name.

A system prompt may vary although one agent calls: it has a clock, the state of the task, or documents. Two calls have one role if

- their system prompts are equal but for numbers, weekdays and months, or have one template: the first sentence, its first words or, if it
  does not say who the model is, most of their words; within one conversation the first words are enough. Prompts that alternate
  (A, B, A, B) outside one conversation are two roles, however similar. Only the beginning of a prompt is compared;
- one offers all tools of the other, or they are in one conversation;
- they request one model, or begin with the same message, or are in one conversation.
"""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import takewhile
from typing import Any

from lightning_core.capture.selectors import as_yaml
from lightning_core.endpoint.request_body import conversation, system_prompt, text_of_message, tool_names
from lightning_core.errors import ConfigError, plural

_CONVERSATIONS = 64
"""Most conversations of a role that are remembered."""
_SHORT = 12
"""Prompts of fewer words have no template: a single word makes the role."""
_TEMPLATE = 0.7
"""Share of the words that two prompts of one template have in common."""
_FIRST_WORDS = 5
"""Words of a first sentence that show the role, and of a beginning within one conversation."""
_LEADING_WORDS = 8
"""First words that show the role although their sentence goes on in another way."""
_COMPARED = 4096
"""Characters of a system prompt that are compared, at each call on the endpoint's event loop."""
_SHOWN = 60

_VARYING = re.compile(
    r"\d+|\b(?:mon|tues|wednes|thurs|fri|satur|sun)day\b"
    r"|\b(?:jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)(?:uary|ruary|ch|il|e|y|ust|tember|ober|ember)?\b|\b[ap]m\b",
    re.IGNORECASE,
)
_SENTENCE = re.compile(r"\s*([^.!?\n]*)")
_IDENTITY = re.compile(r"you are|you're|act as|your role is|as an? ", re.IGNORECASE)
_WORD = re.compile(r"\S+")

_Place = tuple[int, int, int]
"""The number of messages of a request, and the hashes of the first and the last."""


class _Messages:
    """The messages of a request. Only those are hashed that are compared: histories are long."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        self._messages = conversation(body)
        self._hashes: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._messages)

    def hash_of(self, index: int) -> int:
        """The hash of the text of a message."""
        if index not in self._hashes:
            self._hashes[index] = hash(text_of_message(self._messages[index]))
        return self._hashes[index]


@dataclass(frozen=True, slots=True)
class _Call:
    """The properties of a call that show its role."""

    prompt: str
    beginning: str
    """The compared part of the prompt, without what varies."""
    model: str
    tools: frozenset[str]
    opening: str
    """The first message."""


class RoleOfCall:
    """What a request with the JSON ``body`` shows of its role."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        self.call = _call_of(body)
        self.messages = _Messages(body)


class Role:
    """Calls that one agent makes."""

    def __init__(self, first: _Call, *, calls: int = 0) -> None:
        self.first = self.last = first
        self.calls = calls
        self._tool_sets = {first.tools}
        self._models = {first.model}
        self._openings = {hash(first.opening)}
        self._conversations: deque[tuple[_Place, str]] = deque(maxlen=_CONVERSATIONS)
        """Where they were last, and with which system prompt."""
        self._turns: deque[_Call] = deque(maxlen=4)
        """The latest calls, each with another system prompt than the one before it."""

    def includes(self, call: _Call, messages: _Messages) -> bool:
        """Whether ``call`` has this role."""
        continues = self._continued(messages) is not None
        if not any(_is_same_prompt(c.beginning, call.beginning, continues=continues) for c in (self.last, self.first)):
            return False
        return continues or (
            any(_is_same_toolbox(tools, call.tools) for tools in self._tool_sets)
            and (call.model in self._models or hash(call.opening) in self._openings)
        )

    def add(self, call: _Call, messages: _Messages) -> None:
        """Count ``call``."""
        continued = self._continued(messages)
        if continued is not None:
            self._conversations.remove(continued)
        # Conversations side by side, each with its own prompt, are no change of prompts.
        before = {self._turns[-1].beginning} if self._turns else set[str]()
        if continued is not None:
            before.add(continued[1])
        if call.beginning not in before:
            self._turns.append(call)
        if messages:
            place = len(messages), messages.hash_of(0), messages.hash_of(len(messages) - 1)
            self._conversations.append((place, call.beginning))
        self._tool_sets.add(call.tools)
        self._models.add(call.model)
        self._openings.add(hash(call.opening))
        self.calls, self.last = self.calls + 1, call

    def split(self) -> Role | None:
        """Another role with the prompt that takes turns with the last one, if two did so twice."""
        prompts = [call.beginning for call in self._turns]
        if len(prompts) < 4 or prompts[:2] != prompts[2:]:
            return None
        other = Role(self._turns[2], calls=self.calls // 2)
        other._tool_sets |= self._tool_sets
        other._models |= self._models
        other._openings |= self._openings
        self.first, self.calls = self.last, self.calls - other.calls
        self._turns.clear()
        return other

    def _continued(self, messages: _Messages) -> tuple[_Place, str] | None:
        """The conversation that a call with these messages goes on with."""
        for known in self._conversations:
            count, first, last = known[0]
            if count < len(messages) and messages.hash_of(0) == first and messages.hash_of(count - 1) == last:
                return known
        return None


class Roles:
    """The roles that were seen in one rollout."""

    def __init__(self, found: ConfigError | None = None) -> None:
        """``found``: the error for the roles that another process has seen."""
        self._roles: list[Role] = []
        self._found = found

    def add(self, request: RoleOfCall) -> None:
        """Count a call."""
        call, messages = request.call, request.messages
        fitting = (role for role in self._roles if role.includes(call, messages))
        # Roles of prompts that alternate are similar: the one that began with the same prompt comes first.
        role = min(fitting, key=lambda role: role.first.beginning != call.beginning, default=None)
        if role is None:
            role = Role(call)
            self._roles.append(role)
        role.add(call, messages)
        if (other := role.split()) is not None:
            self._roles.append(other)

    def problem(self) -> ConfigError | None:
        """The error for several roles; None if there is only one."""
        return several_roles(self._roles) if len(self._roles) > 1 else self._found


def several_roles(roles: Sequence[Role]) -> ConfigError:
    """The error for several roles without names, with rules that name them."""
    shown = "; ".join(f"{i}. {_describe(role.last)} ({plural(role.calls, 'call')})" for i, role in enumerate(roles, 1))
    rules = ", ".join(f"{{name: role-{i}, {_criterion(role, roles)}}}" for i, role in enumerate(roles, 1))
    return ConfigError(
        f"the calls of this program have no name, and {len(roles)} roles in one rollout: {shown}. Name the roles and choose those to "
        f"train, such as agents: {{train: [role-1], named: [{rules}]}}. Give roles that are one agent the same name. A rule under "
        "agents.auxiliary excludes calls from training that an agent makes for itself, such as titles."
    )


def describe_call(body: Mapping[str, Any]) -> str:
    """The beginning of the prompt, the model and the tools of a request."""
    return _describe(_call_of(body))


def _call_of(body: Mapping[str, Any]) -> _Call:
    opening = "".join(map(text_of_message, conversation(body)[:1]))
    prompt = system_prompt(body)
    return _Call(
        prompt, _without_variation(prompt[:_COMPARED]), str(body.get("model") or ""), tool_names(body), opening
    )


@lru_cache(maxsize=256)
def _without_variation(text: str) -> str:
    return _VARYING.sub("0", text)


def _describe(call: _Call) -> str:
    prompt = f"system prompt {_start(call.prompt)!r}"
    if not call.prompt:
        prompt = f"no system prompt, first message {_start(call.opening)!r}"
    tools = f"tools {', '.join(sorted(call.tools))}" if call.tools else "no tools"
    return f"{prompt}, model {call.model or '(none)'}, {tools}"


def _start(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _SHOWN else f"{line[:_SHOWN]}…"


def _criterion(role: Role, roles: Sequence[Role]) -> str:
    """Fields of a rule in `agents.named` that match ``role`` and, if possible, no other, as YAML."""
    call, others = role.last, [other.last for other in roles if other is not role]
    texts = [other.prompt or other.opening for other in others]
    model = f"model: {as_yaml(call.model)}"
    tools = f"tools: [{', '.join(map(as_yaml, sorted(call.tools)))}]"
    if call.prompt and (part := _distinctive(call.prompt, texts)):
        return f"contains: {as_yaml(part)}"
    if call.model and all(other.model != call.model for other in others):
        return model
    if not any(call.tools <= other.tools if call.tools else not other.tools for other in others):
        return tools
    if not call.prompt and (part := _distinctive(call.opening, texts)):
        return f"contains: {as_yaml(part)}"
    part = _distinctive(call.prompt or call.opening, [])
    return f"contains: {as_yaml(part)}, {model}, {tools}" if part else f"{model}, {tools}"


def _distinctive(text: str, others: Sequence[str]) -> str:
    """Words of ``text`` that none of ``others`` contains, from its beginning or from where it differs; empty if there are none."""
    words = [(match.start(), match.end()) for match in _WORD.finditer(text)]
    same = max((len(_common(text.split(), other.split())) for other in others), default=0)
    for start in dict.fromkeys((0, max(0, same - 2), same)):
        for count in range(min(4, len(words)), 9):
            chosen = words[start : start + count]
            part = text[chosen[0][0] : chosen[-1][1]] if chosen else ""
            if part and not any(part in other for other in others):
                return part
    return ""


def _is_same_prompt(one: str, other: str, *, continues: bool) -> bool:
    """Whether two beginnings of system prompts are equal, or of one template. ``continues``: they are in one conversation."""
    if one == other:
        return True
    if not one or not other:
        return False
    a, b = one.split(), other.split()
    if continues and len(_common(a, b)) >= _FIRST_WORDS:
        return True
    if max(len(a), len(b)) < _SHORT:
        return False
    first, second = _first_sentence(one), _first_sentence(other)
    same = len(_common(first, second))
    if same >= _LEADING_WORDS or (first == second and same >= _FIRST_WORDS):
        return True
    if any(_IDENTITY.match(" ".join(sentence)) for sentence in (first, second)):
        return first == second
    return (Counter(a) & Counter(b)).total() >= _TEMPLATE * max(len(a), len(b))


def _first_sentence(prompt: str) -> list[str]:
    match = _SENTENCE.match(prompt)
    return [] if match is None else match[1].split()


def _common(a: Sequence[str], b: Sequence[str]) -> list[str]:
    return [x for x, _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False))]


def _is_same_toolbox(a: frozenset[str], b: frozenset[str]) -> bool:
    return a == b or (bool(a and b) and (a <= b or b <= a))
