"""Automatic intermediate rewarding (AIR; arXiv 2508.03680, §3.4).

Outcomes of tools, truncation, lengths and response formats become rewards of the calls that caused them. `tool_outcomes` matches each
tool's outcome to the call that requested the tool.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from lightning_core.capture.selectors import find_selector
from lightning_core.config.signal_sections import signal_rewards
from lightning_core.config.types import Section
from lightning_core.credit.episode import Episode
from lightning_core.credit.precision import are_close, sum_of
from lightning_core.records.statistics.solved import is_solved
from lightning_core.signals.air.keys import Air, CallReward, air_of, import_rules
from lightning_core.signals.air.tool_outcomes import ToolOutcome, tool_outcomes
from lightning_core.trace import Call, Reward, check_reward

_PREFIX = "air: "


def with_air(
    episodes: Sequence[Episode],
    air: Air,
    functions: Sequence[CallReward] = (),
    *,
    solved: float,
    added: Collection[str] = (),
) -> list[Episode]:
    """``episodes`` plus the intermediate rewards of their trained calls, except rewards of 0.

    A fork also gets the rewards of the calls that it repeats: its return is compared with the rollout's where they were sampled.

    ``functions``: of ``air.rules``. ``solved``: see ``eval.solved``. ``added``: names of rewards that do not count as success; see
    `signal_rewards`.
    """
    shaped = {
        task for task, attempts in _by_task(episodes).items() if not air.gate or _one_succeeds(attempts, solved, added)
    }
    return [
        replace(e, rewards=(*e.rewards, *_rewards(e, air, functions, is_shaped=e.task_id in shaped))) for e in episodes
    ]


def with_air_of(credit: Section, episodes: Sequence[Episode], *, solved: float) -> Sequence[Episode]:
    """``episodes`` with the rewards of ``credit.air``, if it is set. Raises `ConfigError` as `import_rules` does."""
    air = air_of(credit)
    if air is None:
        return episodes
    return with_air(episodes, air, import_rules(air), solved=solved, added=signal_rewards(credit))


def count_alone(episodes: Sequence[Episode]) -> tuple[int, int]:
    """Of ``episodes`` with their intermediate rewards: the tasks at which the sums of the attempts' rewards differ by these
    alone, and the tasks with several attempts."""
    groups = [attempts for attempts in _by_task(episodes).values() if len(attempts) > 1]
    alone = [
        group for group in groups if _are_equal(_others(e) for e in group) and not _are_equal(e.rewards for e in group)
    ]
    return len(alone), len(groups)


def air_sum(episodes: Sequence[Episode], policy: str | None = None) -> float:
    """The sum of the rewards that `with_air` added to the transitions of ``episodes``. ``policy``: only its own; None: all."""
    calls = {t.call for e in episodes for t in e.transitions if policy in (None, t.policy)}
    return math.fsum(r.value for e in episodes for r in e.rewards if r.call in calls and _is_air(r))


def _by_task(episodes: Sequence[Episode]) -> dict[str, list[Episode]]:
    found: dict[str, list[Episode]] = {}
    for e in episodes:
        found.setdefault(e.task_id, []).append(e)
    return found


def _one_succeeds(attempts: Sequence[Episode], solved: float, added: Collection[str]) -> bool:
    """Whether one of ``attempts`` is solved, or better than another; their rewards may be of any scale."""
    rewards = [[r for r in e.rewards if r.name not in added] for e in attempts]
    best = max(math.fsum(r.value for r in own) for own in rewards)
    return not _are_equal(rewards) or is_solved(best, solved)


def _are_equal(rewards: Iterable[Sequence[Reward]]) -> bool:
    """Whether the sums of the attempts' ``rewards`` differ by rounding only."""
    sums = [sum_of(r.value for r in own) for own in rewards]
    return are_close((own.value for own in sums), magnitude=max(own.size for own in sums))


def _others(episode: Episode) -> Sequence[Reward]:
    return [r for r in episode.rewards if not _is_air(r)]


def _is_air(reward: Reward) -> bool:
    return (reward.name or "").startswith(_PREFIX)


def _rewards(episode: Episode, air: Air, functions: Sequence[CallReward], *, is_shaped: bool) -> Iterator[Reward]:
    by_call: dict[str, list[ToolOutcome]] = {}
    for outcome in tool_outcomes(episode.trace):
        if outcome.call is not None:
            by_call.setdefault(outcome.call, []).append(outcome)
    calls = {call.id: call for call in episode.trace.calls}
    for call in [*(calls[t.call] for t in episode.transitions), *episode.repeated]:
        outcomes = by_call.get(call.id, [])
        found = [(f"tool {o.tool} {o.status}", _tool_reward(o, air)) for o in outcomes]
        found += _shaping(call, air) if is_shaped else ()
        found += [
            (getattr(function, "__name__", "rule"), rule.weight * check_reward(function(call, outcomes)))
            for rule, function in zip(air.rules, functions, strict=True)
        ]
        for name, value in found:
            if value:
                yield Reward(value=value, call=call.id, name=f"{_PREFIX}{name}")


def _shaping(call: Call, air: Air) -> Iterator[tuple[str, float]]:
    """The rewards of the response's length and form, by name."""
    yield "truncated", air.truncated * _overlong(call, air.truncated_ramp)
    yield "token_cost", -air.token_cost * (0 if call.output_ids is None else len(call.output_ids))
    yield "call_cost", -air.call_cost
    text = _text(call)
    for rule in air.formats:
        if rule.agents is None or find_selector(rule.agents, call.agent or "") is not None:
            yield "format", rule.weight if re.search(rule.pattern, text, re.DOTALL) else 0.0


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
