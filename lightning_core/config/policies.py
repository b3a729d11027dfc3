"""The configuration's section ``policies``: several that learn side by side."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, cast

from pydantic import AfterValidator
from pydantic_core import PydanticCustomError

from lightning_core.config.credit import Anchor, Arguments, Critic, Gamma, GroupBy, Lam
from lightning_core.config.problems import OWN
from lightning_core.config.rules import AdvantageRuleName, RewardRuleName
from lightning_core.config.types import Count, Names, NotNegative, Positive, Section
from lightning_core.trace import BASE, POLICY

_NAME = re.compile(r"[A-Za-z][\w-]*")


def _policy_name(text: str) -> str:
    if not _NAME.fullmatch(text):
        raise PydanticCustomError(OWN, "expected a policy's name: a letter, then letters, digits, _ and -")
    if text in (POLICY, BASE):
        raise PydanticCustomError(OWN, "which means something already: 'policy' is the only policy of a run that has one, 'base' the "
                                  "initial weights; expected another name")  # fmt: skip
    return text


PolicyName = Annotated[str, AfterValidator(_policy_name)]


class Lora(Section):
    """Low-rank adapters."""

    rank: Count = 16
    """Rank of each adapter."""
    alpha: Positive = 32.0
    """Scale of the adapters; alpha / rank multiplies them."""
    target_modules: Names | None = None
    """Names of the linear layers that get an adapter; null: all of them."""


class PolicyCredit(Section):
    """Where the credit of a policy's calls differs from the section `credit`. What is null is as it is there; with `rewards` of its own
    a policy also has its own `rewards_args`, `gamma`, `lam`, `step_weight`, `anchor` and `critic`, and with `advantage` its own
    `advantage_args`. Intermediate rewards and the judge are common to all policies."""

    rewards: RewardRuleName | None = None
    """See `credit.rewards`; with `gae` each policy has a critic of its own."""
    rewards_args: Arguments | None = None
    """See `credit.rewards_args`."""
    gamma: Gamma | None = None
    """See `credit.gamma`."""
    lam: Lam | None = None
    """See `credit.lam`."""
    step_weight: NotNegative | None = None
    """See `credit.step_weight`."""
    anchor: Anchor | None = None
    """See `credit.anchor`."""
    advantage: AdvantageRuleName | None = None
    """See `credit.advantage`."""
    advantage_args: Arguments | None = None
    """See `credit.advantage_args`."""
    group_by: GroupBy | None = None
    """See `credit.group_by`."""
    critic: Critic | None = None
    """See `credit.critic`."""


class NamedPolicy(Section):
    """One of several policies. What is null is as `policy` and `trainer` have it. Policies of one model with `tuning: lora` share it in
    memory, each with adapters of its own; every other has a model of its own."""

    agents: Names
    """Names of the agents that it answers and learns from. Every agent belongs to one policy."""
    model: str | None = None
    """See `policy.model`."""
    tuning: Literal["full", "lora"] | None = None
    """See `policy.tuning`."""
    train_layers: Count | None = None
    """See `policy.train_layers`."""
    lora: Lora | None = None
    """See `policy.lora`."""
    learning_rate: Positive | None = None
    """See `trainer.learning_rate`."""
    credit: PolicyCredit = PolicyCredit()
    """What of `credit` is different for its calls."""


def derive_agents(data: object) -> object:
    """A configuration's data with ``agents.train`` from ``policies``, where that is left out."""
    if not isinstance(data, Mapping):
        return data
    sections = cast("Mapping[str, Any]", data)
    policies, agents = sections.get("policies"), sections.get("agents") or {}
    if not isinstance(policies, Mapping) or not isinstance(agents, Mapping) or agents.get("train") is not None:
        return data
    named: list[Any] = []
    for policy in policies.values():
        own = policy.get("agents") if isinstance(policy, Mapping) else getattr(policy, "agents", ())
        named += own if isinstance(own, list | tuple) else ()
    return {**sections, "agents": {**agents, "train": list(dict.fromkeys(named))}} if named else data
