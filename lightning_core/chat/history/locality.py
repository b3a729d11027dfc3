"""Finds the conversations whose next turn leaves the text before it as it is, so that only what they add is rendered.

The text that a turn adds is rendered in a short conversation: the first messages, the latest turns and the new messages. That is right if
the template depends on a message's surroundings only, and on no number of messages. It is tested once for each kind of turn: the whole
conversation is rendered too, and both must add the same text. A kind has all that templates test in messages, of far messages as a set:
roles, calls, what is empty, the ids of calls, and the texts that the template itself searches for in contents.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Hashable, Mapping, Sequence
from datetime import date
from typing import Any, NamedTuple

from lightning_core.chat.history.places import PromptMessage
from lightning_core.chat.templates.template import ChatTemplate

logger = logging.getLogger(__name__)

_MOST_KINDS = 1 << 12
"""Kinds of turns that are kept, with those that do not keep the text."""
_GENERATION = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")
_CLOCK = re.compile(r"strftime_now\(([^)]*)\)")
_TIME = re.compile(r"%[^YymdbBajeA-]")
"""A directive of strftime that is not a part of the date."""
_KEEPS_TEXT = ("join", "default", "replace", "strip", "lstrip", "rstrip", "trim")
"""Filters and methods whose arguments are not searched for in a way that the text around depends on."""


class Window(NamedTuple):
    """A short conversation in place of a whole one."""

    kind: Hashable
    earlier: list[PromptMessage]
    """The first and the latest messages of the earlier prompt."""
    now: list[PromptMessage]
    """The same, and the messages after that prompt."""


class _Features(NamedTuple):
    """What is known of a place; see `Place.features`."""

    kind: Hashable
    seen: frozenset[Hashable]
    """The kinds of messages up to the place."""
    call_ids: tuple[str, ...]
    """Of the latest message of the assistant."""
    regular: bool
    """Whether the ids of calls stay as they are, and results are behind their calls."""


class Locality:
    """The kinds of turns that ``template`` renders without a change of earlier text. Thread-safe."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self._tests: tuple[frozenset[str], tuple[str, ...]] | None = None
        """The words and the other texts that the template compares with texts of messages."""
        self._usable: bool | None = None
        self._has_clock = "strftime_now" in template.raw.text
        self._kinds: dict[Hashable, bool] = {}

    def setting(self, variables: Mapping[str, Any] | None) -> str:
        """What else than messages and tools a text depends on."""
        return f"{variables or {}!r}{date.today() if self._has_clock else ''}"

    def window(self, path: Sequence[PromptMessage], at: int, setting: str, *, tools: bool) -> Window | None:
        """The short conversation for the turn that begins with the response ``path[at]``; None if none is shorter."""
        if self._usable is False or not (self._usable or self._read_template()):
            return None
        head = next(i for i, p in enumerate(path) if p.place.role == "assistant")
        starts = [i for i in range(at - 1, head, -1) if path[i].place.role == "assistant"][:3]
        # Templates that alternate roles count messages.
        start = next((i for i in starts if (i - head) % 2 == 0), starts[0] if starts else head)
        if start == head:
            return None
        features = self._features(path)
        if not all(f.regular for f in features[start:]):
            return None
        kinds = [f.kind for f in features]
        kind = (
            tools,
            setting,
            (start - head) % 2,
            features[start - 1].seen,
            tuple(kinds[:head]),
            at - start,
            *kinds[start:],
        )
        earlier = [*path[:head], *path[start:at]]
        return Window(kind, earlier, [*earlier, *path[at:]])

    def find(self, window: Window) -> bool | None:
        """Whether its kind leaves earlier text as it is; None if that is not known."""
        return self._kinds.get(window.kind)

    def learn(self, window: Window, *, keeps: bool) -> bool:
        """Record whether the whole conversation and the short one added the same text. Returns whether they did not although they had."""
        differs = self._kinds.get(window.kind, False) and not keeps
        if differs:
            self._usable = False
            logger.warning(
                "the chat template of %s rendered a turn in another way in its conversation than after few messages; whole conversations "
                "are rendered from now on, which takes more time",
                self._template.raw.name,
            )
        if len(self._kinds) >= _MOST_KINDS:
            self._kinds.clear()
        self._kinds[window.kind] = keeps
        return differs

    def _features(self, path: Sequence[PromptMessage]) -> list[_Features]:
        """The features of each place of ``path``, which are computed once."""
        found: list[_Features] = []
        for one in path:
            if one.place.features is None:
                one.place.features = self._after(found[-1] if found else _START, one)
            found.append(one.place.features)
        return found

    def _after(self, above: _Features, one: PromptMessage) -> _Features:
        message, role, recorded = one.quoted, one.place.role, one.turn is not None
        calls: Sequence[Mapping[str, Any]] = message.get("tool_calls") or ()
        call_ids, regular = above.call_ids, True
        if role == "assistant":
            style = self._template.ids
            given = [call.get("id") for call in calls]
            call_ids = tuple(map(str, given))
            regular = len({*call_ids}) == len(calls) and all(i is not None and style.accepts(str(i)) for i in given)
        elif role == "tool":
            regular = str(message.get("tool_call_id")) in call_ids
        kind = (
            role,
            min(len(calls), 3),
            bool(message["content"]) and not message["content"].isspace(),
            bool(message.get("name")),
            bool(message.get("reasoning_content")),
            recorded and (one.turn.thinking if one.turn else False, "recorded"),
            self._tested(message, calls, recorded=recorded),
        )
        seen = above.seen if kind in above.seen else above.seen | {kind}
        return _Features(kind, seen, call_ids, regular)

    def _tested(
        self, message: Mapping[str, Any], calls: Sequence[Mapping[str, Any]], *, recorded: bool
    ) -> tuple[str, ...]:
        """The texts in ``message`` that the template searches for."""
        assert self._tests is not None
        words, texts = self._tests
        # In an outline, a recorded response has marks in place of its text and of its last arguments.
        parts = [] if recorded else [message["content"], message.get("reasoning_content") or ""]
        parts += [repr(call["function"].get("arguments")) for call in (calls[:-1] if recorded else calls)]
        found = [part.strip() for part in parts if part.strip() in words]
        found += [name for call in calls if (name := str(call["function"]["name"])) in words]
        if message.get("name") in words:
            found.append(str(message["name"]))
        return (*found, *(text for text in texts if any(text in part for part in parts)))

    def _read_template(self) -> bool:
        """Find what the template tests. Returns whether it may render short conversations."""
        source = self._template.raw.text
        formats = "".join(_CLOCK.findall(source))
        clock = not self._has_clock or not _TIME.search(formats)
        self._tests = _tests_in(source)
        self._usable = clock and self._tests is not None
        return self._usable


_START = _Features(None, frozenset(), (), True)


def _tests_in(source: str) -> tuple[frozenset[str], tuple[str, ...]] | None:
    """The words, and the other texts, that a template compares with values; None if it is not in Jinja."""
    try:
        from jinja2 import Environment, TemplateSyntaxError, nodes
    except ImportError:
        return None
    environment = Environment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    try:
        tree = environment.parse(_GENERATION.sub("", source))
    except TemplateSyntaxError:
        return None
    if not any(tree.find_all(nodes.For)):
        return None
    keys = {id(item.arg) for item in tree.find_all(nodes.Getitem)}
    found: set[str] = set()
    for node in tree.find_all((nodes.Compare, nodes.Call, nodes.Filter, nodes.Test)):
        name = node.node.attr if isinstance(node, nodes.Call) and isinstance(node.node, nodes.Getattr) else None
        name = node.name if isinstance(node, nodes.Filter) else name
        if name in _KEEPS_TEXT or (isinstance(node, nodes.Call) and name is None):
            continue
        found |= {c.value for c in node.find_all(nodes.Const) if isinstance(c.value, str) and id(c) not in keys}
    words = frozenset(text for text in found if re.fullmatch(r"\w+", text))
    return words, tuple(sorted(text for text in found - words if text.strip()))
