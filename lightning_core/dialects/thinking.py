"""Fields that ask for more or less reasoning, as variables of chat templates.

Templates name them differently: ``enable_thinking`` (Qwen, GLM), ``thinking`` (DeepSeek, Granite), ``reasoning_effort`` (gpt-oss). A field
sets each that it means; a template ignores those that it does not use.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_core.chat.json_text import show_json
from lightning_core.dialects.fields import integer, text
from lightning_core.errors import PolicyRequestError

Settings = Mapping[str, Mapping[str, Any]]
"""Variables of the chat template by the path of the field that sets them."""

_TYPES = {"enabled": True, "disabled": False, "adaptive": None, "between_tools": None, "auto": None}
"""Whether to reason, by the type of ``thinking``; None: the model decides."""


def effort(body: Mapping[str, Any], name: str, path: str = "") -> Settings:
    """The settings of an effort, such as ``low``; ``none`` is no reasoning. ``path``: of ``body`` in the request."""
    value = text(body, name, path)
    if value is None:
        return {}
    variables = {"reasoning_effort": value, **(_switch(on=False) if value == "none" else {})}
    return {f"{path}.{name}" if path else name: variables}


def thinking(body: Mapping[str, Any]) -> Settings:
    """The settings of ``thinking``, an object with a type. Raises `PolicyRequestError` for other values."""
    value = body.get("thinking")
    if value is None:
        return {}
    kind = value.get("type") if isinstance(value, Mapping) else value
    if not isinstance(value, Mapping) or not (kind is None or (isinstance(kind, str) and kind in _TYPES)):
        path = "thinking.type" if isinstance(value, Mapping) else "thinking"
        raise PolicyRequestError(
            f"{path} is {show_json(kind)}; expected {'one of' if isinstance(value, Mapping) else 'an object with a type of'} "
            f"{list(_TYPES)!r}",
            param=path,
        )
    on = None if kind is None else _TYPES[kind]
    return {} if on is None else {"thinking.type": _switch(on=on)}


def switch(body: Mapping[str, Any], name: str, *, on: bool | None) -> Settings:
    """The settings of the field ``name`` that asks for reasoning or none; empty if ``body`` does not set it, or ``on`` is None."""
    return {} if on is None or body.get(name) is None else {name: _switch(on=on)}


def google_thinking(config: Mapping[str, Any], path: str) -> Settings:
    """The settings of a thinking configuration of Google's API at ``path``. A budget of -1 is the model's own."""
    name = f"{path}.thinkingBudget"
    budget = integer({name: config.get("thinkingBudget")}, name, -1)
    level = text(config, "thinkingLevel", path)
    known = None if level in (None, "THINKING_LEVEL_UNSPECIFIED") else level.lower()
    return {
        **effort({"thinkingLevel": known}, "thinkingLevel", path),
        **switch({name: budget}, name, on=None if budget in (None, -1) else budget > 0),
    }


def _switch(*, on: bool) -> dict[str, bool]:
    return {"enable_thinking": on, "thinking": on}
