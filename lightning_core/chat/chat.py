"""Converts messages to tokens and sampled tokens to messages.

Text is tokenised once, before sampling.

A later turn of a conversation reuses the recorded ids of (prompt ‖ response); only new text is rendered and encoded. The context of a
prompt is one of

- ``new``: it does not start with recorded tokens;
- ``clean``: it starts with recorded tokens, and the client sent the response back unchanged;
- ``realigned``: it starts with recorded tokens, although the client sent the response back in another form (stripped, or a tool call
  serialised differently), or the template now writes other white space around earlier turns;
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

from lightning_core.chat.messages import Message, check_message, extend_system, functions_of, keys, text_of
from lightning_core.chat.quoting import Quoting, mark
from lightning_core.chat.reasoning import CLOSE, OPEN, opens_reasoning, split_reasoning
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
    tools: str
    context: Context
    reason: str | None = None
    thinking: bool = False
    """Whether the response starts inside its reasoning."""


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

    Stateless; the turns of a rollout are in its `Memory`.

    ``stop_token_ids``: tokens that end a response, in addition to those of the template and the tokenizer. ``name``: distinguishes the
    turns of several tokenizers in one rollout, which cannot continue each other. Raises ValueError if the tokenizer has no chat
    template, or one that does not end a response with a special token.
    """

    def __init__(self, tokenizer: Tokenizer, *, stop_token_ids: Iterable[int] = (), name: str = "") -> None:
        self._name = name
        self._tokenizer = tokenizer
        self._lock = threading.Lock()  # fast tokenizers change their own state while encoding
        vocabulary = tokenizer.get_added_vocab()
        # Some vocabularies have added tokens for runs of white space, which are text.
        specials = {t for t in (*tokenizer.all_special_tokens, *vocabulary) if t.strip()}
        self._template = ChatTemplate(tokenizer, sorted(specials))
        self._quoting = Quoting({*specials, OPEN, CLOSE})
        self._special_ids = {tokenizer.convert_tokens_to_ids(t) for t in specials}
        self.stop_token_ids = frozenset({*stop_token_ids, *map(tokenizer.convert_tokens_to_ids, self._template.enders)})
        self._stops = [text for i in self.stop_token_ids if (text := self._decode([i]))]
        marks = {*self.tool_format.marks, OPEN, CLOSE}
        shown = {vocabulary[m] for m in marks if m in vocabulary} - self.stop_token_ids
        self._hidden = {i for i in self._special_ids - shown if not self._decode([i], skip=True)} | self.stop_token_ids
        self._plain: dict[str, list[int]] = {}
        # SentencePiece adds a space before a text, so parts of a text are encoded after a line feed.
        self._line: list[int] = []
        x, line, both = (self._encode(t) for t in ("x", "\n", "\nx"))
        if both != line + x:
            self._line = line

    @property
    def tool_format(self) -> ToolFormat:
        """The format of tool calls in responses."""
        return self._template.tool_format

    def render(
        self, messages: Sequence[Message], tools: Sequence[Any] | None, memory: Memory, *, instruction: str = ""
    ) -> RenderedPrompt:
        """The prompt of ``messages``, with the recorded ids of earlier turns.

        ``instruction``: text at the end of the system message; with another instruction it is another conversation. Raises
        `PolicyRequestError` if the template cannot render the messages.
        """
        plain = [check_message(m, i) for i, m in enumerate(messages)]
        if not plain:
            raise PolicyRequestError("messages is empty; expected at least one message", param="messages")
        setting = json.dumps([tools or [], instruction, self._name], sort_keys=True)
        if instruction:
            plain = extend_system(plain, instruction)
        turns = [
            memory.get(key) if m["role"] == "assistant" else None
            for m, key in zip(plain, keys(plain, setting), strict=True)
        ]
        # Clients leave out reasoning; the template decides which of it is kept.
        complete = [
            m if turn is None else {**m, "reasoning_content": turn.response.get("reasoning_content")}
            for m, turn in zip(plain, turns, strict=True)
        ]
        quoted = [self._quoting.quote(m) for m in complete]
        quoted_tools = self._quoting.quote(list(tools)) if tools else None
        with self._lock:
            text = self._template.render(quoted, quoted_tools, generate=True)
        context: Context = "new"
        reason = None
        ids: tuple[int, ...] | None = None
        last = max((i for i, turn in enumerate(turns) if turn is not None), default=None)
        if last is not None and (turn := turns[last]) is not None:
            tail, reason = self._tail(quoted, last, quoted_tools, turn)
            if tail is None:
                context = "forked"
            else:
                same = text_of(turn.response) == text_of(plain[last])
                same = same and functions_of(turn.response) == functions_of(plain[last])
                reason = reason if same else "the response came back written differently"
                context = "realigned" if reason else "clean"
                ids = (*turn.ids, *self._encode(tail, start=False))
        elif any(m["role"] == "assistant" for m in plain):
            reason = "earlier responses, or the messages or tools before them, differ from the recorded ones"
        return RenderedPrompt(
            ids=tuple(self._encode(text)) if ids is None else ids,
            text=text,
            messages=tuple(plain),
            tools=setting,
            context=context,
            reason=reason,
            thinking=self._template.reasons and opens_reasoning(text),
        )

    def plain(self, prompt: str | Sequence[int]) -> RenderedPrompt:
        """A prompt without a chat, as text or ids. No template is applied.

        Special tokens in the text are encoded as such, and the tokenizer adds its start token, if it has one. Raises
        `PolicyRequestError` if the prompt is empty or has ids outside the vocabulary.
        """
        if isinstance(prompt, str):
            with self._lock:
                ids = tuple(self._tokenizer.encode(prompt, add_special_tokens=True, split_special_tokens=False))
        else:
            ids = tuple(prompt)
            vocabulary = len(cast(Sized, self._tokenizer))
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

    def remember(self, prompt: RenderedPrompt, output_ids: Sequence[int], response: Message, memory: Memory) -> None:
        """Record a response to ``prompt``, so that the next turn continues its tokens."""
        turn = _Turn(
            text=prompt.text,
            ids=array("I", (*prompt.ids, *output_ids)),
            response=response,
            ended=bool(output_ids) and output_ids[-1] in self.stop_token_ids,
        )
        memory.put(keys([*prompt.messages, response], prompt.tools)[-1], turn)

    def text(self, output_ids: Sequence[int]) -> str:
        """The text of sampled tokens, with only the special tokens of calls and reasoning."""
        return self._decode([i for i in output_ids if i not in self._hidden])

    def split(self, text: str, *, thinking: bool, final: bool = True) -> tuple[str, str | None]:
        """The reasoning and the answer of a response; see `split_reasoning`."""
        return split_reasoning(text, opened=thinking, final=final) if self._template.reasons else ("", text)

    def read(self, text: str, *, tools: bool, thinking: bool = False) -> dict[str, Any]:
        """Parse the text of a response into reasoning, text and, with ``tools``, tool calls."""
        thought, answer = self.split(text, thinking=thinking)
        form = self.tool_format if tools else None
        message = read_message(form, answer or "", short_ids=self._template.short_ids)
        return {**message, "reasoning_content": thought} if thought else message

    def parse(self, output_ids: Sequence[int], *, tools: bool, thinking: bool = False) -> dict[str, Any]:
        """Parse sampled tokens; see `read`."""
        return self.read(self.text(output_ids), tools=tools, thinking=thinking)

    def _tail(
        self, messages: list[dict[str, Any]], last: int, tools: Sequence[Any] | None, turn: _Turn
    ) -> tuple[str | None, str | None]:
        """The text after the response at ``last``, and why earlier turns are rendered differently.

        The text is None if they differ in more than white space, so that the recorded ids cannot be reused.
        """
        response = _marked(messages[last])
        try:
            with self._lock:
                text = self._template.render([*messages[:last], response, *messages[last + 1 :]], tools, generate=True)
        except PolicyRequestError:
            return None, "the template does not render this conversation without what was said"
        before, here, after = text.partition(_RESPONSE)
        if not here:
            return None, "the template leaves out earlier turns"
        if response.get("reasoning_content") and _THOUGHT not in before:
            return None, "the template leaves out earlier reasoning"
        prompt, start = _squeeze(turn.text), _squeeze(before)
        # The model itself may have written what is between prompt and response: reasoning tags, the start of a call.
        lead = start.removeprefix(prompt)
        for written in (_THOUGHT, OPEN, CLOSE):
            lead = lead.replace(written, "")
        ends = [(at, -len(stop)) for stop in self._stops if (at := after.find(stop)) >= 0]
        at, length = min(ends, default=(0, 0))
        calls = bool(response.get("tool_calls"))
        if not ends or not start.startswith(prompt) or (not calls and (lead or after[:at].strip())):
            return None, "the template renders earlier turns differently than it did"
        # The sampled stop token replaces that of the template.
        tail = after[at - length :] if turn.ended else after[at:]
        return tail, None if before.startswith(
            turn.text
        ) else "the template renders earlier turns with other white space"

    def _encode(self, text: str, *, start: bool = True) -> list[int]:
        """Ids of a rendered text. ``start``: it is the start of the prompt."""
        ids: list[int] = []
        with self._lock:
            for piece, quoted in self._quoting.pieces(text):
                ids += self._encode_plain(piece) if quoted else self._encode_piece(piece, start=start and not ids)
        return ids

    def _encode_plain(self, token: str) -> list[int]:
        """Ids of a special token as plain text.

        Tokenizers split only some of their special tokens.
        """
        if token not in self._plain:
            ids = self._encode_piece(token, split=True)
            if len(token) > 1 and not self._special_ids.isdisjoint(ids):
                ids = self._encode_plain(token[0]) + self._encode_plain(token[1:])
            self._plain[token] = ids
        return self._plain[token]

    def _encode_piece(self, text: str, *, split: bool = False, start: bool = False) -> list[int]:
        if self._line and not start:
            ids = self._tokenizer.encode(f"\n{text}", add_special_tokens=False, split_special_tokens=split)
            if ids[: len(self._line)] == self._line:
                return ids[len(self._line) :]
        return self._tokenizer.encode(text, add_special_tokens=False, split_special_tokens=split)

    def _decode(self, token_ids: list[int], *, skip: bool = False) -> str:
        with self._lock:
            return self._tokenizer.decode(token_ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)


def _squeeze(text: str) -> str:
    return "".join(text.split())


def _marked(response: dict[str, Any]) -> dict[str, Any]:
    """``response`` with a mark in place of its last arguments, or else of its text."""
    thought = {"reasoning_content": _THOUGHT} if response.get("reasoning_content") else {}
    calls: list[Mapping[str, Any]] = list(response.get("tool_calls") or ())
    if not calls:
        return {**response, "content": _RESPONSE, **thought}
    last = {**calls[-1], "function": {**calls[-1]["function"], "arguments": {_RESPONSE: ""}}}
    return {**response, "tool_calls": [*calls[:-1], last], **thought}
