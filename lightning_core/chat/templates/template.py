"""Renders a model's chat template.

Templates differ in their support for tools (as an argument, in the system message, or not at all), tool calls (arguments as an object or
as text, one call or several), tool results, system messages and reasoning. ``template_probe.py`` detects it; unsupported content is
written into the text of messages.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from lightning_core.chat.messages import extend_system
from lightning_core.chat.templates.raw_template import RawTemplate
from lightning_core.chat.templates.raw_template import Tokenizer as Tokenizer
from lightning_core.chat.templates.reasoning import Delimiters
from lightning_core.chat.templates.roles import fold_system, order_roles, write_names, write_systems, written
from lightning_core.chat.templates.shapes import find_loss, shapes
from lightning_core.chat.templates.teacher_response import continuation
from lightning_core.chat.templates.template_probe import TOOL, CallStyle, Traits
from lightning_core.chat.tool_calls.call_ids import IdStyle
from lightning_core.chat.tool_calls.call_results import arrange_results
from lightning_core.chat.tool_calls.call_syntax import CallSyntax, find_syntax
from lightning_core.chat.tool_calls.tool_definitions import in_forms
from lightning_core.chat.tool_calls.tool_formats import HERMES, ToolCall, ToolFormat
from lightning_core.errors import ConfigError, PolicyRequestError

_TOOLS_PROMPT = (
    "You may call functions. The available ones, one JSON schema a line:\n<tools>\n{tools}\n</tools>\n"
    "To call one, answer with {example}, once for each call."
)


class ChatTemplate:
    """Renders messages, with arguments as objects, and knows the format of responses.

    ``variables``: of the template, for all renderings. Raises `ConfigError` if the tokenizer has no template, or one that fails (see
    `RawTemplate`), has no end of a response (see `Traits`), drops text of messages, or writes calls that cannot be read. `render` is
    thread-safe with a fast tokenizer; with others, all of their users take turns (``Encoder.lock``).
    """

    def __init__(
        self, tokenizer: Tokenizer, specials: Sequence[str], variables: Mapping[str, Any] | None = None
    ) -> None:
        self.raw = RawTemplate(tokenizer, variables or {})
        self._traits = traits = Traits(self.raw, specials)
        self.tool_format: ToolFormat = traits.format or HERMES
        """The format of tool calls in responses."""
        self.ids: IdStyle = traits.ids
        """The ids of calls that the template accepts."""
        self.enders = traits.enders
        """The special tokens that end a response, as text."""
        self.stops = traits.enders | traits.call_enders
        """`enders`, and the special tokens that end a response with tool calls."""
        self.delimiters: Delimiters | None = traits.delimiters
        """The texts around reasoning; None if responses have none, or the tool format splits it off."""
        self.reasoning = (
            self.tool_format.thought if self.delimiters is None else (self.delimiters.open, self.delimiters.close)
        )
        """The texts around the reasoning of a response; None if it has none."""
        self.reasons = self.delimiters is not None or self.tool_format.split is not None
        """Whether responses may start with reasoning."""
        self.has_field = traits.field is not None
        """Whether messages have a field for reasoning."""
        self._proven: frozenset[Hashable] = frozenset()
        """Shapes of conversations that the template renders without a loss."""
        self._check_for_losses()
        self.call_syntax: CallSyntax | None = find_syntax(self._probe_response, self.ids.example)
        """The texts around tool calls in responses; None if they are not regular."""

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None,
        *,
        generate: bool,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The text of ``messages``. ``generate``: with the generation prompt. ``variables``: of the template, for this text.

        Raises `PolicyRequestError` if the template raises an error, or loses a text of messages.
        """
        text = self._apply(messages, tools, generate=generate, variables=variables)
        if new := shapes(messages, tools=bool(tools), generate=generate) - self._proven:
            render = partial(self._apply, tools=tools and [TOOL], generate=generate, variables=variables)
            if (loss := find_loss(messages, partial(self._arrange, with_tools=bool(tools)), render)) is not None:
                raise PolicyRequestError(
                    f"the chat template of {self.raw.name} {loss}. Send these messages in another order or under another role, or set "
                    "tokenizer.chat_template to a template that renders them",
                    param="messages",
                )
            self._proven |= new
        return text

    def _apply(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None,
        *,
        generate: bool,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        roles = self._traits.roles[bool(tools)]
        ready = self._write_out([{**m} for m in messages], with_tools=bool(tools))
        ready = write_systems(write_names(ready, roles), roles)
        declares = self._traits.declares if tools else None
        if tools and declares is None:
            ready = extend_system(ready, self._spell_out(tools))
        elif tools and declares == "system":
            listed = json.dumps([t.get("function", t) for t in tools], ensure_ascii=False)
            first, rest = (ready[0], ready[1:]) if ready[0]["role"] == "system" else ({"content": ""}, ready)
            ready = [{"role": "system", "content": first["content"], "tools": listed}, *rest]
        if not roles.system and ready[0]["role"] == "system":
            ready = fold_system(ready)
        more = self.raw.with_variables(variables) if variables else {}
        if tools and declares == "xml_tools":
            more["xml_tools"] = list(tools)
        try:
            return self.raw.apply(
                order_roles(ready, roles, generate=generate),
                tools=in_forms(tools, self._traits.forms) if tools and declares == "tools" else None,
                generate=generate,
                **more,
            )
        except Exception as error:  # templates may raise anything: errors of jinja2, TypeError, their own
            raise PolicyRequestError(
                f"the chat template of {self.raw.name} cannot render these messages: {error}", param="messages"
            ) from error

    def _arrange(self, messages: list[dict[str, Any]], *, with_tools: bool) -> list[dict[str, Any]]:
        """``messages`` with results behind their calls."""
        style = self._traits.styles[with_tools]
        one_call = style is not None and self.tool_format.one_call and not style.several
        return arrange_results(messages, self.ids, one_call=one_call)

    def _write_out(self, messages: list[dict[str, Any]], *, with_tools: bool) -> list[dict[str, Any]]:
        """Messages as the template supports them; the rest is written into their text."""
        style = self._traits.styles[with_tools]
        messages = self._arrange(messages, with_tools=with_tools)
        orphans, splits = self._traits.roles[with_tools].orphans, style is not None and not style.lasts
        last = max(
            (i for i, m in enumerate(messages) if m["role"] == "assistant" and not m.get("tool_calls")), default=0
        )
        ready: list[dict[str, Any]] = []
        for i, m in enumerate(messages):
            if m.get("tool_calls") and m["content"] and splits and i < last:
                ready.append({"role": m["role"], "content": m["content"]})
                m |= {"content": "", "part": True}
            if thought := m.pop("reasoning_content", None):
                self._write_thought(m, thought)
            if m.get("tool_calls"):
                ready += self._write_calls(m, style)
                style = style if style is None or style.again else replace(style, with_text=False)
            elif m["role"] == "tool" and not (self._traits.results and (orphans or not m.get("orphan"))):
                ready.append(written("tool_response", m["content"]))
            else:
                ready.append(m)
        return ready

    def _write_thought(self, message: dict[str, Any], thought: str) -> None:
        field, delimiters = self._traits.field, self.delimiters
        if field is None:
            if delimiters is not None:
                message["content"] = delimiters.write(thought, message["content"])
        elif self._traits.joins_thought and message.get("tool_calls") and message["content"]:
            message[field] = f"{thought}\n{message['content']}"
            message["content"] = ""
        else:
            message[field] = thought

    def _write_calls(self, message: dict[str, Any], style: CallStyle | None) -> list[dict[str, Any]]:
        calls, content = message["tool_calls"], message["content"]
        plain = {k: v for k, v in message.items() if k != "tool_calls"}
        fits = style is not None and (len(calls) == 1 or style.several)
        if (
            style is None
            or not fits
            or (content and not (style.with_text and style.empty is not None) and not style.apart)
        ):
            read = [ToolCall(c["function"]["name"], c["function"].get("arguments") or {}) for c in calls]
            written = self.tool_format.write(read)
            return [{**plain, "content": f"{content}\n{written}" if content else written}]
        given = [style.write(call) for call in calls]
        if content and not style.with_text:
            thoughtless = {k: v for k, v in message.items() if k in ("role", "name")}
            return [plain, {**thoughtless, "content": style.empty, "tool_calls": given, "part": True}]
        return [{**message, "content": content or style.empty, "tool_calls": given}]

    def _spell_out(self, tools: Sequence[Any]) -> str:
        example = self.tool_format.write([ToolCall("NAME", "OBJECT")])
        if "OBJECT" not in example:
            example = self.tool_format.write([ToolCall("NAME", {"PARAMETER": "VALUE"})])
        for placeholder, shown in (
            ('"NAME"', "<name>"), ("NAME", "<name>"), ('"OBJECT"', "<object>"), ("PARAMETER", "<parameter>"), ("VALUE", "<value>"),
        ):  # fmt: skip
            example = example.replace(placeholder, shown)
        listed = "\n".join(json.dumps(t.get("function", t), ensure_ascii=False) for t in tools)
        return _TOOLS_PROMPT.format(tools=listed, example=example)

    def _probe_response(self, calls: Sequence[Mapping[str, Any]]) -> str:
        """The text of a response with ``calls``, without reasoning and the token that ends it."""
        prompt = [_USER]
        whole = [*prompt, {"role": "assistant", "content": "", "tool_calls": list(calls)}]
        longer = [*whole, *({"role": "tool", "content": "x", "tool_call_id": call["id"]} for call in calls)]
        function = {"name": calls[0]["function"]["name"], "description": "probe", "parameters": {"type": "object"}}

        def text(messages: Sequence[Mapping[str, Any]], *, generate: bool = False) -> str:
            return self._apply(messages, [{"type": "function", "function": function}], generate=generate)

        stops = sorted(self.stops)
        try:
            written = continuation(text(prompt, generate=True), text(whole), stops, lambda: text(longer))
        except PolicyRequestError:
            read = [ToolCall(call["function"]["name"], call["function"]["arguments"], call["id"]) for call in calls]
            return self.tool_format.write(read)
        for stop in stops:
            written = written.removesuffix(stop)
        closing = self.reasoning[1] if self.reasoning else ""
        # The template may write an empty thought.
        return written.rpartition(closing)[2].lstrip("\n") if closing and closing in written else written

    def _check_for_losses(self) -> None:
        """Raise ValueError if the rendered text lacks a part of a conversation."""
        for messages in _CONVERSATIONS:
            try:
                text = self._apply(messages, None, generate=True)
            except PolicyRequestError:
                continue  # not silent: a request with such messages gets the error
            for name, part in _parts(messages):
                if part not in text:
                    raise ConfigError(
                        f"the chat template of the tokenizer drops {name}, as a string and as content parts: the model would not "
                        "see it. Set tokenizer.chat_template to a template that renders it"
                    )


def _call(index: int) -> dict[str, Any]:
    function = {"name": "probe_tool", "arguments": {"probe_key": f"probe_value_{index}"}}
    return {"id": f"call_{index}", "type": "function", "function": function}


def _result(index: int) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"call_{index}", "content": f"probe_result_{index}"}


_USER = {"role": "user", "content": "probe_user"}
_CONVERSATIONS: list[list[dict[str, Any]]] = [
    [_USER],
    [{"role": "system", "content": "probe_system"}, _USER],
    [_USER, {"role": "assistant", "content": "probe_answer"}, {"role": "user", "content": "probe_more"}],
    [_USER, {"role": "assistant", "content": "probe_text", "tool_calls": [_call(0)]}, _result(0)],
    [_USER, {"role": "assistant", "content": "", "tool_calls": [_call(0), _call(1)]}, _result(0), _result(1)],
]


def _parts(messages: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """The texts of a conversation that must be in its prompt, with names for an error."""
    names = {
        "user": "the text of the user",
        "system": "the system message",
        "assistant": "the text of the assistant",
        "tool": "the result of a tool",
    }
    parts = [(names[m["role"]], m["content"]) for m in messages if m["content"]]
    calls = [call for m in messages for call in m.get("tool_calls", ())]
    return [*parts, *(("a tool call", call["function"]["arguments"]["probe_key"]) for call in calls)]
