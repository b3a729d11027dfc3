"""Renders a conversation once, and finds the text after its last recorded response.

An outline is the rendered text with a mark in place of each recorded response. It has the same start as the outline of the last recorded
prompt if the template writes earlier turns as it did; what follows the last mark is all that is new. Where it is known that the
template does (``locality.py``), only that is rendered.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from lightning_core.chat.encoding import Encoder
from lightning_core.chat.history.locality import Locality, Window
from lightning_core.chat.history.places import PromptMessage
from lightning_core.chat.history.turns import TextPrint, Turn, squeeze
from lightning_core.chat.messages import Message, excerpt, functions_of, text_of, with_calls
from lightning_core.chat.quoting import has_mark, mark
from lightning_core.chat.templates.template import ChatTemplate, Tokenizer
from lightning_core.errors import PolicyRequestError

Context = Literal["new", "clean", "realigned", "forked"]

_DIFFERS = "rendering: the template renders this turn in another way in its conversation than after few messages"


class Outline(NamedTuple):
    """The outline of a prompt."""

    print: TextPrint
    ending: str
    """Its end, with all that follows the outline of the last recorded prompt."""
    unmarked: frozenset[int] = frozenset()
    """The recorded responses, by number, that are written out in it."""
    tail: str | None = None
    """The text after the last recorded response; None if the ids before it cannot be reused."""
    reason: str | None = None
    """Why earlier turns are rendered differently."""


class Outlines:
    """Renders with ``template``. ``stops``: the texts of the tokens that end a response."""

    def __init__(self, template: ChatTemplate, encoder: Encoder, tokenizer: Tokenizer, stops: Sequence[str]) -> None:
        self._template = template
        self._encoder = encoder
        self._tokenizer = tokenizer
        self._stops = stops
        self._locality = Locality(template)
        delimiters = template.delimiters
        self._around = (delimiters.open, delimiters.close) if delimiters else ()

    def write(self, messages: list[Message], tools: Sequence[Any] | None, variables: Mapping[str, Any] | None) -> str:
        """The text of ``messages`` with the generation prompt, all quoted. Raises `PolicyRequestError` if the template does."""
        with self._encoder.lock:
            return self._template.render(messages, tools, generate=True, variables=variables)

    def _outline(
        self,
        path: Sequence[PromptMessage],
        unmarked: frozenset[int],
        tools: Sequence[Any] | None,
        variables: Mapping[str, Any] | None,
    ) -> str:
        """The text of ``path`` with marks in place of the recorded responses, except those with the numbers ``unmarked``."""
        marked = [
            _marked(p.quoted, p.place.number, thinking=self._template.has_field and p.turn.thinking)
            if p.turn is not None and p.place.number not in unmarked
            else p.quoted
            for p in path
        ]
        return self.write(marked, tools, variables)

    def first(self, text: str, variables: Mapping[str, Any] | None) -> Outline:
        """The outline of a prompt without recorded responses."""
        # Most conversations have one turn.
        return Outline(TextPrint(text, self._locality.setting(variables), grows=False), text)

    def follow(
        self,
        path: Sequence[PromptMessage],
        last: PromptMessage,
        turn: Turn,
        tools: Sequence[Any] | None,
        variables: Mapping[str, Any] | None,
    ) -> Outline:
        """The outline of ``path``, which has ``last`` as its last recorded response, with the tokens ``turn``."""
        setting = self._locality.setting(variables)
        comparable = turn.text.setting == setting and not turn.unmarked
        window = self._locality.window(path, path.index(last), setting, tools=bool(tools)) if comparable else None
        keeps = None if window is None else self._locality.find(window)
        # The whole is compared with it a few times in each conversation.
        if window and keeps and turn.text.grows and last.place.number & (last.place.number - 1):
            added = self._added(window, tools, variables)
            if added is not None and (grown := turn.text.grown(added, setting)) is not None:
                return Outline(grown, added, frozenset(), *self._tail(added, last, turn, same=True))
        unmarked = turn.unmarked
        try:
            outline = self._outline(path, unmarked, tools, variables)
        except PolicyRequestError:
            unmarked = unmarked | {last.place.number}
            outline = self._outline(path, unmarked, tools, variables)
            reason = "the template does not render this conversation without what was said"
            return Outline(TextPrint(outline, setting), outline, unmarked, None, reason)
        same = turn.text.starts(outline)
        added = outline[turn.text.length :] if same else None
        differs = False
        if window and keeps is not False:
            differs = self._locality.learn(window, keeps=same and self._added(window, tools, variables) == added)
        grown = None if added is None else turn.text.grown(added, setting)
        written = outline if added is None else added
        whole = TextPrint(outline, setting) if grown is None else grown
        tail, reason = self._tail(written, last, turn, same=same)
        return Outline(whole, outline, unmarked, tail, _DIFFERS if differs else reason)

    def _added(self, window: Window, tools: Sequence[Any] | None, variables: Mapping[str, Any] | None) -> str | None:
        """The text that the short conversation adds; None if the template changes what was before it, or raises."""
        try:
            earlier = self._outline(window.earlier, frozenset(), tools, variables)
            now = self._outline(window.now, frozenset(), tools, variables)
        except PolicyRequestError:
            return None
        return now[len(earlier) :] if now.startswith(earlier) else None

    def _tail(self, written: str, last: PromptMessage, turn: Turn, *, same: bool) -> tuple[str | None, str | None]:
        """The tail and the reason of an outline. ``same``: ``written`` is what follows the outline of the prompt of ``last``."""
        response, thought = last.quoted, _mark("thought", last.place.number)
        calls = response.get("tool_calls") or ()
        if self._template.tool_format.one_call and len(calls) > 1:
            return None, "the template writes one tool call a message, and the response has several"
        before, here, after = written.partition(_mark("response", last.place.number))
        if not here:
            return None, "the template leaves out earlier turns"
        if response.get("reasoning_content") and thought not in before:
            return None, "the template leaves out earlier reasoning"
        # The model may have written the text between prompt and response: reasoning tags, the start of a call.
        lead = squeeze(before) if same else turn.text.after(before)
        for written in (thought, *self._template.tool_format.frame, *self._around):
            lead = lead and lead.replace(squeeze(written), "")
        ends = [(at, -len(stop)) for stop in self._stops if (at := after.find(stop)) >= 0]
        at, length = min(ends, default=(0, 0))
        if not ends or lead is None or (not calls and (lead or after[:at].strip())) or has_mark(after):
            return None, "the template renders earlier turns differently than it did"
        # The sampled stop token replaces the template's, unless the template's also starts the next message.
        stop = after[at : at - length]
        replaced = turn.ended and (
            stop in self._template.enders or int(turn.kept.read()[-1]) == self._tokenizer.convert_tokens_to_ids(stop)
        )
        tail = after[at - length :] if replaced else after[at:]
        return tail, None if same else "the template renders earlier turns with other white space"


def context_of(last: PromptMessage, message: Message, index: int, reason: str | None) -> tuple[Context, str | None]:
    """The context of a prompt that continues the tokens of ``last``, which came back as ``message``, and why it is not clean."""
    if last.turn is not None and last.turn.stopped:
        ended = f"message {index} (assistant) ended at a stop string of the request"
        return "forked", f"stopped: {ended}: {excerpt(with_calls(last.message), 0)}"
    if text_of(last.message) != text_of(message) or functions_of(last.message) != functions_of(message):
        reason = "the response came back written differently"
    return "realigned" if reason else "clean", reason


def _mark(name: str, number: int) -> str:
    return mark(f"{name}-{number}")


def _marked(response: Message, number: int, *, thinking: bool) -> dict[str, Any]:
    """``response`` with a mark in place of its last arguments, or else of its text.

    ``thinking``: its prompt began its reasoning, which is then marked even if it is empty.
    """
    here = _mark("response", number)
    thought = {"reasoning_content": _mark("thought", number)} if thinking or response.get("reasoning_content") else {}
    calls: list[Mapping[str, Any]] = list(response.get("tool_calls") or ())
    if not calls:
        return {**response, "content": here, **thought}
    last = {**calls[-1], "function": {**calls[-1]["function"], "arguments": {here: ""}}}
    # Without its text, which some templates write after the results.
    return {**response, "content": "", "tool_calls": [*calls[:-1], last], **thought}
