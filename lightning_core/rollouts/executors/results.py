"""Results of agents and reward functions as plain data: converting them runs code of the agent, which the runner never does."""

from __future__ import annotations

import json
import math
from numbers import Real
from typing import Any

import numpy as np

from lightning_core.errors import text_of
from lightning_core.rollouts.executors.executor import Shown

_MAX_SHOWN = 300
_MAX_ANSWER = 10_000


def dump(value: Any) -> dict[str, Any]:
    """``value`` as JSON: a number, null, or its repr."""
    if value is None or isinstance(value, bool):
        return {"plain": value}
    if isinstance(value, (Real, np.bool_)) or hasattr(value, "__float__"):  # such as a tensor of one element
        try:
            return {"plain": float(value)}
        except OverflowError:  # an integer or a fraction beyond float64
            return {"plain": math.inf}
        except Exception:  # noqa: BLE001 - code of the agent
            return {"shown": text_of(value, repr)[:_MAX_SHOWN]}
    return {"shown": text_of(value, repr)[:_MAX_SHOWN]}


def load(data: dict[str, Any] | None) -> Any:
    """The number, None or `Shown` that `dump` wrote; None for None."""
    if data is None:
        return None
    return data["plain"] if "plain" in data else Shown(data["shown"])


def to_answer(value: Any) -> str | None:
    """``value`` as JSON; None if JSON has no equal value, or if it is long."""
    try:
        text = json.dumps(value)
        return text if len(text) <= _MAX_ANSWER and json.loads(text) == value else None
    except Exception:  # noqa: BLE001 - code of the agent
        return None
