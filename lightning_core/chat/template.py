"""Renders a model's chat template, and detects what it supports.

Templates differ in their support for tools (as an argument, in the system message, or not at all), tool calls (arguments as an object or
as text, one call or several), tool results, system messages and reasoning. This is detected once, by rendering small conversations and
searching for their content; the name of the model is not used. What a template does not support is written into the text of messages.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Literal, Protocol

from lightning_core.chat.messages import extend_system
from lightning_core.chat.reasoning import CLOSE, OPEN, split_reasoning
from lightning_core.chat.tool_formats import FORMATS, HERMES, SHORT_ID, ToolCall, ToolFormat
from lightning_core.errors import PolicyRequestError

_TOOLS_PROMPT = (
    "You may call functions. The available ones, one JSON schema a line:\n<tools>\n{tools}\n</tools>\n"
    "To call one, answer with {example}, once for each call."
)

_USER: dict[str, Any] = {"role": "user", "content": "x"}
_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "probe_tool",
        "description": "probe",
        "parameters": {"type": "object", "properties": {"probe_key": {"type": "string", "description": "probe"}}},
    },
}
_ARGUMENTS = {"probe_key": "probe_value"}
_CALL: dict[str, Any] = {"type": "function", "function": {"name": "probe_tool", "arguments": _ARGUMENTS}}


class Tokenizer(Protocol):
    """The methods of a Hugging Face tokenizer that are used here."""

    @property
    def chat_template(self) -> str | dict[str, str] | None: ...
    @property
    def all_special_tokens(self) -> list[str]: ...
    def get_added_vocab(self) -> dict[str, int]: ...
    def apply_chat_template(
        self,
        conversation: list[dict[str, Any]],
        *,
        tools: list[Any] | None,
        add_generation_prompt: bool,
        tokenize: Literal[False],
        **variables: Any,
    ) -> str: ...
    def encode(self, text: str, *, add_special_tokens: bool, split_special_tokens: bool) -> list[int]: ...
    def decode(self, token_ids: list[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str: ...
    def convert_tokens_to_ids(self, tokens: str) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _CallStyle:
    """The form of tool calls that a template accepts."""

    empty: str | None
    """The content of a message with calls and no text."""
    as_text: bool
    """Whether arguments are JSON text instead of an object."""
    short_ids: bool
    several: bool = False


_STYLES = [
    _CallStyle(empty=empty, as_text=as_text, short_ids=short_ids)
    for short_ids in (False, True)
    for as_text in (False, True)
    for empty in ("", None)
]


class ChatTemplate:
    """Renders messages, with arguments as objects, and detects the format of responses.

    Raises ValueError if the tokenizer has no template, or one that does not end a response with a special token. Not thread-safe,
    because tokenizers are not.
    """

    def __init__(self, tokenizer: Tokenizer, specials: Sequence[str]) -> None:
        text = tokenizer.chat_template
        if not text:
            raise ValueError(
                "the tokenizer has no chat template; use an instruction-tuned model or set tokenizer.chat_template"
            )
        self._tokenizer = tokenizer
        self._text = text if isinstance(text, str) else "\n".join(text.values())
        vocabulary = "\n".join(specials)
        self.enders = self._find_enders(specials)
        """The special tokens that end a response, as text."""
        self.reasons = CLOSE in self._text or CLOSE in vocabulary
        """Whether responses may start with reasoning."""
        self._reasoning_field = "probe_thought" in self._try(
            [_USER, {"role": "assistant", "content": "x", "reasoning_content": "probe_thought"}]
        )
        self._system = "probe_system" in self._try([{"role": "system", "content": "probe_system"}, _USER])
        self._declares = self._find_declaration()
        # Some tokenizers have another template for requests with tools.
        self._styles: dict[bool, _CallStyle | None] = {}
        found = None
        for tools in (False, True):
            self._styles[tools], found = self._find_style(tools=tools, known=found)
        if found is None and not any(self._renders_calls(tools=tools) for tools in (False, True)):
            found = next((f for f in FORMATS if any(m in self._text or m in vocabulary for m in f.opens)), None)
        self.tool_format: ToolFormat = found or HERMES
        """The format of tool calls in responses."""
        if found is None:
            # The template would ask for calls in a format that cannot be parsed here.
            self._declares = None
        self.short_ids = any(style is not None and style.short_ids for style in self._styles.values())
        """Whether ids of calls must be nine letters or digits."""
        self._results = found is not None and self._renders_results()

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None, *, generate: bool) -> str:
        """The text of ``messages``. ``generate``: with the generation prompt.

        Raises `PolicyRequestError` if the template raises an error.
        """
        ready = self._write_out([{**m} for m in messages], with_tools=bool(tools))
        declares = self._declares if tools else None
        if tools and declares is None:
            ready = extend_system(ready, self._spell_out(tools))
        elif tools and declares == "system":
            listed = json.dumps([t.get("function", t) for t in tools], ensure_ascii=False)
            first, rest = (ready[0], ready[1:]) if ready[0]["role"] == "system" else ({"content": ""}, ready)
            ready = [{"role": "system", "content": first["content"], "tools": listed}, *rest]
        if not self._system and ready[0]["role"] == "system":
            ready = _fold_system(ready)
        try:
            return self._apply(
                ready,
                tools=list(tools) if tools and declares == "tools" else None,
                generate=generate,
                **({"xml_tools": list(tools)} if tools and declares == "xml_tools" else {}),
            )
        except Exception as error:  # templates may raise anything: errors of jinja2, TypeError, their own
            raise PolicyRequestError(
                f"the chat template of the model cannot render these messages: {error}", param="messages"
            ) from error

    def _apply(
        self, messages: list[dict[str, Any]], *, tools: list[Any] | None, generate: bool, **variables: Any
    ) -> str:
        return self._tokenizer.apply_chat_template(
            messages, tools=tools, add_generation_prompt=generate, tokenize=False, **variables
        )

    def _write_out(self, messages: list[dict[str, Any]], *, with_tools: bool) -> list[dict[str, Any]]:
        """Messages as the template supports them; the rest is written into their text."""
        style = self._styles[with_tools]
        ready: list[dict[str, Any]] = []
        for m in messages:
            thought = m.pop("reasoning_content", None)
            if thought and self.reasons and self._reasoning_field:
                m["reasoning_content"] = thought
            elif thought and self.reasons:
                m["content"] = f"{OPEN}\n{thought}\n{CLOSE}\n\n{m['content']}"
            if m.get("tool_calls"):
                ready.append(self._write_calls(m, style))
            elif m["role"] != "tool":
                ready.append(m)
            elif self._results:
                ready.append({**m, **self._id(m, "tool_call_id")})
            else:
                result = f"<tool_response>\n{m['content']}\n</tool_response>"
                if ready and ready[-1].get("results"):
                    ready[-1]["content"] += f"\n{result}"
                else:
                    ready.append({"role": "user", "content": result, "results": True})
        return [{k: v for k, v in m.items() if k != "results"} for m in _join_results(ready)]

    def _write_calls(self, message: dict[str, Any], style: _CallStyle | None) -> dict[str, Any]:
        calls = message["tool_calls"]
        content = message["content"]
        if style is None or (len(calls) > 1 and not style.several) or (content and style.empty is None):
            read = [ToolCall(c["function"]["name"], c["function"].get("arguments") or {}) for c in calls]
            written = self.tool_format.write(read)
            plain = {k: v for k, v in message.items() if k != "tool_calls"}
            return {**plain, "content": f"{content}\n{written}" if content else written}
        return {
            **message,
            "content": content or style.empty,
            "tool_calls": [{**_styled(call, style), **self._id(call, "id")} for call in calls],
        }

    def _id(self, given: Mapping[str, Any], key: str) -> dict[str, str]:
        """The id under ``key``; if the template does not accept it, a hash of it."""
        identifier = str(given.get(key))
        if self.short_ids and not SHORT_ID.fullmatch(identifier):
            return {key: blake2b(identifier.encode(), digest_size=8).hexdigest()[:9]}
        return {key: identifier} if key in given else {}

    def _spell_out(self, tools: Sequence[Any]) -> str:
        example = self.tool_format.write([ToolCall("NAME", "OBJECT")])
        for placeholder, shown in (('"NAME"', "<name>"), ("NAME", "<name>"), ('"OBJECT"', "<object>")):
            example = example.replace(placeholder, shown)
        listed = "\n".join(json.dumps(t.get("function", t), ensure_ascii=False) for t in tools)
        return _TOOLS_PROMPT.format(tools=listed, example=example)

    # The methods below detect what the template supports.

    def _try(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[Any] | None = None,
        generate: bool = False,
        **variables: Any,
    ) -> str:
        """The rendered text; empty if the template raises an error."""
        try:
            return self._apply(messages, tools=tools, generate=generate, **variables)
        except Exception:  # noqa: BLE001 - see `render`
            return ""

    def _find_enders(self, specials: Sequence[str]) -> frozenset[str]:
        text = self._try([_USER, {"role": "assistant", "content": "probe_answer"}])
        after = text.partition("probe_answer")[2].lstrip()
        first = max((s for s in specials if after.startswith(s)), key=len, default=None)
        eos = getattr(self._tokenizer, "eos_token", None)
        enders = frozenset(t for t in (first, eos) if t)
        if not enders:
            raise ValueError(
                f"the chat template ends a response with {after[:40]!r}, which is not a special token, so that the end of a response "
                "cannot be detected; set tokenizer.chat_template"
            )
        return enders

    def _find_declaration(self) -> Literal["tools", "xml_tools", "system"] | None:
        """Where the template takes tools from."""
        if "probe_tool" in self._try([_USER], generate=True, tools=[_TOOL]):
            return "tools"
        if "probe_tool" in self._try([_USER], generate=True, xml_tools=[_TOOL]):
            return "xml_tools"
        listed = {"role": "system", "content": "x", "tools": json.dumps([_TOOL["function"]])}
        return "system" if "probe_tool" in self._try([listed, _USER], generate=True) else None

    def _probe_calls(self, style: _CallStyle, *, tools: bool, count: int = 1) -> str:
        """The rendered text of a response with ``count`` calls."""
        given = [_TOOL] if tools and self._declares == "tools" else None
        ids = [f"probe{i:04d}" if style.short_ids else f"call_{i:024d}" for i in range(count)]
        calls = [{**_styled(_CALL, style), "id": identifier} for identifier in ids]
        text = self._try([_USER, {"role": "assistant", "content": style.empty, "tool_calls": calls}], tools=given)
        text = text.removeprefix(self._try([_USER], tools=given, generate=True))
        head, value, tail = text.rpartition("probe_value")
        ends = [at for ender in self.enders if (at := tail.find(ender)) >= 0]
        return head + value + tail[: min(ends, default=len(tail))]

    def _find_style(self, *, tools: bool, known: ToolFormat | None) -> tuple[_CallStyle | None, ToolFormat | None]:
        """The style and the format with which a rendered call is parsed back to the same call."""
        call = ToolCall("probe_tool", _ARGUMENTS)
        for style in _STYLES:
            written = self._probe_calls(style, tools=tools)
            for form in (known,) if known else FORMATS:
                if written and _reads(form, written) == [call]:
                    several = _reads(form, self._probe_calls(style, tools=tools, count=2)) == [call, call]
                    return _CallStyle(
                        empty=style.empty, as_text=style.as_text, short_ids=style.short_ids, several=several
                    ), form
        return None, known

    def _renders_calls(self, *, tools: bool) -> bool:
        return any("probe_value" in self._probe_calls(style, tools=tools) for style in _STYLES)

    def _renders_results(self) -> bool:
        """Whether the template renders messages of the role ``tool``."""
        identifier = "probe0000"
        asked = {"role": "assistant", "content": "", "tool_calls": [{**_CALL, "id": identifier}]}
        result = {"role": "tool", "tool_call_id": identifier, "name": "probe_tool", "content": "probe_result"}
        return any(
            "probe_result" in self._try([_USER, self._write_calls({**asked}, style), result], generate=True)
            for style in self._styles.values()
        )


def _reads(form: ToolFormat, written: str) -> list[ToolCall]:
    answer = split_reasoning(written, opened=False)[1] or ""
    return [call._replace(id=None) for call in form.read(answer.strip())[1]]


def _styled(call: Mapping[str, Any], style: _CallStyle) -> dict[str, Any]:
    function = call["function"]
    arguments = function.get("arguments") or {}
    if style.as_text and not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": arguments}}


def _join_results(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Join a user message to the results before it: some templates require alternation."""
    joined: list[dict[str, Any]] = []
    for m in messages:
        if joined and joined[-1].get("results") and m["role"] == "user":
            joined[-1] = {**joined[-1], "content": f"{joined[-1]['content']}\n{m['content']}"}
        else:
            joined.append(m)
    return joined


def _fold_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Move the system message to the start of the first user message."""
    system, *rest = messages
    if rest and rest[0]["role"] == "user":
        return [{**rest[0], "content": f"{system['content']}\n\n{rest[0]['content']}"}, *rest[1:]]
    return [{"role": "user", "content": system["content"]}, *rest]
