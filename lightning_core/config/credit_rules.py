"""The rules that the configuration's section ``credit`` asks for, and those that a policy has of its own."""

from __future__ import annotations

from lightning_core.config import credit as configured
from lightning_core.config.config import Config
from lightning_core.config.imports import import_callable
from lightning_core.config.resolve import policy_settings
from lightning_core.credit import Air, CreditRules, FormatRule


def policy_rules(config: Config) -> dict[str, CreditRules]:
    """The rules of each policy, by its name. Raises `ConfigError` when a function that they name cannot be imported."""
    return {name: credit_rules(settings.credit) for name, settings in policy_settings(config).items()}


def credit_rules(c: configured.CreditSection) -> CreditRules:
    """Raises `ConfigError` when a function that it names cannot be imported."""
    own = ":" in c.rewards
    return CreditRules(
        rewards=import_callable(c.rewards, key="credit.rewards") if own else c.rewards,
        gamma=1.0 if c.gamma is None else c.gamma,
        lam=1.0 if c.lam is None else c.lam,
        step_weight=1.0 if c.step_weight is None else c.step_weight,
        anchor="anchor-normalised" if c.anchor == "normalised" else "anchor",
        advantage=c.advantage,
        group_by=c.group_by,
        air=None if c.air is None else _air(c.air),
    )


def _air(air: configured.AirSection) -> Air:
    return Air(
        tool_ok=air.tool_ok,
        tool_error=air.tool_error,
        tool_unused=air.tool_unused,
        tool_errors=air.tool_errors,
        truncated=air.truncated,
        formats=[FormatRule(pattern=f.pattern, weight=f.weight, agents=f.agents) for f in air.formats],
        rules=[
            (import_callable(r.function, key=f"credit.air.rules.{i}.function"), r.weight)
            for i, r in enumerate(air.rules)
        ],
    )
