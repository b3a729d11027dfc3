"""Messages ⇄ tokens: the only place that tokenises, once, before sampling.

A conversation that goes on keeps the tokens it was sampled with. On a later turn the ids of (prompt ‖ response) recorded in this rollout
are taken as they are, and only what is new is rendered and encoded. How a prompt joins what was said before is one of

- ``new``: nothing recorded stands at its beginning;
- ``clean``: the recorded response came back as it was said;
- ``realigned``: it came back written differently (stripped, or a tool call re-serialised); the recorded ids stand in for it;
- ``forked``: the beginning was recorded, but the template renders it differently now, so everything is encoded anew.

Text of a message that looks like a special token is encoded as plain text: a user cannot end a turn by writing ``<|im_end|>``.
"""

from __future__ import annotations

import json
import re
import threading
import uuid
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from lightning_core.errors import PolicyRequestError

Message = Mapping[str, Any]
Context = Literal["new", "clean", "realigned", "forked"]

# Private-use characters that no template emits: a marker for the response's place, and a bracket for text that must stay text.
_HERE = "\ue0f0response\ue0f1"
_PLAIN = re.compile("\ue0f2(\\d+)\ue0f3")
_TOOL_CALL = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|$)", re.DOTALL)

_TOOLS_PROMPT = (
    "You may call functions. The available ones, one JSON schema a line:\n<tools>\n{tools}\n</tools>\n"
    'To call one, answer with <tool_call>{{"name": <name>, "arguments": <object>}}</tool_call>, once for each call.'
)


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that is used here."""

    @property
    def chat_template(self) -> str | None: ...
    @property
    def all_special_tokens(self) -> list[str]: ...
    def apply_chat_template(
        self,
        conversation: list[dict[str, Any]],
        *,
        tools: list[Any] | None,
        add_generation_prompt: bool,
        tokenize: Literal[False],
    ) -> str: ...
    def encode(self, text: str, *, add_special_tokens: bool, split_special_tokens: bool) -> list[int]: ...
    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str: ...
    def convert_tokens_to_ids(self, tokens: str) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A rendered prompt, ready to sample from."""

    ids: tuple[int, ...]
    text: str
    """What the template rendered for these messages, whatever ids stand in for parts of it."""
    messages: tuple[Message, ...]
    tools: str
    context: Context
    reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Turn:
    """A recorded exchange: what was rendered, what it was sampled from, and what came back."""

    text: str
    ids: array[int]
    """Packed: four bytes each instead of forty, and there may be many turns."""
    response: Message
    ended: bool


class Memory:
    """What one rollout has said so far, found again by the messages that a later request begins with. Thread-safe."""

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
    """Renders and parses the chat format of one tokenizer. Stateless; what a rollout said is in its `Memory`."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        if not tokenizer.chat_template:
            raise ValueError(
                "the tokenizer has no chat template; use an instruction-tuned model or set tokenizer.chat_template"
            )
        self._tokenizer = tokenizer
        self._lock = threading.Lock()  # fast tokenizers change their own state while encoding
        self._specials = sorted((t for t in tokenizer.all_special_tokens if t), key=len, reverse=True)
        self._knows_tools = "tools" in tokenizer.chat_template
        self.stop_token_ids = self._find_stop_tokens()

    def render(
        self, messages: Sequence[Message], tools: Sequence[Any] | None, memory: Memory, *, demands: str = ""
    ) -> Prompt:
        """Tokens of ``messages`` with the generation prompt, reusing the recorded ids of an earlier turn where there is one.

        ``demands`` is an instruction that the system message ends with; a conversation under other demands is another one.
        Raises `PolicyRequestError` if a message is not one that the template can render.
        """
        plain = [_check_message(m, i) for i, m in enumerate(messages)]
        if not plain:
            raise PolicyRequestError("messages is empty; expected at least one message", param="messages")
        tool_key = json.dumps([tools or [], demands], sort_keys=True)
        if demands:
            plain = _extend_system(plain, demands)
        text, quoted = self._render(plain, tools, generate=True)
        context: Context = "new"
        reason = None
        for last in range(len(plain) - 1, 0, -1):
            if plain[last]["role"] != "assistant":
                continue
            turn = memory.get(_key(plain[: last + 1], tool_key))
            if turn is None:
                continue
            tail = self._tail(plain, last, tools, turn)
            if isinstance(tail, str):
                context, reason = "forked", tail
                break
            given = plain[last]
            same = _text(turn.response) == _text(given) and _functions(turn.response) == _functions(given)
            return Prompt(
                ids=(*turn.ids, *tail),
                text=text,
                messages=tuple(plain),
                tools=tool_key,
                context="clean" if same else "realigned",
                reason=None if same else "the response came back written differently",
            )
        ids = tuple(self._encode(text, quoted))
        return Prompt(ids=ids, text=text, messages=tuple(plain), tools=tool_key, context=context, reason=reason)

    def remember(self, prompt: Prompt, output_ids: Sequence[int], response: Message, memory: Memory) -> None:
        """Record what was sampled from ``prompt``, so that the next turn continues these very tokens."""
        turn = _Turn(
            text=prompt.text,
            ids=array("I", (*prompt.ids, *output_ids)),
            response=response,
            ended=bool(output_ids) and output_ids[-1] in self.stop_token_ids,
        )
        memory.put(_key([*prompt.messages, response], prompt.tools), turn)

    def text(self, output_ids: Sequence[int]) -> str:
        """The visible text of sampled tokens: special tokens left out."""
        with self._lock:
            return self._tokenizer.decode(list(output_ids), skip_special_tokens=True)

    def parse(self, output_ids: Sequence[int], *, tools: bool) -> dict[str, Any]:
        """The assistant message that sampled tokens stand for. With ``tools``, well-formed tool calls are taken out of the text."""
        return (
            parse_tool_calls(self.text(output_ids))
            if tools
            else {"role": "assistant", "content": self.text(output_ids)}
        )

    def _tail(
        self, messages: list[dict[str, Any]], last: int, tools: Sequence[Any] | None, turn: _Turn
    ) -> list[int] | str:
        """Ids of all that follows the response at ``last``; or the reason why its recorded context no longer holds."""
        marked = [*messages[:last], {"role": "assistant", "content": _HERE}, *messages[last + 1 :]]
        try:
            text, quoted = self._render(marked, tools, generate=True)
        except PolicyRequestError:
            return "the template does not render this conversation without its tool calls"
        before, here, after = text.partition(_HERE)
        if not here:
            return "the template leaves out earlier turns"
        if before != turn.text:
            return "the template renders earlier turns differently than it did"
        if turn.ended:
            end = self._tokenizer.decode([turn.ids[-1]], skip_special_tokens=False)
            after = after.removeprefix(end)
        return self._encode(after, quoted)

    def _render(
        self, messages: list[dict[str, Any]], tools: Sequence[Any] | None, *, generate: bool
    ) -> tuple[str, list[str]]:
        """Template text, with special-looking text in contents replaced by numbered brackets; and what stood there."""
        quoted: list[str] = []

        def protect(content: str) -> str:
            for special in self._specials:
                if special in content:
                    quoted.append(special)
                    content = content.replace(special, f"\ue0f2{len(quoted) - 1}\ue0f3")
            return content

        ready = [{**m, "content": protect(m["content"])} if m.get("content") else m for m in messages]
        if not self._knows_tools:
            ready = _spell_out_tools(ready, tools)
        try:
            with self._lock:
                text = self._tokenizer.apply_chat_template(
                    ready,
                    tools=list(tools) if tools and self._knows_tools else None,
                    add_generation_prompt=generate,
                    tokenize=False,
                )
        except (
            Exception
        ) as error:  # templates raise what they like: jinja2's errors, TypeError, their own raise_exception
            raise PolicyRequestError(
                f"the model's chat template refuses these messages: {error}", param="messages"
            ) from error
        return text, quoted

    def _encode(self, text: str, quoted: list[str]) -> list[int]:
        ids: list[int] = []
        with self._lock:
            for i, part in enumerate(_PLAIN.split(text)):
                # re.split alternates between text and the numbers of quoted specials
                plain = i % 2 == 1
                if part:
                    ids += self._tokenizer.encode(
                        quoted[int(part)] if plain else part, add_special_tokens=False, split_special_tokens=plain
                    )
        return ids

    def _find_stop_tokens(self) -> frozenset[int]:
        """Tokens that end an assistant's turn: what the template writes after a response, and the tokenizer's end of text."""
        text, _ = self._render(
            [{"role": "user", "content": "x"}, {"role": "assistant", "content": _HERE}], None, generate=False
        )
        after = text.partition(_HERE)[2]
        enders = {s for s in self._specials if after.lstrip().startswith(s)}
        eos = getattr(self._tokenizer, "eos_token", None)
        if eos:
            enders.add(eos)
        if not enders:
            raise ValueError(
                f"the chat template ends a response with {after!r}, which is no special token: no way to tell where one ends"
            )
        return frozenset(self._tokenizer.convert_tokens_to_ids(t) for t in enders)


def parse_tool_calls(text: str) -> dict[str, Any]:
    """An assistant message from text with ``<tool_call>{…}</tool_call>`` blocks. Malformed blocks stay in the text, visible."""
    calls: list[dict[str, Any]] = []

    def take(match: re.Match[str]) -> str:
        try:
            value = json.loads(match[1])
            name, arguments = value["name"], value.get("arguments", {})
        except (ValueError, KeyError, TypeError, AttributeError):
            return match[0]
        if not isinstance(name, str):
            return match[0]
        written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        calls.append(
            {
                "id": f"call_{uuid.uuid4().hex[:24]}",
                "type": "function",
                "function": {"name": name, "arguments": written},
            }
        )
        return ""

    content = _TOOL_CALL.sub(take, text)
    message: dict[str, Any] = {"role": "assistant", "content": content if not calls else content.rstrip() or None}
    if calls:
        message["tool_calls"] = calls
    return message


def _check_message(message: Any, index: int) -> dict[str, Any]:
    """One message with its content as a plain string, or the error that says what is wrong with it."""
    where = f"messages[{index}]"
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise PolicyRequestError(f"{where} is {message!r}; expected an object with a role", param=where)
    content = message.get("content")
    if isinstance(content, Sequence) and not isinstance(content, str):
        parts: list[str] = []
        for part in content:
            if (
                not isinstance(part, Mapping)
                or part.get("type") not in ("text", "input_text")
                or not isinstance(part.get("text"), str)
            ):
                raise PolicyRequestError(
                    f"{where} has a content part {part!r}; this model reads text parts only", param=where
                )
            parts.append(part["text"])
        content = "".join(parts)
    if content is not None and not isinstance(content, str):
        raise PolicyRequestError(f"{where}.content is {content!r}; expected a string or text parts", param=where)
    checked = {
        k: v for k, v in message.items() if v is not None and k in ("role", "name", "tool_call_id", "tool_calls")
    }
    if checked["role"] == "developer":
        checked["role"] = "system"
    if "tool_calls" in checked:
        # Templates iterate over arguments as an object; the API sends them as a JSON string.
        checked["tool_calls"] = [_loads_arguments(call) for call in checked["tool_calls"]]
    return {**checked, "content": content or ""}


def _loads_arguments(call: Any) -> Any:
    try:
        function = call["function"]
        return {**call, "function": {**function, "arguments": json.loads(function["arguments"])}}
    except (ValueError, KeyError, TypeError):
        return call


def _spell_out_tools(messages: list[dict[str, Any]], tools: Sequence[Any] | None) -> list[dict[str, Any]]:
    """For templates without tools: describe them in the system prompt, and write calls and results into the text."""
    ready: list[dict[str, Any]] = []
    for m in messages:
        if m.get("tool_calls"):
            calls = [c["function"] for c in m["tool_calls"]]
            lines = [
                f"<tool_call>{json.dumps({'name': c['name'], 'arguments': c['arguments']})}</tool_call>" for c in calls
            ]
            ready.append(
                {"role": "assistant", "content": "\n".join([*([m["content"]] if m["content"] else []), *lines])}
            )
        elif m["role"] == "tool":
            ready.append({"role": "user", "content": f"<tool_response>\n{m['content']}\n</tool_response>"})
        else:
            ready.append(m)
    if tools:
        description = _TOOLS_PROMPT.format(tools="\n".join(json.dumps(t.get("function", t)) for t in tools))
        ready = _extend_system(ready, description)
    return ready


def _extend_system(messages: list[dict[str, Any]], more: str) -> list[dict[str, Any]]:
    """``messages``, whose system message ends with ``more``; it is made where there is none."""
    first, rest = (messages[0], messages[1:]) if messages[0]["role"] == "system" else (None, messages)
    content = f"{first['content']}\n\n{more}" if first and first["content"] else more
    return [{**(first or {"role": "system"}), "content": content}, *rest]


def _text(message: Message) -> str:
    return message.get("content") or ""


def _functions(message: Message) -> list[Any]:
    return [_loads_arguments(call).get("function") for call in message.get("tool_calls") or ()]


def _key(messages: Sequence[Message], tools: str) -> str:
    """Identifies a conversation up to differences in how responses are written down."""
    parts: list[Any] = [tools]
    for m in messages:
        content = _text(m)
        calls = _functions(m)
        parts.append(
            [
                m["role"],
                content.strip() if m["role"] == "assistant" else content,
                calls,
                m.get("name"),
                m.get("tool_call_id"),
            ]
        )
    return json.dumps(parts, sort_keys=True)
