"""The configuration's section ``policies``: several policies in one run."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, cast

from pydantic import AfterValidator
from pydantic_core import PydanticCustomError

from lightning_core.config.credit import Anchor, Arguments, CriticSection, Gamma, GroupBy, Lam
from lightning_core.config.problems import INVALID_VALUE
from lightning_core.config.rule_names import AdvantageRuleName, RewardRuleName
from lightning_core.config.types import (
    Count,
    CountOrAuto,
    ModelName,
    Names,
    NotNegative,
    Positive,
    PositiveOrAuto,
    Section,
)
from lightning_core.trace import BASE, POLICY

_NAME = re.compile(r"[A-Za-z][\w-]*")


def _policy_name(text: str) -> str:
    if not _NAME.fullmatch(text):
        raise PydanticCustomError(INVALID_VALUE, "expected a policy's name: a letter, then letters, digits, _ and -")
    if text in (POLICY, BASE):
        raise PydanticCustomError(INVALID_VALUE, "which is reserved ('policy' is the policy of a run with only one, 'base' the initial "
                                  "weights); expected another name")  # fmt: skip
    return text


PolicyName = Annotated[str, AfterValidator(_policy_name)]


class Lora(Section):
    """Low-rank adapters."""

    rank: Count = 16
    """Rank of each adapter."""
    alpha: Positive = 32.0
    """Scale: each adapter's output is multiplied by alpha / rank."""
    target_modules: Names | None = None
    """Names of the linear layers that get an adapter; null: all except the output layer."""


class PolicyCredit(Section):
    """Credit settings of one policy. A null value falls back to the section `credit`.
    A policy that sets `rewards` does not inherit `rewards_args`, `gamma`, `lam`, `step_weight`, `anchor` and `critic`. A
    policy that sets `advantage` does not inherit `advantage_args`. Intermediate rewards and the judge apply to all
    policies."""

    rewards: RewardRuleName | None = None
    """See `credit.rewards`. With `gae` each policy has its own critic."""
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
    critic: CriticSection | None = None
    """See `credit.critic`."""


class NamedPolicy(Section):
    """One of several policies. A null value falls back to `policy` and `trainer`.
    Policies with the same `model` and `tuning: lora` share the base weights, each with its own adapters.
    Every other policy has its own copy of its model."""

    agents: Names
    """Names of the agents that use and train this policy, with `*` as wildcard. Each agent belongs to exactly one
    policy."""
    model: ModelName | None = None
    """See `policy.model`."""
    tuning: Literal["full", "lora"] | None = None
    """See `policy.tuning`."""
    train_layers: CountOrAuto | None = None
    """See `policy.train_layers`."""
    lora: Lora | None = None
    """See `policy.lora`."""
    chat_template_kwargs: Arguments | None = None
    """See `policy.chat_template_kwargs`."""
    learning_rate: PositiveOrAuto | None = None
    """See `trainer.learning_rate`."""
    credit: PolicyCredit = PolicyCredit()
    """Credit settings that differ from the section `credit`."""


def derive_agents(data: object) -> object:
    """``data`` with a missing ``agents.train`` derived from ``policies``."""
    if not isinstance(data, Mapping):
        return data
    sections = cast("Mapping[str, Any]", data)
    policies, agents = sections.get("policies"), sections.get("agents") or {}
    if not isinstance(policies, Mapping) or not isinstance(agents, Mapping) or agents.get("train") is not None:
        return data
    agent_names: list[Any] = []
    for policy in policies.values():
        own = policy.get("agents") if isinstance(policy, Mapping) else getattr(policy, "agents", ())
        agent_names += own if isinstance(own, list | tuple) else ()
    return {**sections, "agents": {**agents, "train": list(dict.fromkeys(agent_names))}} if agent_names else data
