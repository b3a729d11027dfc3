"""The arms of each agent compared: requests, errors, latency, tokens, cost and rewards."""

from __future__ import annotations

import sqlite3
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import groupby
from math import isnan, nan, sqrt
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np

from lightning_core.errors import ConfigError
from lightning_core.records.statistics.intervals import Estimate, confidence_interval
from lightning_core.records.statistics.prices import Prices
from lightning_core.tools.switch.store import DISCONNECTED, FILE, is_failure

_MANY = 1000
"""Values from which on the interval is that of the normal distribution: the other one takes time in proportion to them."""
_Z = 1.96


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmRow:
    """What one arm did for one agent."""

    agent: str
    arm: str
    shadow: bool
    calls: int
    failed: int
    """Calls without a response, or with an error; without those that the client left, or that asked for what cannot be answered."""
    left: int
    """Calls that the client left before the response was complete."""
    uncounted: int
    """Answered calls without token counts."""
    conversations: int
    p50: float
    """Median seconds of an answered call."""
    p90: float
    input_tokens: int
    output_tokens: int
    usd: float | None
    """The cost of the calls; None without a price, or if token counts are missing."""
    rated: int
    """Conversations with feedback."""
    reward: Estimate | None
    """The mean over rated conversations of their mean reward."""


def arm_rows(folder: Path, prices: Prices) -> list[ArmRow]:
    """The arms in the record of the switch in ``folder``, by agent. Raises `ConfigError` if there is none."""
    path = folder / FILE
    if not path.is_file():
        raise ConfigError(
            f"no record of a switch at {str(path)!r}; expected the folder that `folder` in its file names"
        )
    with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=30.0)) as database:
        database.row_factory = sqlite3.Row
        calls = database.execute("SELECT * FROM calls ORDER BY agent, arm, shadow").fetchall()
        rewards = database.execute(
            "SELECT agent, arm, shadow, conversation, reward FROM feedback JOIN calls ON calls.id = feedback.call"
        ).fetchall()
    rated: dict[tuple[Any, ...], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rewards:
        rated[row["agent"], row["arm"], row["shadow"]][row["conversation"]].append(row["reward"])
    rows = groupby(calls, key=lambda row: (row["agent"], row["arm"], row["shadow"]))
    return [_row(key, list(own), rated[key], prices) for key, own in rows]


def difference(one: Estimate, other: Estimate) -> Estimate:
    """``one`` - ``other`` of independent samples, with its 95% interval from those of both (Zou and Donner, 2008, "MOVER")."""
    mean = one.mean - other.mean
    if isnan(one.low) or isnan(other.low):
        return Estimate(mean, nan, nan)
    below = sqrt((one.mean - one.low) ** 2 + (other.high - other.mean) ** 2)
    above = sqrt((one.high - one.mean) ** 2 + (other.mean - other.low) ** 2)
    return Estimate(mean, mean - below, mean + above)


def _row(
    key: tuple[str, str, int], calls: Sequence[Any], rated: Mapping[str, Sequence[float]], prices: Prices
) -> ArmRow:
    agent, arm, shadow = key
    answered = [call for call in calls if call["error"] is None]
    p50, p90 = np.percentile([call["seconds"] for call in answered], (50, 90)) if answered else (nan, nan)
    means = [fmean(values) for values in rated.values()]
    return ArmRow(
        agent=agent,
        arm=arm,
        shadow=bool(shadow),
        calls=len(calls),
        failed=sum(is_failure(call["error"], call["status"]) for call in calls),
        left=sum(call["error"] == DISCONNECTED for call in calls),
        uncounted=sum(call["input_tokens"] is None or call["output_tokens"] is None for call in answered),
        conversations=len({call["conversation"] for call in calls}),
        p50=float(p50),
        p90=float(p90),
        input_tokens=sum(call["input_tokens"] or 0 for call in answered),
        output_tokens=sum(call["output_tokens"] or 0 for call in answered),
        usd=_cost(arm, answered, prices),
        rated=len(means),
        reward=_estimate(means) if means else None,
    )


def _cost(arm: str, calls: Sequence[Any], prices: Prices) -> float | None:
    if not calls:
        return None
    total = 0.0
    for call in calls:
        price = prices.of(call["model"] or "", arm)
        if price is None or call["input_tokens"] is None or call["output_tokens"] is None:
            return None
        total += price.cost(call["input_tokens"], call["output_tokens"], call["cached_tokens"] or 0)
    return total


def _estimate(values: Sequence[float]) -> Estimate:
    if len(values) < _MANY:
        return confidence_interval(values)
    mean, error = fmean(values), stdev(values) / sqrt(len(values))
    return Estimate(mean, mean - _Z * error, mean + _Z * error)
