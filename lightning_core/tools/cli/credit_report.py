"""The report of ``lightning-rl credit``: stored credit beside recomputed credit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Group
from rich.text import Text

from lightning_core.credit import CreditRules
from lightning_core.tools.cli.console import Column, make_table
from lightning_core.tools.runs.recredit import AgentChange, Change, compare_agents, most_changed


def make_report(changes: Sequence[Change], rules: Mapping[str, CreditRules], steps: int, calls: int) -> Group:
    """The changes by agent, and the ``calls`` calls that change most."""
    title = f"{len(changes)} calls of {steps} step{'s' * (steps != 1)}, as trained and with {_describe(rules)}"
    agents = make_table(
        [
            Column("agent", cut=True),
            *_numeric("calls", "mean |A|", "now", "correlation", "other sign", "from 0", "to 0"),
        ],
        (_agent_row(change) for change in compare_agents(changes)),
    )
    changed = most_changed(changes, calls)
    if not changed:
        return Group(_line(title), "", agents)
    table = make_table(
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
    return Group(_line(title), "", agents, "", table, "show one: lightning-rl trace RUN --rollout N")


def _numeric(*titles: str) -> list[Column]:
    return [Column(title, "right") for title in titles]


def _line(text: str) -> Text:
    return Text(text, overflow="fold")


def _describe(rules: Mapping[str, CreditRules]) -> str:
    def describe(r: CreditRules) -> str:
        return f"rewards: {r.reward_rule.name}, advantage: {r.advantage_rule.name}"

    if len(rules) == 1:
        return describe(*rules.values())
    return "; ".join(f"{name}: {describe(r)}" for name, r in rules.items())


def _agent_row(change: AgentChange) -> Sequence[str]:
    correlation = "–" if change.correlation is None else f"{change.correlation:.3f}"
    counts = map(str, (change.flipped, change.from_zero, change.to_zero))
    agent = "all" if change.agent is None else change.agent
    return (agent, str(change.calls), f"{change.before:.3f}", f"{change.after:.3f}", correlation, *counts)
