"""Converts messages to tokens and sampled tokens to messages.

Text is tokenized once, before sampling.

A later turn of a conversation reuses the recorded ids of (prompt ‖ response); only new text is rendered and encoded. The context of a
prompt is one of

- ``new``: it does not start with recorded tokens;
- ``clean``: it starts with recorded tokens, and the client sent the response back unchanged;
- ``realigned``: it starts with recorded tokens, although the client sent the response back in another form (stripped, or a tool call
  serialized differently), or the template now writes other white space around earlier turns, or another response has the same text;
- ``forked``: it would, but the template now renders earlier turns differently (it removes earlier reasoning, or moves the tools to the
  last question), so everything is encoded again; or it starts with a part of a recorded response, which a stop string ended.

Text of a message that looks like a special token is encoded as plain text: a user cannot end a turn by writing ``<|im_end|>``.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import numpy as np

from lightning_core.chat.encoding import Encoder
from lightning_core.chat.history.outline import Context, Outline, Outlines, context_of
from lightning_core.chat.history.places import Memory as Memory
from lightning_core.chat.history.places import Place
from lightning_core.chat.history.turns import Turn
from lightning_core.chat.messages import Message, check_message, extend_system
from lightning_core.chat.output_grammar import AllowedCalls, output_grammar
from lightning_core.chat.quoting import Quoting, mark_span, take_spans
from lightning_core.chat.templates.teacher_response import continuation
from lightning_core.chat.templates.template import ChatTemplate
from lightning_core.chat.templates.template import Tokenizer as Tokenizer
from lightning_core.chat.tool_calls.tool_formats import ToolFormat, read_message
from lightning_core.content.packed_ids import PackedIds
from lightning_core.content.shared_content import KeptText
from lightning_core.errors import PolicyRequestError


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderedPrompt:
    """A prompt to sample from."""

    ids: Sequence[int]
    write: Callable[[], str]
    """Returns `text`."""
    outline: Outline | None = None
    """The text with marks in place of recorded responses; None: no chat."""
    messages: tuple[Message, ...] = ()
    """The messages as rendered, with the reasoning of recorded responses."""
    tools: str = ""
    """The tools and the instructions, as a key."""
    context: Context = "new"
    reason: str | None = None
    thinking: bool = False
    """Whether the response starts inside its reasoning."""
    tail: str | None = None
    """The end of ``text`` that was encoded after recorded tokens; None: the whole text was encoded."""
    first_recorded: int | None = None
    """The index of the first message that is a recorded response."""
    place: Place | None = None
    """In the `Memory` of the rollout; None: no chat."""

    @property
    def text(self) -> str:
        """The text that the template renders, quoted (see ``quoting.py``). ``ids`` may hold recorded tokens instead."""
        return self.write()

    @property
    def ending(self) -> str:
        """The end of the text, as long as it may have a part of the response."""
        return self.text if self.outline is None else self.outline.ending


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
        self._outlines = Outlines(self.template, self._encoder, tokenizer, self._stops)
        self._latest_tools: tuple[str, Sequence[Any]] = ("", ())

    @property
    def tool_format(self) -> ToolFormat:
        """The format of tool calls in responses."""
        return self.template.tool_format

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None,
        memory: Memory,
        *,
        instructions: Mapping[str, str] | None = None,
        variables: Mapping[str, Any] | None = None,
        kept: Sequence[KeptText] | None = None,
    ) -> RenderedPrompt:
        """The prompt of ``messages``, with the recorded ids of earlier turns.

        ``instructions``: lines at the end of the system message, by the setting that asks for each; with others it is another conversation.
        ``variables``: of the chat template; names that it does not use have no effect. ``kept``: the texts of ``messages`` in the content
        of ``memory``, if they are kept already. Raises `PolicyRequestError` if it cannot render.
        """
        if not messages:
            raise PolicyRequestError("messages is empty; expected at least one message", param="messages")
        setting = json.dumps([tools or [], list((instructions or {}).items()), self._name], sort_keys=True)
        sent, quote = list(messages), self._quoting.quote
        if instructions:
            sent[:1] = extend_system([check_message(sent[0], 0)], "\n".join(instructions.values()))
            kept = None
        offset = len(messages) - len(sent)
        place, path, doubt = memory.find(memory.root(setting), sent, quote, offset=offset, kept=kept)
        quoted_tools = self._quoted_tools(tools)
        variables = quote(variables) if variables else None
        write = partial(self._outlines.write, [p.quoted for p in path], quoted_tools, variables)
        context: Context = "new"
        reason: str | None = None
        ids: Sequence[int] | None = None
        last = next((p for p in reversed(path) if p.turn is not None), None)
        if last is not None and last.turn is not None:
            outline = self._outlines.follow(path, last, last.turn, quoted_tools, variables)
            if outline.tail is None:
                context, reason = "forked", outline.reason
            else:
                at = path.index(last)
                context, reason = context_of(last, check_message(sent[at], at), at, outline.reason or doubt)
                ids = PackedIds(
                    np.concatenate(
                        [last.turn.kept.read(), self._encoder.encode_packed(outline.tail, start=False).array]
                    )
                )
        else:
            outline = self._outlines.first(write(), variables)
            if any(p.message["role"] == "assistant" for p in path):
                reason = "the prompt has assistant messages that were not sampled in this rollout, or not after the same messages and tools"
        return RenderedPrompt(
            ids=self._encoder.encode_packed(write() if place.recorded else outline.ending) if ids is None else ids,
            write=write,
            outline=outline,
            messages=tuple(p.message for p in path),
            tools=setting,
            context=context,
            reason=reason,
            thinking=self._opens(outline.ending),
            tail=outline.tail,
            first_recorded=next((i for i, p in enumerate(path) if p.turn is not None), None),
            place=place,
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
        tail = text if prompt.tail is None else prompt.tail
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
        return RenderedPrompt(ids=PackedIds(ids), write=lambda: text)

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

    def remember(
        self,
        prompt: RenderedPrompt,
        output_ids: Sequence[int],
        response: Message,
        memory: Memory,
        *,
        stopped: str | None = None,
    ) -> Place:
        """Record a response to ``prompt``, so the next turn continues its tokens; return its place.

        ``stopped``: the text of the tokens before a stop string, which ended it. If these have no such start, none are continued.
        """
        assert prompt.place is not None
        assert prompt.outline is not None
        output, recorded = list(output_ids), prompt.place.recorded
        if stopped is not None:
            size = bisect_left(range(len(output)), len(stopped), key=lambda n: len(self.text(output[:n])))
            output = output[:size]
            if self.text(output) != stopped:
                return memory.add(prompt.place, response, None, self._quoting.quote)
        earlier = recorded.turn if recorded else None
        if earlier is not None:
            earlier.text.stop_growing()
        turn = Turn(
            kept=memory.content.keep_ids(np.asarray(prompt.ids, "<u4"), np.array(output, "<u4")),
            text=prompt.outline.print,
            unmarked=prompt.outline.unmarked,
            thinking=prompt.thinking,
            ended=bool(output) and output[-1] in self.stop_token_ids,
            stopped=stopped is not None,
        )
        return memory.add(prompt.place, response, turn, self._quoting.quote)

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

    def _quoted_tools(self, tools: Sequence[Any] | None) -> Sequence[Any] | None:
        if not tools:
            return None
        written = json.dumps(list(tools))
        if (latest := self._latest_tools)[0] != written:  # read once: other threads replace it
            latest = self._latest_tools = (written, self._quoting.quote(list(tools)))
        return latest[1]

    def _opens(self, prompt: str) -> bool:
        """Whether the rendered ``prompt`` begins the reasoning of its response."""
        return self.template.delimiters is not None and self.template.delimiters.opens(prompt)
