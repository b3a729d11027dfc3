"""The report of ``lightning-rl credit``: stored credit beside recomputed credit."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from rich.console import Group
from rich.text import Text

from lightning_core.cli.console import Column, make_table
from lightning_core.credit import CreditRules
from lightning_core.records.recredit import Change


def make_report(changes: Sequence[Change], rules: Mapping[str, CreditRules], steps: int, calls: int) -> Group:
    """What changes, by agent, and the ``calls`` calls that change most."""
    title = f"{len(changes)} calls of {steps} step{'s' * (steps != 1)}, as trained and with {_describe(rules)}"
    by_agent: dict[str, list[Change]] = {}
    for change in changes:
        by_agent.setdefault(change.trained.agent, []).append(change)
    groups: Mapping[str, Sequence[Change]] = by_agent if len(by_agent) == 1 else {**by_agent, "all": changes}
    agents = make_table(
        [
            Column("agent", cut=True),
            *_numeric("calls", "mean |A|", "now", "correlation", "other sign", "from 0", "to 0"),
        ],
        (_agent_row(agent, group) for agent, group in groups.items()),
    )
    changed = sorted((c for c in changes if c.size > 1e-6), key=lambda c: -c.size)[:calls]
    if not changed:
        return Group(_line(title), "", agents)
    most_changed = make_table(
        [
            Column("rollout", "right"),
            Column("agent", cut=True),
            Column("call"),
            *_numeric("value", "now", "advantage", "now"),
        ],
        (
            (
                str(c.ordinal),
                c.trained.agent,
                c.trained.call,
                *(f"{x:.3f}" for x in (c.trained.reward, c.value, c.trained.advantage, c.advantage)),
            )
            for c in changed
        ),
    )
    return Group(_line(title), "", agents, "", most_changed, "show one: lightning-rl trace RUN --rollout N")


def _numeric(*titles: str) -> list[Column]:
    return [Column(title, "right") for title in titles]


def _line(text: str) -> Text:
    return Text(text, overflow="fold")


def _describe(rules: Mapping[str, CreditRules]) -> str:
    def one(own: CreditRules) -> str:
        return f"rewards: {own.reward_rule.name}, advantage: {own.advantage_rule.name}"

    if len(rules) == 1:
        return one(*rules.values())
    return "; ".join(f"{name}: {one(own)}" for name, own in rules.items())


def _agent_row(agent: str, changes: Sequence[Change]) -> Sequence[str]:
    n = len(changes)
    before, after = sum(abs(c.trained.advantage) for c in changes) / n, sum(abs(c.advantage) for c in changes) / n
    flipped = sum(c.trained.advantage * c.advantage < 0 for c in changes)
    from_zero = sum(not c.trained.advantage and c.advantage != 0 for c in changes)
    to_zero = sum(c.trained.advantage != 0 and not c.advantage for c in changes)
    r = _correlation([c.trained.advantage for c in changes], [c.advantage for c in changes])
    correlation = "–" if r is None else f"{r:.3f}"
    return agent, str(n), f"{before:.3f}", f"{after:.3f}", correlation, str(flipped), str(from_zero), str(to_zero)


def _correlation(a: Sequence[float], b: Sequence[float]) -> float | None:
    mean_a, mean_b = sum(a) / len(a), sum(b) / len(b)
    spread = math.sqrt(sum((x - mean_a) ** 2 for x in a) * sum((y - mean_b) ** 2 for y in b))
    return sum((x - mean_a) * (y - mean_b) for x, y in zip(a, b, strict=True)) / spread if spread else None
