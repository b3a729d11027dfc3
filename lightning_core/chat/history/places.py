"""The conversations of one rollout as a tree of messages, with the tokens of the responses that were sampled in them.

A place is a conversation up to and with one message. It refers to the rollout's contents, which keep each message and the tokens once, for
the spans as well. A message that comes back as it was sent is found by its text, without being normalized or hashed again.

A response is found by what was sampled, not by its text alone: one that was sampled twice after the same messages has two places. The
one that is continued has the reasoning and the call ids that came back, if they tell; then the one after which the later responses of
the prompt were sampled; then the latest. Call ids of the client stand for those of the recorded response, by position.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, NamedTuple

from lightning_core.chat.history.turns import Turn, text_bytes
from lightning_core.chat.messages import Message, check_message, compared, thought_of
from lightning_core.content.packing import write
from lightning_core.content.shared_content import KeptText, SharedContent

Quote = Callable[[Any], Any]
_SORTED = json.JSONEncoder(sort_keys=True)


@dataclass(slots=True, eq=False)
class Place:
    """A conversation up to and with one message."""

    above: Place | None
    text: KeptText | None
    """The message as templates read it; a recorded response has its reasoning. None: there is no message yet."""
    role: str
    """Of the message."""
    key: bytes
    """The digest of the message, as `compared` gives it."""
    is_quoted: bool = False
    """Whether the message has text that is quoted."""
    turn: Turn | None = None
    """The tokens, if the message was sampled here."""
    attached: bool = False
    sent: tuple[KeptText, Mapping[str, tuple[str, ...]]] | None = None
    """The message as a client sent it first, if that differs, and the ids of calls in it that differ: the recorded ids."""
    below: dict[bytes, tuple[Place, ...]] | None = None
    features: Any = None
    """What a template may depend on in the messages up to this place (``locality.py``), once it is needed."""
    recorded: Place | None = field(init=False)
    """The last place up to this one with a recorded response."""
    number: int = field(init=False)
    """The number of recorded responses up to this place."""
    conversation: bytes = field(init=False)
    """The digest of all messages and the setting."""

    def __post_init__(self) -> None:
        above = self.above
        self.recorded = self if self.turn is not None else above and above.recorded
        self.number = (above.number if above else 0) + (self.turn is not None)
        self.conversation = blake2b((above.conversation if above else b"") + self.key, digest_size=16).digest()

    @property
    def message(self) -> Message:
        """The message, read anew."""
        return {} if self.text is None else self.text.read()

    def path(self) -> list[Place]:
        """The places of all messages, in order."""
        places: list[Place] = []
        place = self
        while place.above is not None:
            places.append(place)
            place = place.above
        return places[::-1]

    def move_to(self, content: SharedContent) -> None:
        """Keep what the conversation refers to in ``content``."""
        for place in self.path():
            if place.text is not None and place.text.content is not content:
                place.text, place.sent = content.keep_text(place.message), None
                if place.turn is not None:
                    place.turn.kept = content.keep_ids(place.turn.kept.read())

    def under(self, key: bytes) -> tuple[Place, ...]:
        """The places of messages with ``key`` after this one."""
        return self.below.get(key, ()) if self.below else ()

    def only(self) -> Place | None:
        """The place after this one, if there is one only."""
        if self.below is None or len(self.below) != 1:
            return None
        below = tuple(self.below.values())  # a copy, since other threads add places
        return below[0][0] if len(below) == 1 and len(below[0]) == 1 else None


class PromptMessage(NamedTuple):
    """A message of a prompt, and its place."""

    place: Place
    message: Message
    """See `Place.text`."""
    quoted: Message

    @property
    def turn(self) -> Turn | None:
        """See `Place.turn`."""
        return self.place.turn


class FoundPlace(NamedTuple):
    """The place of a prompt."""

    place: Place
    path: Sequence[PromptMessage]
    """The places of all messages, in order."""
    doubt: str | None
    """Why the recorded response may be another one with the same text."""


class _Candidate(NamedTuple):
    place: Place
    renamed: Mapping[str, tuple[str, ...]]
    """Ids in the latest message with calls, as the client sent them: the recorded ids of the calls that have them, whose results come next.
    Clients repeat ids from turn to turn, and within a message."""


class Memory:
    """The recorded turns of one rollout. Thread-safe.

    The lock is held to change the tree. `find` reads it without: each place has its places below in tuples that are replaced as a whole.
    """

    def __init__(self, content: SharedContent | None = None) -> None:
        """``content``: of the rollout; None: its own."""
        self.content = content or SharedContent()
        """Keeps the messages and the tokens."""
        self._roots: dict[bytes, Place] = {}
        self._order = 0
        self._lock = threading.Lock()

    def root(self, setting: str) -> Place:
        """The place before the first message of all conversations with ``setting``."""
        key = _digest(setting)
        with self._lock:
            return self._roots.get(key) or Place(None, None, "", key, attached=True)

    def find(
        self,
        root: Place,
        messages: Sequence[Any],
        quote: Quote,
        *,
        offset: int = 0,
        kept: Sequence[KeptText] | None = None,
    ) -> FoundPlace:
        """The place of ``messages``; those that are not known get places that only `add` attaches.

        ``offset``: what is added to an index in errors. ``kept``: the texts of ``messages`` in `content`, if they are kept already.
        Raises `PolicyRequestError` for a message that is not supported.
        """
        if kept is None or any(text.content is not self.content for text in kept[:1]):
            kept = self.content.keep(messages)
        start, known = _longest(root, kept)
        candidates = [_Candidate(start, {})]
        for i, (message, text) in enumerate(zip(messages[known:], kept[known:], strict=True), known + offset):
            steps = [_step(candidate, message, text, i, quote) for candidate in candidates]
            recorded = [c for step in steps for c in step if c.place.turn is not None]
            candidates = recorded or [c for step in steps for c in step]
            if len(recorded) > 1 and (ids := _call_ids(message)):
                candidates = [c for c in recorded if _call_ids(c.place.message) == ids] or recorded
        places = [c.place for c in candidates]
        place = max(places, key=lambda p: p.recorded.turn.order if p.recorded and p.recorded.turn else 0)
        with self._lock:
            self._keep(place)
        path = [_read(*one, quote) for one in zip(place.path(), messages, kept, strict=True)]
        return FoundPlace(place, path, _doubt(places) if len(places) > 1 else None)

    def add(self, prompt: Place, response: Message, turn: Turn | None, quote: Quote) -> Place:
        """The place of ``response`` after the place of its prompt. ``turn``: its tokens; None: nothing of them is kept."""
        checked = check_message(response, 0)
        key = key_of(checked)
        # The text of the response itself, if it is equal, since the span has it.
        text = self.content.keep_text(response if response == checked else checked)
        if turn is None:
            return Place(prompt, text, checked["role"], key)
        is_quoted = quote(checked) != checked
        with self._lock:
            above = self._attach(prompt)
            self._order += 1
            for place in above.under(key):
                if (known := place.turn) is not None and known.same(turn):
                    known.order = self._order
                    self._keep(place)
                    return place
            turn.order = self._order
            place = Place(above, text, checked["role"], key, is_quoted, turn)
            _put(place)
            self._keep(place)
            return place

    def _attach(self, place: Place) -> Place:
        """``place`` as a part of the tree, or the equal one that is in it."""
        new: list[Place] = []
        while not place.attached and place.above is not None:
            new.append(place)
            place = place.above
        if place.above is None:
            place = self._roots.setdefault(place.key, place)
        for one in reversed(new):
            known = (p for p in place.under(one.key) if p.turn is None and p.text == one.text)
            if (same := next(known, None)) is None:
                one.above, same = place, one
                _put(one)
            place = same
        return place

    def _keep(self, place: Place) -> None:
        """Note that ``place`` is in use."""

    def _detach(self, place: Place) -> None:
        """Forget ``place``, an end of a conversation, and the messages before it that lead to no other response."""
        while place.above is not None and not place.below and place.attached:
            above, place.attached = place.above, False
            left = tuple(other for other in above.under(place.key) if other is not place)
            above.below = {key: places for key, places in (above.below or {}).items() if key != place.key}
            if left:
                above.below[place.key] = left
            if above.turn is not None:
                return
            place = above
        if place.above is None and not place.below:
            self._roots.pop(place.key, None)


def key_of(message: Message) -> bytes:
    """The digest of what the place of ``message`` depends on; of a response without its reasoning."""
    return _digest(write(compared(message), _SORTED))


def _longest(place: Place, texts: Sequence[KeptText]) -> tuple[Place, int]:
    """The place after the first ``texts`` that are all there is after ``place``, and their number; the usual case, in little time."""
    for number, text in enumerate(texts):
        only = place.only()
        if only is None or only.text != text:
            return place, number
        place = only
    return place, len(texts)


def _step(candidate: _Candidate, sent: Any, text: KeptText, index: int, quote: Quote) -> list[_Candidate]:
    """The places of the message ``sent``, which has ``text``, after ``candidate``."""
    above, renamed = candidate
    only = above.only()
    answers = sent.get("tool_call_id") if renamed and isinstance(sent, Mapping) else None
    recorded_ids = renamed.get(answers, ()) if isinstance(answers, str) else ()
    if recorded_ids:  # results of calls with one id are in the order of the calls; further ones are of the last call
        renamed = {**renamed, str(answers): recorded_ids[1:] or recorded_ids}
    if only is not None and not recorded_ids:
        if text == only.text:
            return [_Candidate(only, {} if sent.get("tool_calls") else renamed)]
        if (first := only.sent) is not None and text == first[0]:
            return [_Candidate(only, first[1] if sent.get("tool_calls") else renamed)]
    message = check_message(sent, index)
    if recorded_ids:
        message["tool_call_id"] = recorded_ids[0]
    key = key_of(message)
    found = _matching(above.under(key), message)
    if not found:
        place = Place(above, text, message["role"], key, quote(message) != message)
        if sent != message:
            place.text, place.sent = text.content.keep_text(message), (text, {})
        return [_Candidate(place, {} if "tool_calls" in message else renamed)]
    results: list[_Candidate] = []
    for place in found:
        ids = _renamed(_call_ids(message), _call_ids(place.message))
        if place.sent is None and not recorded_ids:
            place.sent = (text, ids)
        results.append(_Candidate(place, ids if "tool_calls" in message else renamed))
    return results


def _read(place: Place, sent: Any, text: KeptText, quote: Quote) -> PromptMessage:
    """The message of ``place``, which came as ``sent``."""
    message = sent if place.text == text else place.message
    return PromptMessage(place, message, quote(message) if place.is_quoted else message)


def _matching(places: Sequence[Place], message: Message) -> list[Place]:
    """The ``places``, all with the text and calls of ``message``, that may be its place."""
    thought, ids = thought_of(message), _call_ids(message)
    found = [p for p in places if p.turn is not None and (not thought or thought_of(p.message) == thought)]
    given = [p for p in places if p.turn is None and thought_of(p.message) == thought]
    if found:
        return found
    return ([p for p in given if _call_ids(p.message) == ids] or given)[:1]


def _renamed(sent: Sequence[Any], recorded: Sequence[Any]) -> dict[str, tuple[str, ...]]:
    """The recorded ids of the calls with each id that the client changed, or gave to several calls."""
    ids: dict[str, tuple[str, ...]] = {}
    for old, new in zip(sent, recorded, strict=True):
        if isinstance(old, str) and isinstance(new, str):
            ids[old] = (*ids.get(old, ()), new)
    return {old: new for old, new in ids.items() if new != (old,)}


def _call_ids(message: Message) -> list[Any]:
    return [call.get("id") for call in message.get("tool_calls") or ()]


def _doubt(places: Sequence[Place]) -> str | None:
    """Why the conversations at ``places``, which have the same texts, may be each other."""
    paths = [place.path() for place in places]
    for i, ones in enumerate(zip(*paths, strict=True)):
        if (count := len({id(place) for place in ones})) > 1:
            return (
                f"ambiguous: message {i} (assistant) was sampled {count} times with the same text and other tokens; the prompt continues "
                "the latest"
            )
    return None


def _put(place: Place) -> None:
    assert place.above is not None
    above = place.above
    if above.below is None:
        above.below = {}
    above.below[place.key] = (*above.under(place.key), place)
    place.attached = True


def _digest(text: str) -> bytes:
    return blake2b(text_bytes(text), digest_size=16).digest()
