"""Automatic intermediate rewarding (AIR; arXiv 2508.03680, §3.4).

Outcomes of tools, truncation, lengths and response formats become rewards of the calls that caused them. A tool's outcome is matched
to the call that requested the tool by the tool call's id (`signals.py`), never by time.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lightning_core.capture.selectors import find_selector
from lightning_core.credit.episode import Episode
from lightning_core.credit.tool_outcomes import ToolOutcome, tool_outcomes
from lightning_core.trace import Call, Reward, check_reward

CallReward = Callable[[Call, Sequence[ToolOutcome]], float]
"""A custom rule: takes a call and the outcomes of its tool calls, returns the call's reward."""


_PREFIX = "air: "


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatRule:
    """Gives ``weight`` to each response that matches the regular expression ``pattern``."""

    pattern: str
    weight: float
    agents: Sequence[str] | None = None
    """Agents that the rule applies to; None: all trained agents."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Air:
    """The reward of each signal.

    A call with three tool calls gets the rewards of all three outcomes.
    """

    tool_ok: float = 0.0
    tool_error: float = 0.0
    tool_unused: float = 0.0
    """The reward of a tool call that did not run: unknown tool, or unreadable arguments."""
    tool_errors: Mapping[str, float] = field(default_factory=dict[str, float])
    """Rewards by regular expression over the tool's error, such as ``Timeout``. The first match replaces ``tool_error``."""
    truncated: float = 0.0
    """The reward of a response that reached its token limit."""
    truncated_ramp: int = 0
    """Number of tokens before the limit over which ``truncated`` grows linearly from 0 (DAPO, arXiv 2503.14476, eq. 13)."""
    token_cost: float = 0.0
    """Subtracted per sampled token of the call."""
    call_cost: float = 0.0
    """Subtracted per call."""
    formats: Sequence[FormatRule] = ()
    rules: Sequence[tuple[CallReward, float]] = ()
    """Custom rules and the coefficients of their results."""


def with_air(episode: Episode, air: Air, *, policy: str | None = None) -> Episode:
    """``episode`` plus the intermediate rewards of its trained calls, except rewards of 0.

    A fork also gets the rewards of the calls that it repeats (of ``policy``; None: of all policies): its return is compared
    with the return of the rollout where they were sampled.
    """
    repeated = [call for call in episode.repeated if policy in (None, call.model)]
    return replace(episode, rewards=(*episode.rewards, *_rewards(episode, air, repeated)))


def air_sum(episodes: Sequence[Episode]) -> float:
    """The sum of the rewards that `with_air` added to the transitions of ``episodes``."""
    calls = {t.call for e in episodes for t in e.transitions}
    return math.fsum(
        r.value for e in episodes for r in e.rewards if r.call in calls and (r.name or "").startswith(_PREFIX)
    )


def _rewards(episode: Episode, air: Air, repeated: Sequence[Call]) -> Iterator[Reward]:
    by_call: dict[str, list[ToolOutcome]] = {}
    for signal in tool_outcomes(episode.trace):
        if signal.call is not None:
            by_call.setdefault(signal.call, []).append(signal)
    calls = {call.id: call for call in episode.trace.calls}
    for call in [*(calls[t.call] for t in episode.transitions), *repeated]:
        signals = by_call.get(call.id, [])
        found = [(f"tool {s.tool} {s.status}", _of_tool(s, air)) for s in signals]
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
            (getattr(rule, "__name__", "rule"), weight * check_reward(rule(call, signals)))
            for rule, weight in air.rules
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


def _of_tool(signal: ToolOutcome, air: Air) -> float:
    if signal.status == "ok":
        return air.tool_ok
    if signal.status == "unused":
        return air.tool_unused
    error = signal.error or ""
    return next((value for pattern, value in air.tool_errors.items() if re.search(pattern, error)), air.tool_error)


def _text(call: Call) -> str:
    content: Any = (call.response or {}).get("content")
    return content if isinstance(content, str) else ""
