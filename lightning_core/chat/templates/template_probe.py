"""Detects what a chat template supports, by rendering small conversations and searching for their content.

The name of the model is not used.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from typing import Any, Literal

from lightning_core.chat.templates.raw_template import RawTemplate
from lightning_core.chat.templates.reasoning import KNOWN, Delimiters, find_delimiters
from lightning_core.chat.templates.roles import RoleOrders, find_roles
from lightning_core.chat.tool_calls.call_ids import IdStyle
from lightning_core.chat.tool_calls.tool_definitions import find_forms
from lightning_core.chat.tool_calls.tool_formats import FORMATS, ToolFormat
from lightning_core.errors import ConfigError

_USER: dict[str, Any] = {"role": "user", "content": "x"}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "probe_tool",
        "description": "probe",
        "parameters": {"type": "object", "properties": {"probe_key": {"type": "string", "description": "probe"}}},
    },
}
_ARGUMENTS = {"probe_key": "probe_value"}
_CALL: dict[str, Any] = {"type": "function", "function": {"name": "probe_tool", "arguments": _ARGUMENTS}}
_FIELDS = ("reasoning_content", "reasoning", "thinking")

Declaration = Literal["tools", "xml_tools", "system"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CallStyle:
    """The form of tool calls that a template accepts."""

    empty: str | None
    """The content of a message with calls and no text."""
    as_text: bool
    """Whether arguments are JSON text instead of an object."""
    ids: IdStyle
    several: bool = False
    with_text: bool = False
    """Whether a message may have text before its calls."""
    again: bool = True
    """Whether later messages with calls may have text, too."""
    apart: bool = False
    """Whether the text before calls may be a separate message of the same turn."""
    lasts: bool = True
    """Whether the text before calls is still there after a later response."""

    def write(self, call: Mapping[str, Any]) -> dict[str, Any]:
        """``call`` with its arguments in this form."""
        function = call["function"]
        arguments = function.get("arguments") or {}
        if self.as_text and not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        return {**call, "function": {**function, "arguments": arguments}}


_STYLES = [
    CallStyle(empty=empty, as_text=as_text, ids=ids)
    for ids in IdStyle
    for as_text in (False, True)
    for empty in ("", None)
]


class Traits:
    """The features that ``template`` supports.

    ``specials``: the special tokens of the vocabulary. Raises `ConfigError` if the template does not end a response with a special token
    and the tokenizer has no eos token, or if it writes tool calls in a format that no parser reads.
    """

    def __init__(self, template: RawTemplate, specials: Sequence[str]) -> None:
        self._try = template.attempt
        vocabulary = "\n".join(specials)
        known = f"{template.text}\n{vocabulary}"
        self.enders = self._find_enders(specials, template.eos)
        """The special tokens that end a response, as text."""
        self.declares = self._find_declaration()
        """The variable in which the template expects tools."""
        # Some tokenizers have another template for requests with tools.
        self.styles: dict[bool, CallStyle | None] = {}
        call_format = None
        for tools in (False, True):
            self.styles[tools], call_format = self._find_style(tools=tools, form=call_format)
        if call_format is None:
            if written := self._unread_call():
                raise ConfigError(
                    f"the chat template of the tokenizer writes tool calls that cannot be read back, such as {written!r}; the formats that "
                    f"are read: {', '.join(form.name for form in FORMATS)}. Set tokenizer.chat_template to a template in one of them, or "
                    "to one without tool calls, and Hermes calls are described in the prompt"
                )
            call_format = next((f for f in FORMATS if f.opens[0] in known), None)
        self.format = call_format
        """The format of tool calls that the template writes, or has the marks of; None if there is none."""
        if call_format is None:
            self.declares = None
        self.ids = next(
            (style.ids for style in self.styles.values() if style and style.ids is not IdStyle.ANY), IdStyle.ANY
        )
        self.results = call_format is not None and self._renders_results()
        """Whether the template renders messages of the role ``tool``."""
        self.call_enders = self._find_call_enders(specials)
        """The special tokens that end a response with calls."""
        self.field, self.delimiters = self._find_reasoning(known)
        """The field of reasoning, if the template has one, and the texts around it."""
        self.joins_thought = self._joins_thought()
        """Whether a message with calls may have text or reasoning, but not both."""
        self.forms = (
            find_forms(lambda tools: "probe_tool" in self._try([_USER], tools=[*tools])) if self._tools(True) else []
        )
        """The changes of tool definitions that the template needs."""
        self.roles = {False: self._find_roles(tools=False)}
        """The orders of roles that the template renders, without tools and with them."""
        self.roles[True] = self._find_roles(tools=True) if self._tools(True) else self.roles[False]

    def _find_roles(self, *, tools: bool) -> RoleOrders:
        style = self.styles[tools] or _STYLES[0]
        call = {"role": "assistant", "content": style.empty, "tool_calls": [_probe_call(style)]}
        render = partial(self._try, generate=True, tools=self._tools(tools))
        return find_roles(render, self.enders, call, results=self.results)

    def _find_enders(self, specials: Sequence[str], eos: str | None) -> frozenset[str]:
        answer = {"role": "assistant", "content": "probe_answer"}
        after = self._try([_USER, answer]).partition("probe_answer")[2].lstrip()
        # Some templates end a response only with the start of the next message.
        next_ = self._try([_USER, answer, _USER]).partition("probe_answer")[2].lstrip()
        first = _special_at_start(specials, after) or _special_at_start(specials, next_)
        enders = frozenset(t for t in (first, eos) if t)
        if not enders:
            raise ConfigError(
                f"the chat template ends a response with {after[:40]!r}, which is not a special token, and the tokenizer has no eos "
                "token, so responses would not end; set tokenizer.chat_template or tokenizer.eos_token"
            )
        return enders

    def _find_call_enders(self, specials: Sequence[str]) -> frozenset[str]:
        style = self.styles[True] or self.styles[False]
        if style is None or self.format is None:
            return frozenset()
        tail = self._render_result(style).partition("probe_value")[2].partition("probe_result")[0]
        candidates = [(tail.find(s), -len(s), s) for s in specials if s in tail and s not in self.format.marks]
        return frozenset({min(candidates)[2]}) if candidates else frozenset()

    def _find_declaration(self) -> Declaration | None:
        if "probe_tool" in self._try([_USER], generate=True, tools=[TOOL]):
            return "tools"
        if "probe_tool" in self._try([_USER], generate=True, xml_tools=[TOOL]):
            return "xml_tools"
        listed = {"role": "system", "content": "x", "tools": json.dumps([TOOL["function"]])}
        return "system" if "probe_tool" in self._try([listed, _USER], generate=True) else None

    def _tools(self, tools: bool) -> list[Any] | None:
        return [TOOL] if tools and self.declares == "tools" else None

    def _probe_calls(self, style: CallStyle, *, tools: bool, count: int = 1, text: str = "") -> str:
        """The rendered text of a response with ``count`` calls, up to its end."""
        calls = [_probe_call(style, i) for i in range(count)]
        message = {"role": "assistant", "content": text or style.empty, "tool_calls": calls}
        written = self._try([_USER, message], tools=self._tools(tools))
        prompt = self._try([_USER], tools=self._tools(tools), generate=True)
        written = after_prompt(prompt, written)
        head, value, tail = written.rpartition("probe_value")
        ends = [at for ender in self.enders if (at := tail.find(ender)) >= 0]
        return head + value + tail[: min(ends, default=len(tail))]

    def _find_style(self, *, tools: bool, form: ToolFormat | None) -> tuple[CallStyle | None, ToolFormat | None]:
        """The style and the format with which a rendered call is parsed back to the same call."""
        for style in _STYLES:
            written = self._probe_calls(style, tools=tools)
            if "probe_value" not in written:
                continue
            for known in (form,) if form else FORMATS:
                if _reads(known, written):
                    return self._detail(style, known, tools=tools), known
        return None, form

    def _detail(self, style: CallStyle, form: ToolFormat, *, tools: bool) -> CallStyle:
        several = _reads(form, self._probe_calls(style, tools=tools, count=2), 2)
        both = self._probe_calls(style, tools=tools, text="probe_text")
        with_text = "probe_text" in both.partition("probe_value")[0] and _reads(form, both)
        said: dict[str, Any] = {"role": "assistant", "content": "probe_text"}
        call = _probe_call(style)
        calls: dict[str, Any] = {"role": "assistant", "content": style.empty, "tool_calls": [call]}
        result = {"role": "tool", "tool_call_id": call["id"], "name": "probe_tool", "content": "x"}
        answered = [result, {"role": "assistant", "content": "x"}, _USER]

        def text(*messages: dict[str, Any]) -> str:
            return self._try([_USER, *messages], tools=self._tools(tools))

        between, called, _ = text(said, calls).partition("probe_text")[2].partition("probe_value")
        both = {**calls, "content": "probe_text"}
        twice, later = text({**calls, "content": "x"}, result, both, result), text(both, *answered)
        return replace(
            style,
            several=several,
            with_text=with_text,
            again=not twice or "probe_text" in twice,
            lasts=not later or "probe_text" in later,
            apart=bool(called)
            and not any(ender in between for ender in self.enders)
            and "probe_text" in text(said, calls, *answered),
        )

    def _unread_call(self) -> str:
        """A call that the template wrote and no format reads; empty if there is none."""
        for tools in (False, True):
            for style in _STYLES:
                written = self._probe_calls(style, tools=tools)
                if "probe_value" in written:
                    return written.strip()[:200]
        return ""

    def _render_result(self, style: CallStyle | None) -> str:
        """A conversation with a call and its result."""
        call = _probe_call(style or _STYLES[0])
        asked = {"role": "assistant", "content": style.empty if style else "", "tool_calls": [call]}
        result = {"role": "tool", "tool_call_id": call["id"], "name": "probe_tool", "content": "probe_result"}
        return self._try([_USER, asked, result], generate=True)

    def _renders_results(self) -> bool:
        return any("probe_result" in self._render_result(style) for style in self.styles.values())

    def _thinking(self, field: str, *, calls: bool, text: str) -> str:
        style = self.styles[True] or self.styles[False]
        message: dict[str, Any] = {"role": "assistant", "content": text, field: "probe_thought"}
        if calls and style is not None:
            message["tool_calls"] = [_probe_call(style)]
            message["content"] = text or style.empty
        return self._try([_USER, message], tools=self._tools(calls))

    def _find_reasoning(self, known: str) -> tuple[str | None, Delimiters | None]:
        for field in _FIELDS:
            for calls in (False, True):
                before, here, after = self._thinking(field, calls=calls, text="" if calls else "x").partition(
                    "probe_thought"
                )
                if not here:
                    continue
                if self.format is not None and self.format.split is not None:
                    return field, None
                if (delimiters := find_delimiters(before, after)) is not None:
                    return field, delimiters
        return None, next((pair for pair in KNOWN if pair.close in known), None)

    def _joins_thought(self) -> bool:
        if self.field is None:
            return False
        both = self._thinking(self.field, calls=True, text="probe_text")
        return "probe_value" in self._thinking(self.field, calls=True, text="") and not (
            "probe_text" in both and "probe_thought" in both
        )


def _probe_call(style: CallStyle, index: int = 0) -> dict[str, Any]:
    return {**style.write(_CALL), "id": style.ids.example("probe_tool", index)}


def after_prompt(prompt: str, text: str) -> str:
    """The part of the rendered ``text`` that is not in the ``prompt`` of its last response, from the start of a tag."""
    shared = text[: sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(prompt, text, strict=False)))]
    inside = [at for opening, closing in ("<>", "[]") if (at := shared.rfind(opening)) > shared.rfind(closing)]
    return text[min(inside, default=len(shared)) :]


def _special_at_start(specials: Sequence[str], text: str) -> str | None:
    return max((s for s in specials if text.startswith(s)), key=len, default=None)


def _reads(form: ToolFormat, written: str, count: int = 1) -> bool:
    """Whether ``form`` reads ``count`` probed calls in ``written``."""
    calls = form.read(written.strip())[1]
    return [(call.name, call.arguments) for call in calls] == [("probe_tool", _ARGUMENTS)] * count
