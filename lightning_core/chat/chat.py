"""Converts messages to tokens and sampled tokens to messages.

Text is tokenized once, before sampling.

A later turn of a conversation reuses the recorded ids of (prompt ‖ response); only new text is rendered and encoded. The context of a
prompt is one of

- ``new``: it does not start with recorded tokens;
- ``clean``: it starts with recorded tokens, and the client sent the response back unchanged;
- ``realigned``: it starts with recorded tokens, although the client sent the response back in another form (stripped, or a tool call
  serialized differently), or the template now writes other white space around earlier turns;
- ``forked``: it would, but the template now renders earlier turns differently (it removes earlier reasoning, or moves the tools to the
  last question), so everything is encoded again.

Text of a message that looks like a special token is encoded as plain text: a user cannot end a turn by writing ``<|im_end|>``.
"""

from __future__ import annotations

import json
import threading
from array import array
from collections.abc import Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any, Literal, cast

from lightning_core.chat.encoding import Encoder
from lightning_core.chat.messages import Message, check_message, extend_system, functions_of, keys, text_of
from lightning_core.chat.output_grammar import AllowedCalls, output_grammar
from lightning_core.chat.quoting import Quoting, mark, mark_span, take_spans
from lightning_core.chat.teacher_response import continuation
from lightning_core.chat.template import ChatTemplate
from lightning_core.chat.template import Tokenizer as Tokenizer
from lightning_core.chat.tool_formats import ToolFormat, read_message
from lightning_core.errors import PolicyRequestError

Context = Literal["new", "clean", "realigned", "forked"]

_RESPONSE, _THOUGHT = mark("response"), mark("thought")


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderedPrompt:
    """A prompt to sample from."""

    ids: tuple[int, ...]
    text: str
    """The text that the template rendered, quoted (see ``quoting.py``). ``ids`` may hold recorded tokens instead."""
    messages: tuple[Message, ...]
    """The messages as rendered, with the reasoning of recorded responses."""
    tools: str
    context: Context
    reason: str | None = None
    thinking: bool = False
    """Whether the response starts inside its reasoning."""
    tail: str | None = None
    """The end of ``text`` that was encoded after recorded tokens; None: the whole text was encoded."""
    first_recorded: int | None = None
    """The index of the first message that is a recorded response."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Turn:
    """A recorded turn: the rendered prompt, the ids of prompt and response, and the response."""

    text: str
    ids: array[int]
    """Packed, at four bytes each instead of forty."""
    response: Message
    ended: bool


class Memory:
    """The recorded turns of one rollout, by the key of the conversation. Thread-safe."""

    def __init__(self) -> None:
        self._turns: dict[str, _Turn] = {}
        self._lock = threading.Lock()

    def put(self, key: str, turn: _Turn) -> None:
        with self._lock:
            self._turns[key] = turn

    def get(self, key: str) -> _Turn | None:
        with self._lock:
            return self._turns.get(key)


class Chat:
    """Renders and parses the chat format of one tokenizer.

    Stateless; the turns of a rollout are in its `Memory`. ``template``: what the chat template supports.

    ``stop_token_ids``: tokens that end a response, besides the stop tokens of the template and the tokenizer. ``name``: distinguishes the
    turns of several tokenizers in one rollout, which cannot continue each other. ``template_kwargs``: variables of the chat template,
    such as ``enable_thinking``; those of a request replace them. Raises `ConfigError` without a usable chat template; see `ChatTemplate`.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop_token_ids: Iterable[int] = (),
        name: str = "",
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self._name = name
        self.tokenizer = tokenizer
        # Some vocabularies have added tokens for runs of white space, which are text.
        self._added = added = {t: i for t, i in tokenizer.get_added_vocab().items() if t.strip()}
        specials = {*filter(str.strip, tokenizer.all_special_tokens), *added}
        self.template = ChatTemplate(tokenizer, sorted(specials), template_kwargs)
        delimiters = self.template.delimiters
        self._around = (delimiters.open, delimiters.close) if delimiters else ()
        self._quoting = Quoting({*specials, *self._around})
        self._encoder = Encoder(tokenizer, self._quoting, specials)
        decode = self._encoder.decode
        self.stop_token_ids = frozenset({*stop_token_ids, *map(tokenizer.convert_tokens_to_ids, self.template.stops)})
        self._stops = [text for i in self.stop_token_ids if (text := decode([i]))]
        around = "".join(self._around)
        shown = {i for t, i in added.items() if t in self.tool_format.marks or t in around} - self.stop_token_ids
        hidden = {i for i in self._encoder.special_ids - shown if not decode([i], skip=True)}
        self._hidden = hidden | self.stop_token_ids

    @property
    def tool_format(self) -> ToolFormat:
        """The format of tool calls in responses."""
        return self.template.tool_format

    def has_variable(self, name: str) -> bool:
        """Whether the chat template uses the variable ``name``."""
        return self.template.has_variable(name)

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None,
        memory: Memory,
        *,
        instructions: Mapping[str, str] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> RenderedPrompt:
        """The prompt of ``messages``, with the recorded ids of earlier turns.

        ``instructions``: lines at the end of the system message, by the setting that asks for each; with others it is another conversation.
        ``variables``: of the chat template; names that it does not use have no effect. Raises `PolicyRequestError` if it cannot render.
        """
        plain = [check_message(m, i) for i, m in enumerate(messages)]
        if not plain:
            raise PolicyRequestError("messages is empty; expected at least one message", param="messages")
        setting = json.dumps([tools or [], list((instructions or {}).items()), self._name], sort_keys=True)
        if instructions:
            plain = extend_system(plain, "\n".join(instructions.values()))
        turns = [
            memory.get(key) if m["role"] == "assistant" else None
            for m, key in zip(plain, keys(plain, setting), strict=True)
        ]
        # Clients leave out reasoning; the template decides which reasoning is kept.
        complete = [
            m if turn is None else {**m, "reasoning_content": turn.response.get("reasoning_content")}
            for m, turn in zip(plain, turns, strict=True)
        ]
        quoted = [self._quoting.quote(m) for m in complete]
        quoted_tools = self._quoting.quote(list(tools)) if tools else None
        variables = self._quoting.quote(variables) if variables else None
        with self._encoder.lock:
            text = self.template.render(quoted, quoted_tools, generate=True, variables=variables)
        context: Context = "new"
        reason = tail = None
        ids: tuple[int, ...] | None = None
        last = max((i for i, turn in enumerate(turns) if turn is not None), default=None)
        if last is not None and (turn := turns[last]) is not None:
            tail, reason = self._tail(quoted, last, quoted_tools, turn, variables)
            if tail is None:
                context = "forked"
            else:
                same = text_of(turn.response) == text_of(plain[last])
                same = same and functions_of(turn.response) == functions_of(plain[last])
                reason = reason if same else "the response came back written differently"
                context = "realigned" if reason else "clean"
                ids = (*turn.ids, *self._encoder.encode(tail, start=False))
        elif any(m["role"] == "assistant" for m in plain):
            reason = "the prompt has assistant messages that were not sampled in this rollout, or not after the same messages and tools"
        return RenderedPrompt(
            ids=tuple(self._encoder.encode(text)) if ids is None else ids,
            text=text,
            messages=tuple(complete),
            tools=setting,
            context=context,
            reason=reason,
            thinking=self._opens(text),
            tail=tail,
            first_recorded=next((i for i, turn in enumerate(turns) if turn is not None), None),
        )

    @property
    def places_text(self) -> bool:
        """Whether `message_spans` works: the tokenizer reports the characters of each token, as all fast ones do."""
        return bool(getattr(self.tokenizer, "is_fast", False))

    def message_spans(self, prompt: RenderedPrompt, tools: Sequence[Any] | None) -> dict[int, tuple[int, int]] | None:
        """The spans of the user's and the tools' texts in ``prompt.ids``: message index → (first token, end).

        Without white space around a text, and without tokens that it shares with the text of the template. Only messages that
        were encoded for this prompt, and not recorded before. None if the template does not write the texts as they are.
        """
        marked = [
            {**quoted, "content": mark_span(quoted["content"], i)} if quoted["role"] in ("user", "tool") else quoted
            for i, quoted in enumerate(self._quoting.quote(m) for m in prompt.messages)
        ]
        quoted_tools = self._quoting.quote(list(tools)) if tools else None
        with self._encoder.lock:
            text, places = take_spans(self.template.render(marked, quoted_tools, generate=True))
        tail = prompt.text if prompt.tail is None else prompt.tail
        if text != prompt.text or not text.endswith(tail):
            return None
        characters = self._encoder.spans(tail, start=prompt.tail is None)
        before, first = len(text) - len(tail), len(prompt.ids) - len(characters)
        spans: dict[int, tuple[int, int]] = {}
        for index, (start, stop) in places.items():
            inside = [n for n, (a, b) in enumerate(characters, first) if start <= a + before < b + before <= stop]
            if inside:
                spans[index] = (inside[0], inside[-1] + 1)
        return spans

    def encode_response(self, prompt: RenderedPrompt, response: Message, tools: Sequence[Any] | None) -> list[int]:
        """The tokens that this model would sample to give ``response``, a message of another model, with the end of the turn.

        Raises `PolicyRequestError` if the template does not write it as a continuation of ``prompt``.
        """
        message = check_message(response, len(prompt.messages))
        quoted = [self._quoting.quote(m) for m in (*prompt.messages, message)]
        quoted_tools = self._quoting.quote(list(tools)) if tools else None
        results = [{"role": "tool", "content": "x", "tool_call_id": c.get("id")} for c in message.get("tool_calls", ())]
        later = results or [{"role": "user", "content": "x"}]

        def text(messages: list[dict[str, Any]]) -> str:
            with self._encoder.lock:
                return self.template.render(messages, quoted_tools, generate=False)

        written = continuation(prompt.text, text(quoted), self._stops, lambda: text([*quoted, *later]))
        return self._encoder.encode(written, start=False)

    def plain(self, prompt: str | Sequence[int]) -> RenderedPrompt:
        """A prompt without a chat, as text or ids. No template is applied.

        Special tokens in the text are encoded as such, and the tokenizer adds its start token, if it has one. Raises
        `PolicyRequestError` if the prompt is empty or has ids outside the vocabulary.
        """
        if isinstance(prompt, str):
            with self._encoder.lock:
                ids = tuple(self.tokenizer.encode(prompt, add_special_tokens=True, split_special_tokens=False))
        else:
            ids = tuple(prompt)
            vocabulary = len(cast(Sized, self.tokenizer))
            for token in ids:
                if not 0 <= token < vocabulary:
                    raise PolicyRequestError(
                        f"prompt has the token id {token}; expected ids from 0 to {vocabulary - 1}",
                        param="prompt",
                    )
        if not ids:
            raise PolicyRequestError("prompt is empty; expected at least one token", param="prompt")
        text = prompt if isinstance(prompt, str) else self.text(ids)
        return RenderedPrompt(ids=ids, text=text, messages=(), tools="", context="new")

    def forced(self, prefix: str, text: str) -> tuple[list[int], int]:
        """The ids of ``prefix`` and ``text`` as a response, and the index of the first token that has a part of ``text``.

        Special tokens in ``prefix`` are encoded as such, those in ``text`` as plain text.
        """
        ids = self._encoder.encode(prefix + self._quoting.quote(text), start=False)
        before = self._encoder.encode(prefix, start=False)
        # The tokens at the boundary may have parts of both.
        start = next(
            (i for i, (a, b) in enumerate(zip(ids, before, strict=False)) if a != b), min(len(ids), len(before))
        )
        return ids, start

    def remember(self, prompt: RenderedPrompt, output_ids: Sequence[int], response: Message, memory: Memory) -> str:
        """Record a response to ``prompt``, so the next turn continues its tokens; return the key of the conversation."""
        turn = _Turn(
            text=prompt.text,
            ids=array("I", (*prompt.ids, *output_ids)),
            response=response,
            ended=bool(output_ids) and output_ids[-1] in self.stop_token_ids,
        )
        key = keys([*prompt.messages, response], prompt.tools)[-1]
        memory.put(key, turn)
        return key

    def text(self, output_ids: Sequence[int]) -> str:
        """The text of sampled tokens, with only the special tokens of calls and reasoning."""
        return self._encoder.decode([i for i in output_ids if i not in self._hidden])

    def split(self, text: str, *, thinking: bool, final: bool = True) -> tuple[str, str | None]:
        """The reasoning and the answer of a response; the answer is None until the reasoning ends.

        ``thinking``: the prompt began the reasoning. ``final``: the response is complete.
        """
        if self.tool_format.split is not None:
            return self.tool_format.split(text, final)
        delimiters = self.template.delimiters
        return ("", text) if delimiters is None else delimiters.split(text, opened=thinking, final=final)

    def output_grammar(self, schema: Mapping[str, Any] | None, calls: AllowedCalls | None, prompt: str) -> str | None:
        """The grammar of a response to the rendered ``prompt``; see `output_grammar.output_grammar`."""
        thought = "none" if (delimiters := self.template.delimiters) is None else delimiters.thought(prompt)
        return output_grammar(self.template, self._added, schema=schema, calls=calls, thought=thought)

    def answered(self, output_ids: Sequence[int], *, thinking: bool) -> bool:
        """Whether a response that starts with these tokens is past its reasoning."""
        return self.split(self.text(output_ids), thinking=thinking, final=False)[1] is not None

    def read(
        self, text: str, *, tools: bool, thinking: bool = False, declared: Sequence[Any] = (), is_json: bool = False
    ) -> dict[str, Any]:
        """Parse the text of a response into reasoning, text and, with ``tools``, tool calls.

        ``declared``: the definitions of the tools, which give the types of arguments in formats that write all values as text.
        ``is_json``: the answer is JSON, in which nothing is a call.
        """
        thought, answer = self.split(text, thinking=thinking)
        form = self.tool_format if tools else None
        message = read_message(form, answer or "", ids=self.template.ids, tools=declared, is_json=is_json)
        return {**message, "reasoning_content": thought} if thought else message

    def parse(
        self, output_ids: Sequence[int], *, tools: bool, thinking: bool = False, declared: Sequence[Any] = ()
    ) -> dict[str, Any]:
        """Parse sampled tokens; see `read`."""
        return self.read(self.text(output_ids), tools=tools, thinking=thinking, declared=declared)

    def _tail(
        self,
        messages: list[dict[str, Any]],
        last: int,
        tools: Sequence[Any] | None,
        turn: _Turn,
        variables: Mapping[str, Any] | None,
    ) -> tuple[str | None, str | None]:
        """The text after the response at ``last``, and the reason earlier turns are rendered differently.

        The text is None if they differ in more than white space, so the recorded ids cannot be reused.
        """
        response = _marked(messages[last], thinking=self.template.has_field and self._opens(turn.text))
        if self.tool_format.one_call and len(response.get("tool_calls") or ()) > 1:
            return None, "the template writes one tool call a message, and the response has several"
        marked = [*messages[:last], response, *messages[last + 1 :]]
        try:
            with self._encoder.lock:
                text = self.template.render(marked, tools, generate=True, variables=variables)
        except PolicyRequestError:
            return None, "the template does not render this conversation without what was said"
        before, here, after = text.partition(_RESPONSE)
        if not here:
            return None, "the template leaves out earlier turns"
        if response.get("reasoning_content") and _THOUGHT not in before:
            return None, "the template leaves out earlier reasoning"
        prompt, start = _squeeze(turn.text), _squeeze(before)
        # The model may have written the text between prompt and response: reasoning tags, the start of a call.
        lead = start.removeprefix(prompt)
        for written in (_THOUGHT, *self.tool_format.frame, *self._around):
            lead = lead.replace(_squeeze(written), "")
        ends = [(at, -len(stop)) for stop in self._stops if (at := after.find(stop)) >= 0]
        at, length = min(ends, default=(0, 0))
        calls = bool(response.get("tool_calls"))
        if not ends or not start.startswith(prompt) or (not calls and (lead or after[:at].strip())):
            return None, "the template renders earlier turns differently than it did"
        # The sampled stop token replaces the template's, unless the template's also starts the next message.
        stop = after[at : at - length]
        replaced = turn.ended and (
            stop in self.template.enders or turn.ids[-1] == self.tokenizer.convert_tokens_to_ids(stop)
        )
        tail = after[at - length :] if replaced else after[at:]
        return tail, None if before.startswith(
            turn.text
        ) else "the template renders earlier turns with other white space"

    def _opens(self, prompt: str) -> bool:
        """Whether the rendered ``prompt`` begins the reasoning of its response."""
        return self.template.delimiters is not None and self.template.delimiters.opens(prompt)


def _squeeze(text: str) -> str:
    return "".join(text.split())


def _marked(response: dict[str, Any], *, thinking: bool) -> dict[str, Any]:
    """``response`` with a mark in place of its last arguments, or else of its text.

    ``thinking``: its prompt began its reasoning, which is then marked even if it is empty.
    """
    thought = {"reasoning_content": _THOUGHT} if thinking or response.get("reasoning_content") else {}
    calls: list[Mapping[str, Any]] = list(response.get("tool_calls") or ())
    if not calls:
        return {**response, "content": _RESPONSE, **thought}
    last = {**calls[-1], "function": {**calls[-1]["function"], "arguments": {_RESPONSE: ""}}}
    # Without its text, which some templates write after the results.
    return {**response, "content": "", "tool_calls": [*calls[:-1], last], **thought}
