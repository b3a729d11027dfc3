"""The configuration's section ``policies``: several that learn side by side; and what each of them, or the only one, is made of."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

from pydantic import AfterValidator
from pydantic_core import PydanticCustomError

from lightning_core.config_credit import (
    Advantage,
    Anchor,
    Credit,
    Critic,
    Gamma,
    GroupBy,
    Lam,
    RuleName,
    impossible_credit,
)
from lightning_core.config_problems import OWN
from lightning_core.config_types import Count, Names, NotNegative, Positive, Section
from lightning_core.yaml_source import KeyPath

if TYPE_CHECKING:
    from lightning_core.config import Config

POLICY = "policy"
"""The model name of the weights that are trained, where there is one policy."""
BASE = "base"
"""The model name of the weights that training began with."""

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
    a policy also has its own `gamma`, `lam`, `step_weight`, `anchor` and `critic`. Intermediate rewards and the judge are everybody's."""

    rewards: RuleName | None = None
    """See `credit.rewards`; with `gae` each policy has a critic of its own."""
    gamma: Gamma | None = None
    """See `credit.gamma`."""
    lam: Lam | None = None
    """See `credit.lam`."""
    step_weight: NotNegative | None = None
    """See `credit.step_weight`."""
    anchor: Anchor | None = None
    """See `credit.anchor`."""
    advantage: Advantage | None = None
    """See `credit.advantage`."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySettings:
    """All that a policy has of its own, resolved."""

    model: str
    tuning: Literal["full", "lora"]
    train_layers: int | None
    lora: Lora | None
    learning_rate: float
    credit: Credit


def policy_settings(c: Config) -> dict[str, PolicySettings]:
    """The policies of a run by name, as backends serve them: those of the section ``policies``, or the only one."""
    named = {name: _settings(c, p) for name, p in c.policies.items()}
    return named or {POLICY: _settings(c, NamedPolicy(agents=()))}


def agents_policies(c: Config) -> dict[str, str]:
    """Which policy an agent belongs to, where there are several; empty where there is one."""
    return {agent: name for name, policy in c.policies.items() for agent in policy.agents}


def _settings(c: Config, own: NamedPolicy) -> PolicySettings:
    tuning = own.tuning or c.policy.tuning
    return PolicySettings(
        model=own.model or c.policy.model,
        tuning=tuning,
        train_layers=own.train_layers or (c.policy.train_layers if tuning == "full" else None),
        lora=own.lora or ((c.policy.lora or Lora()) if tuning == "lora" else None),
        learning_rate=own.learning_rate or c.trainer.learning_rate,
        credit=_credit(c.credit, own.credit),
    )


def _credit(common: Credit, own: PolicyCredit) -> Credit:
    given = {key: value for key in PolicyCredit.model_fields if (value := getattr(own, key)) is not None}
    if own.rewards is not None:
        given = {**dict.fromkeys(("gamma", "lam", "step_weight", "anchor", "critic")), **given}
    return common.model_copy(update=given)


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


def impossible_policies(c: Config) -> Iterator[tuple[KeyPath, str]]:
    """Combinations that cannot be honoured although each value alone is fine."""
    yield from _impossible_agents(c)
    yield from _impossible_frozen(c)
    if c.policies and c.policy.backend != "torch":
        yield (
            ("policy", "backend"),
            f"with several policies they are sampled in this process: expected 'torch', found {c.policy.backend!r}",
        )
    for name, settings in policy_settings(c).items() if c.policies else ():
        own, path = c.policies[name], ("policies", name)
        if settings.tuning == "lora" and own.train_layers is not None:
            yield (*path, "train_layers"), "goes with tuning: full only, but this policy's is 'lora'"
        if settings.tuning == "full" and own.lora is not None:
            yield (*path, "lora"), "goes with tuning: lora only, but this policy's is 'full'"
        if own.credit != PolicyCredit():
            for (section, *rest), text in impossible_credit(
                settings.credit, group_size=c.rollouts.group_size, refill=c.rollouts.refill
            ):
                yield ((*path, section, *rest) if section == "credit" else (section, *rest)), text


def _impossible_agents(c: Config) -> Iterator[tuple[KeyPath, str]]:
    owners: dict[str, str] = {}
    for name, policy in c.policies.items():
        if not policy.agents:
            yield ("policies", name, "agents"), "an empty list: nobody would be answered by this policy"
        for agent in policy.agents:
            if agent in owners:
                yield (
                    ("policies", name, "agents"),
                    f"agent {agent!r} is in policies.{owners[agent]}.agents too; an agent belongs to one policy, and is named once",
                )
            owners.setdefault(agent, name)
    if c.policies and set(c.agents.train or ()) != owners.keys():
        yield (
            ("agents", "train"),
            f"found {list(c.agents.train or ())!r}, but the agents of the policies are {list(owners)!r}; leave the key out",
        )


def _impossible_frozen(c: Config) -> Iterator[tuple[KeyPath, str]]:
    if not c.policies:
        return
    judge = c.credit.judge
    wanted: list[tuple[KeyPath, str]] = [(("agents", "frozen", a), model) for a, model in c.agents.frozen.items()]
    wanted += [(("credit", "judge", "model"), judge.model)] if judge else []
    initial = any(settings.model == c.policy.model for settings in policy_settings(c).values())
    for path, model in wanted:
        if model == POLICY:
            yield (
                path,
                f"no policy has the name 'policy'; expected 'base', one of {list(c.policies)!r}, or an upstream's model",
            )
        if model == BASE and not initial:
            yield path, f"'base' is the initial {c.policy.model!r} (policy.model), but no policy is made of that"
