"""``lightning-rl credit RUN --rule …``: credit computed anew on a run's stored traces, beside what it was trained with."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Mapping, Sequence

from lightning_core.cli.trace import as_run_folder
from lightning_core.config import load_config
from lightning_core.config.credit_rules import policy_rules
from lightning_core.credit import Credit, CreditRules, Episode, assign_by_policy
from lightning_core.errors import ConfigError
from lightning_core.records.store import CallCredit, Store
from lightning_core.transitions import trace_to_transitions

_SETTING = re.compile(r"credit\.|policies\.[^=]+\.credit\.")


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("config", metavar="RUN", help="a run's folder, such as runs/latest")
    parser.add_argument("--rule", metavar="NAME", help="short for credit.rewards=NAME")
    parser.add_argument("--step", metavar="N", type=int, help="only the rollouts of this step, from 0; without: of all")
    parser.add_argument("--calls", metavar="N", type=int, default=5, help="list the N calls that change most (5)")


def credit(options: argparse.Namespace) -> int:
    """The command; its exit code."""
    folder = as_run_folder(options.config)
    if folder is None:
        raise ConfigError(f"{options.config!r} is a file; expected a run's folder, such as runs/latest")
    overrides = [*([f"credit.rewards={options.rule}"] if options.rule else []), *options.overrides]
    foreign = next((text for text in overrides if not _SETTING.match(text)), None)
    if foreign is not None:
        raise ConfigError(f"{foreign!r}: rollouts are what they are; expected settings under credit")
    config = load_config(folder / "config.yaml", overrides)
    rules = policy_rules(config)
    if any(own.needs_values for own in rules.values()):
        raise ConfigError(
            f"rewards: {config.credit.rewards} needs a critic's values, and those are there in training only"
        )
    with Store(folder / "store.db", read_only=True) as store:
        steps = sorted({r.step for r in store.rollouts(phase="train")} & {c.step for c in store.credit()})
        if options.step is not None:
            if options.step not in steps:
                raise ConfigError(f"--step {options.step}: the run has credit for the steps {_range(steps)}")
            steps = [options.step]
        changes = [change for step in steps for change in _changes(store, step, rules)]
    if not changes:
        raise ConfigError(f"the run {str(folder)!r} has no credited calls yet")
    print(_report(changes, rules, len(steps), options.calls))
    return 0


class _Change:
    """One call's credit, as trained and as computed now."""

    def __init__(self, ordinal: int, trained: CallCredit, new: Credit) -> None:
        self.ordinal = ordinal
        self.agent = trained.agent
        self.call = trained.call
        self.before, self.after = trained.advantage, new.advantages[trained.call]
        self.value_before, self.value_after = trained.reward, new.values[trained.call]

    @property
    def size(self) -> float:
        return abs(self.after - self.before)


def _changes(store: Store, step: int, rules: Mapping[str, CreditRules]) -> list[_Change]:
    """The calls that one update was made from."""
    trained = {c.call: c for c in store.credit(step=step)}
    agents = {c.agent for c in trained.values()}
    ordinals = {r.id: r.ordinal for r in store.rollouts(step=step, phase="train")}
    episodes: list[Episode] = []
    for rollout in dict.fromkeys(c.rollout for c in trained.values()):
        trace = store.trace(rollout)
        transitions = [t for t in trace_to_transitions(trace, agents=agents) if t.call in trained]
        episodes.append(Episode(trace=trace, transitions=transitions, rewards=trace.rewards))
    new = assign_by_policy(episodes, rules)
    return [_Change(ordinals[c.rollout], c, new) for c in trained.values()]


def _report(changes: Sequence[_Change], rules: Mapping[str, CreditRules], steps: int, calls: int) -> str:
    lines = [
        f"{len(changes)} calls of {steps} step{'s' * (steps != 1)}, as trained and with {_described(rules)}",
        "",
        f"{'agent':24s}{'calls':>7s}{'mean |A|':>10s}{'now':>8s}{'correlation':>13s}{'other sign':>12s}{'from 0':>8s}{'to 0':>7s}",
    ]
    by_agent: dict[str, list[_Change]] = {}
    for change in changes:
        by_agent.setdefault(change.agent, []).append(change)
    groups: Mapping[str, Sequence[_Change]] = by_agent if len(by_agent) == 1 else {**by_agent, "all": changes}
    lines += [_row(agent, some) for agent, some in groups.items()]
    moved = sorted((c for c in changes if c.size > 1e-6), key=lambda c: -c.size)[:calls]
    if moved:
        lines += [
            "",
            f"{'rollout':>7s}  {'agent':22s}{'call':18s}{'value':>8s}{'now':>8s}{'advantage':>11s}{'now':>8s}",
        ]
        lines += [
            f"{c.ordinal:7d}  {c.agent:22s}{c.call:18s}{c.value_before:8.3f}{c.value_after:8.3f}{c.before:11.3f}{c.after:8.3f}"
            for c in moved
        ]
        lines.append("one of them: lightning-rl trace RUN --rollout N")
    return "\n".join(lines)


def _described(rules: Mapping[str, CreditRules]) -> str:
    def one(own: CreditRules) -> str:
        return f"rewards: {own.reward_rule.name}, advantage: {own.advantage_rule.name}"

    if len(rules) == 1:
        return one(*rules.values())
    return "; ".join(f"{name}: {one(own)}" for name, own in rules.items())


def _row(agent: str, changes: Sequence[_Change]) -> str:
    n = len(changes)
    before, after = sum(abs(c.before) for c in changes) / n, sum(abs(c.after) for c in changes) / n
    flipped = sum(c.before * c.after < 0 for c in changes)
    woken, lost = (
        sum(not c.before and c.after != 0 for c in changes),
        sum(c.before != 0 and not c.after for c in changes),
    )
    r = _correlation([c.before for c in changes], [c.after for c in changes])
    shown = "–" if r is None else f"{r:.3f}"
    return f"{agent:24s}{n:7d}{before:10.3f}{after:8.3f}{shown:>13s}{flipped:12d}{woken:8d}{lost:7d}"


def _correlation(a: Sequence[float], b: Sequence[float]) -> float | None:
    mean_a, mean_b = sum(a) / len(a), sum(b) / len(b)
    spread = math.sqrt(sum((x - mean_a) ** 2 for x in a) * sum((y - mean_b) ** 2 for y in b))
    return sum((x - mean_a) * (y - mean_b) for x, y in zip(a, b, strict=True)) / spread if spread else None


def _range(steps: Sequence[int]) -> str:
    return f"{steps[0]} to {steps[-1]}" if steps else "of none"
