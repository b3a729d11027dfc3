"""From the rewards of episodes to one advantage for each call: the whole of LightningRL's credit assignment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from lightning_core.credit.advantage_rules import ADVANTAGE_RULES, AdvantageRule, is_flat, rollouts
from lightning_core.credit.air import Air, with_air
from lightning_core.credit.episode import Episode, Value
from lightning_core.credit.gae import turn_gae
from lightning_core.credit.grouping import GROUP_KEYS, group_values
from lightning_core.credit.reward_rules import REWARD_RULES, RewardRule, broadcast, discounted, immediate
from lightning_core.errors import CreditError
from lightning_core.trace import check_reward

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class CreditRules:
    """How credit is assigned. Raises `CreditError` for a name that is not known, with the known ones."""

    rewards: str | RewardRule = "broadcast"
    """One of `REWARD_RULES` or a function like them; ``gigpo`` or ``gae``."""
    gamma: float = 1.0
    lam: float = 1.0
    """λ of ``gae``."""
    step_weight: float = 1.0
    """ω of ``gigpo``: the weight of the steps' advantages beside the episode's."""
    anchor: str = "anchor"
    """With ``gigpo``: the group key that makes two calls the same step, ``anchor`` or ``anchor-normalised``."""
    advantage: str = "grpo"
    group_by: Sequence[str] = ("task",)
    """A subset of `GROUP_KEYS`."""
    air: Air | None = None

    def __post_init__(self) -> None:
        if isinstance(self.rewards, str) and self.rewards not in ("gigpo", "gae"):
            _lookup(REWARD_RULES, self.rewards, "reward rule", besides=("gigpo", "gae"))
        _lookup(ADVANTAGE_RULES, self.advantage, "advantage rule")
        for key in self.group_by:
            _lookup(GROUP_KEYS, key, "group key")
        if not self.group_by:
            raise CreditError(f"group_by is empty; expected one or more of {sorted(GROUP_KEYS)!r}")

    @property
    def needs_values(self) -> bool:
        """Whether a critic must say what it expects of each call's prompt."""
        return self.rewards == "gae"


@dataclass(frozen=True, slots=True, kw_only=True)
class Credit:
    """The result, by call id, and how the groups looked."""

    values: Mapping[str, float]
    """What each call is worth, before any baseline."""
    advantages: Mapping[str, float]
    targets: Mapping[str, float] = field(default_factory=dict[str, float])
    """With ``gae``: what the critic should have said."""
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])


def assign_credit(
    episodes: Sequence[Episode], rules: CreditRules | None = None, *, values: Mapping[str, float] | None = None
) -> Credit:
    """Give every call of ``episodes`` a value and an advantage.

    ``values``: the critic's, for every call, where ``rules.needs_values``. Advantages are computed before anything is dropped.
    """
    rules = rules or CreditRules()
    if rules.air is not None:
        episodes = [with_air(episode, rules.air) for episode in episodes]
    if rules.needs_values:
        return _assign_gae(episodes, rules, values or {})
    advantage = ADVANTAGE_RULES[rules.advantage]
    rule = _reward_rule(rules)
    worth = _worth(episodes, rule, rules.gamma)
    groups = group_values(episodes, worth, rules.group_by)
    advantages, metrics = advantage(groups), _metrics(groups)
    if rules.rewards == "gigpo":
        steps, more = _steps(episodes, rules, advantage)
        advantages = {call: a + rules.step_weight * steps[call] for call, a in advantages.items()}
        metrics |= more
    return Credit(values=worth, advantages=advantages, metrics=metrics)


def _steps(
    episodes: Sequence[Episode], rules: CreditRules, advantage: AdvantageRule
) -> tuple[dict[str, float], dict[str, float]]:
    """GiGPO's step-level advantages (arXiv 2505.10978): what followed, compared among calls that were in the same place."""
    following = _worth(episodes, discounted, rules.gamma)
    groups = group_values(episodes, following, (*rules.group_by, rules.anchor))
    return advantage(groups), {f"step_{name}": value for name, value in _metrics(groups).items()}


def _assign_gae(episodes: Sequence[Episode], rules: CreditRules, values: Mapping[str, float]) -> Credit:
    """Turn-level GAE, whose advantages are then compared as ``rules.advantage`` says."""
    worth: dict[str, float] = {}
    targets: dict[str, float] = {}
    for episode in episodes:
        calls = [t.call for t in episode.transitions]
        missing = [call for call in calls if call not in values]
        if missing:
            raise CreditError(f"reward rule 'gae' needs the critic's value of every call; {missing[0]!r} has none")
        found, wanted = turn_gae(immediate(episode), [values[call] for call in calls], gamma=rules.gamma, lam=rules.lam)
        worth |= zip(calls, found, strict=True)
        targets |= zip(calls, wanted, strict=True)
    groups = group_values(episodes, worth, rules.group_by)
    return Credit(
        values=worth, advantages=ADVANTAGE_RULES[rules.advantage](groups), targets=targets, metrics=_metrics(groups)
    )


def _reward_rule(rules: CreditRules) -> RewardRule:
    if not isinstance(rules.rewards, str):
        return rules.rewards
    return broadcast if rules.rewards == "gigpo" else REWARD_RULES[rules.rewards]


def _worth(episodes: Sequence[Episode], rule: RewardRule, gamma: float) -> dict[str, float]:
    worth: dict[str, float] = {}
    for episode in episodes:
        found = rule(episode, gamma)
        if len(found) != len(episode.transitions):
            name = getattr(rule, "__name__", repr(rule))
            raise CreditError(
                f"the reward rule {name} gave {len(found)} values for the {len(episode.transitions)} calls of an episode"
            )
        worth |= {t.call: check_reward(value) for t, value in zip(episode.transitions, found, strict=True)}
    return worth


def _metrics(groups: Sequence[Sequence[Value]]) -> dict[str, float]:
    single = sum(rollouts(g) == 1 for g in groups)
    return {
        "groups": float(len(groups)),
        "groups_single": float(single),
        "groups_equal": float(sum(is_flat(g) for g in groups) - single),
    }


def _lookup(registry: Mapping[str, T], name: str, what: str, *, besides: Sequence[str] = ()) -> T | None:
    if name not in registry and name not in besides:
        raise CreditError(f"unknown {what} {name!r}; known are {sorted([*registry, *besides])!r}")
    return registry.get(name)
