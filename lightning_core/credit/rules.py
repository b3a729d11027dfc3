"""The rules of a run and their arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning_core.credit.registry import ADVANTAGE_RULES, GROUP_KEYS, REWARD_RULES, AdvantageRule, RewardRule
from lightning_core.credit.reward_terms import RewardTerm
from lightning_core.errors import CreditError

_COMMON = ("gamma", "lam", "step_weight", "anchor")


@dataclass(frozen=True, slots=True, kw_only=True)
class CreditRules:
    """The rules of credit assignment. Raises `CreditError` for an unknown name or argument.

    ``gamma``, ``lam``, ``step_weight`` and ``anchor`` are passed to a reward rule that has the parameter. None: the rule's default.
    """

    rewards: str | Callable[..., Any] = "broadcast"
    """A name in `REWARD_RULES`, or a function with the same signature."""
    gamma: float | None = None
    """The discount factor per call; None: 1 for a rule without a default. The configuration requires it for such a rule."""
    lam: float | None = None
    """λ of ``gae``."""
    step_weight: float | None = None
    """ω of ``gigpo``: the weight of the steps' advantages, added to the episode's."""
    anchor: str | None = None
    """For ``gigpo``: ``exact`` or ``normalised`` as in the configuration, or the name of a group key. None: ``exact``."""
    advantage: str | Callable[..., Any] = "grpo"
    """A name in `ADVANTAGE_RULES`, or a function with the same signature."""
    group_by: Sequence[str | Callable[..., Any]] | None = None
    """Names in `GROUP_KEYS`, or functions with the same signature; None: the reward rule's default."""
    terms: Sequence[RewardTerm] = ()
    """Rewards that are compared on their own."""
    rewards_args: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Other arguments of the reward rule."""
    advantage_args: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Arguments of the advantage rule."""

    def __post_init__(self) -> None:
        _ = self.reward_arguments, self.advantage_arguments
        for key in self.keys:
            GROUP_KEYS.find(key)
        if self.terms and self.needs_values:
            raise CreditError(
                f"{self.reward_rule.name!r} cannot compare {self.terms[0].name!r} on its own: the critic predicts the sum of all rewards"
            )
        if not self.keys:
            raise CreditError(f"group_by is empty; expected one or more of {sorted(GROUP_KEYS)!r}")

    @property
    def reward_rule(self) -> RewardRule:
        return REWARD_RULES.find(self.rewards)

    @property
    def advantage_rule(self) -> AdvantageRule:
        return ADVANTAGE_RULES.find(self.advantage)

    @property
    def reward_arguments(self) -> dict[str, Any]:
        """The keyword arguments of the reward rule."""
        rule = self.reward_rule
        common = {name: value for name in _COMMON if (value := getattr(self, name)) is not None}
        gamma = rule.parameters.get("gamma")
        return rule.arguments({"gamma": 1.0, **common} if gamma and gamma.required else common, self.rewards_args)

    @property
    def advantage_arguments(self) -> dict[str, Any]:
        """The keyword arguments of the advantage rule."""
        return self.advantage_rule.arguments({}, self.advantage_args)

    @property
    def keys(self) -> Sequence[str | Callable[..., Any]]:
        """``group_by``, or the reward rule's default."""
        return self.reward_rule.group if self.group_by is None else self.group_by

    @property
    def needs_batch(self) -> bool:
        """Whether advantages need all rollouts of a step at once."""
        return needs_batch(self.advantage_rule, self.keys)

    @property
    def needs_values(self) -> bool:
        """Whether a critic must predict the return from each call's prompt."""
        return "critic" in self.reward_rule.needs


def compares_tasks(advantage: AdvantageRule, keys: Sequence[str | Callable[..., Any]]) -> bool:
    """Whether a group of ``keys`` can contain calls of several tasks that ``advantage`` compares."""
    return advantage.compares == "group" and "task" not in keys and GROUP_KEYS["task"].function not in keys


def needs_batch(advantage: AdvantageRule, keys: Sequence[str | Callable[..., Any]]) -> bool:
    """Whether ``advantage`` in groups of ``keys`` needs all rollouts of a step at once."""
    return advantage.needs_batch or compares_tasks(advantage, keys)
