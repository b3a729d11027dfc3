"""Results of agents and reward functions as plain data: converting them runs code of the agent, which the runner never does."""

from __future__ import annotations

import json
from typing import Any

from lightning_core.errors import as_number, text_of
from lightning_core.rollouts.executors.executor import Shown

_MAX_SHOWN = 300
_MAX_ANSWER = 10_000


def dump(value: Any) -> dict[str, Any]:
    """``value`` as JSON: a number, null, or its repr."""
    if value is None or isinstance(value, bool):
        return {"plain": value}
    number = as_number(value)
    return (
        {"shown": text_of(value, repr)[:_MAX_SHOWN], "type": type(value).__name__}
        if number is None
        else {"plain": number}
    )


def load(data: dict[str, Any] | None) -> Any:
    """The number, None or `Shown` that `dump` wrote; None for None."""
    if data is None:
        return None
    return data["plain"] if "plain" in data else Shown(data["shown"], data["type"])


def to_answer(value: Any) -> str | None:
    """``value`` as JSON; None if JSON has no equal value, or if it is long."""
    try:
        text = json.dumps(value)
        return text if len(text) <= _MAX_ANSWER and json.loads(text) == value else None
    except Exception:  # noqa: BLE001 - code of the agent
        return None
