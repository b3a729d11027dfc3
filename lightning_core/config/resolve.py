"""What each policy of a run gets from the configuration: its own section, then the common ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lightning_core.config.credit import FLAT, Credit
from lightning_core.config.policies import Lora, NamedPolicy, PolicyCredit
from lightning_core.config.sections import Sections
from lightning_core.trace import POLICY


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySettings:
    """All that a policy has of its own, resolved."""

    model: str
    tuning: Literal["full", "lora"]
    train_layers: int | None
    lora: Lora | None
    learning_rate: float
    credit: Credit


def policy_settings(c: Sections) -> dict[str, PolicySettings]:
    """The policies of a run by name, as backends serve them: those of the section ``policies``, or the only one."""
    named = {name: _settings(c, p) for name, p in c.policies.items()}
    return named or {POLICY: _settings(c, NamedPolicy(agents=()))}


def agents_policies(c: Sections) -> dict[str, str]:
    """Which policy an agent belongs to, where there are several; empty where there is one."""
    return {agent: name for name, policy in c.policies.items() for agent in policy.agents}


def _settings(c: Sections, own: NamedPolicy) -> PolicySettings:
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
        given = {**dict.fromkeys((*FLAT, "critic")), "rewards_args": {}, **given}
    if own.advantage is not None:
        given = {"advantage_args": {}, **given}
    return common.model_copy(update=given)
