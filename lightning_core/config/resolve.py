"""The settings of each policy: its own section, then the common sections."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from lightning_core.config.credit import RULE_ARGUMENT_KEYS, CreditSection, CriticSection
from lightning_core.config.policies import Lora, NamedPolicy, PolicyCredit
from lightning_core.config.rule_names import reward_rule
from lightning_core.config.sections import Sections
from lightning_core.config.signal_sections import requested_models
from lightning_core.trace import BASE, POLICY


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySettings:
    """The resolved settings of one policy; see the sections for each field."""

    model: str
    tuning: Literal["full", "lora"]
    train_layers: int | Literal["auto"] | None
    lora: Lora | None
    """The adapters; None with ``tuning: full``."""
    dtype: Literal["auto", "float32", "bfloat16"]
    device: Literal["auto", "cpu", "cuda"]
    gradient_checkpointing: bool
    max_context: int | None
    chat_template_kwargs: Mapping[str, Any]
    keep_base: bool
    """Whether the initial weights are also served, as the model ``base``."""
    learning_rate: float | Literal["auto"]
    credit: CreditSection

    @property
    def critic(self) -> CriticSection | None:
        """The value head's settings; None if the credit rule needs no critic."""
        return (self.credit.critic or CriticSection()) if "critic" in reward_rule(self.credit.rewards).needs else None


def policy_settings(c: Sections) -> dict[str, PolicySettings]:
    """The policies of a run, by the names that backends serve them under.

    A run without ``policies`` has one, named ``policy``.
    """
    named = {name: _settings(c, p) for name, p in c.policies.items()}
    return named or {POLICY: _settings(c, NamedPolicy(agents=()))}


def agents_policies(c: Sections) -> dict[str, str]:
    """The policy of each agent; empty for a run with one policy."""
    return {agent: name for name, policy in c.policies.items() for agent in policy.agents}


def _settings(c: Sections, own: NamedPolicy) -> PolicySettings:
    tuning = own.tuning or c.policy.tuning
    return PolicySettings(
        model=own.model or c.policy.model,
        tuning=tuning,
        train_layers=own.train_layers or (c.policy.train_layers if tuning == "full" else None),
        lora=(own.lora or c.policy.lora or Lora()) if tuning == "lora" else None,
        dtype=c.policy.dtype,
        device=c.policy.device,
        gradient_checkpointing=bool(c.policy.gradient_checkpointing),
        max_context=c.policy.max_context,
        chat_template_kwargs=c.policy.chat_template_kwargs
        if own.chat_template_kwargs is None
        else own.chat_template_kwargs,
        keep_base=BASE in (*c.agents.frozen.values(), *(model for _, model in requested_models(c))),
        learning_rate=own.learning_rate or c.trainer.learning_rate,
        credit=_credit(c.credit, own.credit),
    )


def _credit(common: CreditSection, own: PolicyCredit) -> CreditSection:
    given = {key: value for key in PolicyCredit.model_fields if (value := getattr(own, key)) is not None}
    if own.rewards is not None:
        given = {**dict.fromkeys((*RULE_ARGUMENT_KEYS, "critic")), "rewards_args": {}, **given}
    if own.advantage is not None:
        given = {"advantage_args": {}, **given}
    return common.model_copy(update=given)
