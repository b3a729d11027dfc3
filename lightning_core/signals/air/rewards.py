"""Automatic intermediate rewarding (AIR; arXiv 2508.03680, §3.4).

Outcomes of tools, truncation, lengths and response formats become rewards of the calls that caused them. `tool_outcomes` matches each
tool's outcome to the call that requested the tool.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from lightning_core.capture.selectors import find_selector
from lightning_core.config.types import Section
from lightning_core.credit.episode import Episode
from lightning_core.signals.air.keys import Air, CallReward, air_of, import_rules
from lightning_core.signals.air.tool_outcomes import ToolOutcome, tool_outcomes
from lightning_core.trace import Call, Reward, check_reward

_PREFIX = "air: "


def with_air(episode: Episode, air: Air, functions: Sequence[CallReward] = ()) -> Episode:
    """``episode`` plus the intermediate rewards of its trained calls, except rewards of 0. ``functions``: of ``air.rules``.

    A fork also gets the rewards of the calls that it repeats: its return is compared with the rollout's where they were sampled.
    """
    return replace(episode, rewards=(*episode.rewards, *_rewards(episode, air, functions)))


def with_air_of(credit: Section, episodes: Sequence[Episode]) -> Sequence[Episode]:
    """``episodes`` with the rewards of ``credit.air``, if it is set. Raises `ConfigError` as `import_rules` does."""
    air = air_of(credit)
    if air is None:
        return episodes
    functions = import_rules(air)
    return [with_air(episode, air, functions) for episode in episodes]


def air_sum(episodes: Sequence[Episode], policy: str | None = None) -> float:
    """The sum of the rewards that `with_air` added to the transitions of ``episodes``. ``policy``: only its own; None: all."""
    calls = {t.call for e in episodes for t in e.transitions if policy in (None, t.policy)}
    return math.fsum(
        r.value for e in episodes for r in e.rewards if r.call in calls and (r.name or "").startswith(_PREFIX)
    )


def _rewards(episode: Episode, air: Air, functions: Sequence[CallReward]) -> Iterator[Reward]:
    by_call: dict[str, list[ToolOutcome]] = {}
    for outcome in tool_outcomes(episode.trace):
        if outcome.call is not None:
            by_call.setdefault(outcome.call, []).append(outcome)
    calls = {call.id: call for call in episode.trace.calls}
    for call in [*(calls[t.call] for t in episode.transitions), *episode.repeated]:
        outcomes = by_call.get(call.id, [])
        found = [(f"tool {o.tool} {o.status}", _tool_reward(o, air)) for o in outcomes]
        found.append(("truncated", air.truncated * _overlong(call, air.truncated_ramp)))
        length = 0 if call.output_ids is None else len(call.output_ids)
        found += [("token_cost", -air.token_cost * length), ("call_cost", -air.call_cost)]
        text = _text(call)
        found += [
            ("format", rule.weight)
            for rule in air.formats
            if (rule.agents is None or find_selector(rule.agents, call.agent or "") is not None)
            and re.search(rule.pattern, text, re.DOTALL)
        ]
        found += [
            (getattr(function, "__name__", "rule"), rule.weight * check_reward(function(call, outcomes)))
            for rule, function in zip(air.rules, functions, strict=True)
        ]
        for name, value in found:
            if value:
                yield Reward(value=value, call=call.id, name=f"{_PREFIX}{name}")


def _overlong(call: Call, ramp: int) -> float:
    """1 for a response that reached its limit, else the fraction of the ``ramp`` before the limit that it used."""
    if call.finish_reason == "length":
        return 1.0
    if not ramp or call.max_tokens is None or call.output_ids is None:
        return 0.0
    return min(1.0, max(0.0, (len(call.output_ids) - (call.max_tokens - ramp)) / ramp))


def _tool_reward(outcome: ToolOutcome, air: Air) -> float:
    if outcome.status == "ok":
        return air.tool_ok
    if outcome.status == "unused":
        return air.tool_unused
    error = outcome.error or ""
    return next((value for pattern, value in air.tool_errors.items() if re.search(pattern, error)), air.tool_error)


def _text(call: Call) -> str:
    content: Any = (call.response or {}).get("content")
    return content if isinstance(content, str) else ""
