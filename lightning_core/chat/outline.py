"""Renders a conversation once, and finds the text after its last recorded response.

An outline is the rendered text with a mark in place of each recorded response. It has the same start as the outline of the last recorded
prompt if the template writes earlier turns as it did; what follows the last mark is all that is new.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from lightning_core.chat.encoding import Encoder
from lightning_core.chat.messages import Message, excerpt, functions_of, text_of, with_calls
from lightning_core.chat.places import PromptMessage
from lightning_core.chat.quoting import has_mark, mark
from lightning_core.chat.template import ChatTemplate, Tokenizer
from lightning_core.chat.turns import Turn, squeeze
from lightning_core.errors import PolicyRequestError

Context = Literal["new", "clean", "realigned", "forked"]


class Outlines:
    """Renders with ``template``. ``stops``: the texts of the tokens that end a response."""

    def __init__(self, template: ChatTemplate, encoder: Encoder, tokenizer: Tokenizer, stops: Sequence[str]) -> None:
        self._template = template
        self._encoder = encoder
        self._tokenizer = tokenizer
        self._stops = stops
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

    def follow(
        self,
        path: Sequence[PromptMessage],
        last: PromptMessage,
        turn: Turn,
        tools: Sequence[Any] | None,
        variables: Mapping[str, Any] | None,
    ) -> tuple[str, frozenset[int], str | None, str | None]:
        """The outline of ``path``, what is not marked in it, the text after ``last``, and why earlier turns are rendered differently.

        The text after it is None if earlier turns differ in more than white space, so the recorded ids cannot be reused.
        """
        try:
            outline = self._outline(path, turn.unmarked, tools, variables)
        except PolicyRequestError:
            unmarked = turn.unmarked | {last.place.number}
            outline = self._outline(path, unmarked, tools, variables)
            return outline, unmarked, None, "the template does not render this conversation without what was said"
        return outline, turn.unmarked, *self._tail(outline, last, turn)

    def _tail(self, outline: str, last: PromptMessage, turn: Turn) -> tuple[str | None, str | None]:
        response, thought = last.quoted, _mark("thought", last.place.number)
        calls = response.get("tool_calls") or ()
        if self._template.tool_format.one_call and len(calls) > 1:
            return None, "the template writes one tool call a message, and the response has several"
        before, here, after = outline.partition(_mark("response", last.place.number))
        if not here:
            return None, "the template leaves out earlier turns"
        if response.get("reasoning_content") and thought not in before:
            return None, "the template leaves out earlier reasoning"
        same = turn.text.starts(before)
        # The model may have written the text between prompt and response: reasoning tags, the start of a call.
        lead = squeeze(before[turn.text.length :]) if same else turn.text.after(before)
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
