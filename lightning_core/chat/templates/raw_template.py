"""Applies a tokenizer's own chat template, with its variables."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

from lightning_core.errors import ConfigError, PolicyRequestError

RESERVED = frozenset({
    "add_generation_prompt", "chat_template", "continue_final_message", "conversation", "max_length", "messages", "padding",
    "return_assistant_tokens_mask", "return_dict", "return_tensors", "sanitize_control_tokens", "tokenize", "tokenizer_kwargs", "tools",
    "truncation", "xml_tools",
})  # fmt: skip
"""Arguments of ``apply_chat_template`` that are not variables of a template, and those that are set here."""


_USER: dict[str, Any] = {"role": "user", "content": "x"}
_SHORT: list[list[dict[str, Any]]] = [
    [_USER],
    [{"role": "user", "content": [{"type": "text", "text": "x"}]}],
    [{"role": "system", "content": "x"}, _USER],
    [_USER, {"role": "assistant", "content": "x"}, _USER],
]
"""The shortest conversations; a template that cannot render any is damaged."""


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


class RawTemplate:
    """The unmodified chat template of the model.

    ``variables``: for all renderings. Raises `ConfigError` if the tokenizer has no template, or one with a syntax error, or the template
    does not have one of the variables or renders no message. Thread-safe with a fast tokenizer; with others, all of their users take turns
    (``Encoder.lock``).
    """

    def __init__(self, tokenizer: Tokenizer, variables: Mapping[str, Any]) -> None:
        text = tokenizer.chat_template
        if not text:
            raise ConfigError(
                "the tokenizer has no chat template; use an instruction-tuned model or set tokenizer.chat_template"
            )
        self.text = text if isinstance(text, str) else "\n".join(text.values())
        self._tokenizer = tokenizer
        self._variables = dict(variables)
        self._parts: frozenset[str] = frozenset()
        for name in variables:
            if name in RESERVED:
                raise ConfigError(f"chat_template_kwargs.{name} is set by Lightning; remove it")
            if not self.has_variable(name):
                raise ConfigError(
                    f"chat_template_kwargs.{name} is not a variable of the model's chat template; "
                    "remove it or correct its name"
                )
        self._check_renders([None] if isinstance(text, str) else list(text))
        self._parts = self._roles_with_parts()

    def _check_renders(self, names: list[str | None]) -> None:
        """Raise `ConfigError` for a syntax error in a template, or if the first of ``names`` raises for every message."""
        for name in names:
            chosen: dict[str, Any] = {} if name is None else {"chat_template": name}
            errors: list[Exception] = []
            for messages in _SHORT:
                try:
                    self.apply(messages, generate=True, **chosen)
                except Exception as error:  # noqa: BLE001 - templates may raise anything
                    errors.append(error)
            wrong = [error for error in errors if type(error).__name__ == "TemplateSyntaxError"]
            if len(errors) < len(_SHORT) or (not wrong and name not in (None, "default")):
                continue
            error = [*wrong, *errors][0]
            line = f" in line {getattr(error, 'lineno', '?')}" if wrong else ""
            raise ConfigError(
                f"the chat template {f'{name!r} ' if name else ''}of the tokenizer "
                f"{'has a syntax error' if wrong else 'renders no message'}{line}: {type(error).__name__}: {error} Correct "
                "chat_template.jinja, or set tokenizer.chat_template"
            ) from error

    @property
    def name(self) -> str:
        """The name or folder of the tokenizer; "the model" if it has none."""
        return getattr(self._tokenizer, "name_or_path", "") or "the model"

    @property
    def eos(self) -> str | None:
        """The tokenizer's end of a text."""
        return getattr(self._tokenizer, "eos_token", None)

    def has_variable(self, name: str) -> bool:
        """Whether the template contains ``name`` as a word."""
        return re.search(rf"(?<![\w.'\"]){re.escape(name)}\b", self.text) is not None

    def apply(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[Any] | None = None,
        generate: bool = False,
        **variables: Any,
    ) -> str:
        """The rendered text. ``generate``: with the generation prompt. Raises any error that the template raises."""
        if self._parts:
            messages = [
                {**m, "content": _as_parts(m.get("content"))} if m["role"] in self._parts else m for m in messages
            ]
        return self._tokenizer.apply_chat_template(
            messages, tools=tools, add_generation_prompt=generate, tokenize=False, **{**self._variables, **variables}
        )

    def attempt(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[Any] | None = None,
        generate: bool = False,
        **variables: Any,
    ) -> str:
        """The rendered text; empty if the template raises an error."""
        try:
            return self.apply(messages, tools=tools, generate=generate, **variables)
        except Exception:  # noqa: BLE001 - templates may raise anything: errors of jinja2, TypeError, their own
            return ""

    def with_variables(self, variables: Mapping[str, Any]) -> dict[str, Any]:
        """``variables`` of one request, as arguments of `apply`. Raises `PolicyRequestError` for reserved names."""
        for name in variables:
            if name in RESERVED:
                raise PolicyRequestError(
                    f"chat_template_kwargs.{name} cannot be set by a request", param="chat_template_kwargs"
                )
        return {name: value for name, value in variables.items() if self.has_variable(name)}

    def _roles_with_parts(self) -> frozenset[str]:
        """The roles whose content must be a list of parts: templates of vision models lose the text of a string."""
        user, probe = {"role": "user", "content": "x"}, "probe_text"

        def lost(role: str, content: Any) -> bool:
            message = {"role": role, "content": content}
            conversation = {"user": [message], "system": [message, user], "assistant": [user, message]}[role]
            return probe not in self.attempt(conversation)

        roles = {
            role for role in ("user", "system", "assistant") if lost(role, probe) and not lost(role, _as_parts(probe))
        }
        return frozenset(roles | {"tool"} if "user" in roles else roles)


def in_order(text: str, marks: Sequence[str]) -> bool:
    """Whether ``text`` has each of ``marks`` once, in this order."""
    places = [text.find(mark) for mark in marks]
    return -1 not in places and places == sorted(places) and all(text.count(mark) == 1 for mark in marks)


def _as_parts(content: Any) -> Any:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content
