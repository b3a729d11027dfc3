"""Resolves the rules that the sections ``credit`` and ``algorithm`` name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lightning_core.config.algorithm import CLIPS, Algorithm
from lightning_core.config.checks import check_algorithm, check_credit
from lightning_core.config.config import Config
from lightning_core.config.credit import RULE_ARGUMENT_KEYS, CreditSection
from lightning_core.config.resolve import policy_settings
from lightning_core.config.rule_names import find_rule, function_of
from lightning_core.config.signal_sections import signal_sections
from lightning_core.config.source import KeyPath, dotted
from lightning_core.config.trainer_support import check_rule_support
from lightning_core.credit import ADVANTAGE_RULES, GROUP_KEYS, LOSSES, REWARD_RULES, CreditRules
from lightning_core.credit.registry import Loss
from lightning_core.errors import ConfigError


def check_rules(config: Config) -> None:
    """Import the rules and the loss of ``config``. Raises `ConfigError` as `policy_rules` and `checked_loss` do."""
    policy_rules(config)
    _raise_first(check_rule_support(config, loss=checked_loss(config.algorithm)))


def policy_rules(config: Config) -> dict[str, CreditRules]:
    """The rules of each policy, by policy name.

    Raises `ConfigError` if a function cannot be imported or does not fit the other settings.
    """
    r = config.rollouts
    rules = {
        name: credit_rules(settings.credit, group_size=r.group_size, refill=r.refill)
        for name, settings in policy_settings(config).items()
    }
    # Whether a function that is not declared uses a signal is not known.
    used = {name: rule.reward_rule for name, rule in rules.items()}
    declared = {name: rule if REWARD_RULES.get(rule.name) is rule else None for name, rule in used.items()}
    for signal in signal_sections().values():
        _raise_first(signal.check_rules(config, declared))
    _raise_first(check_rule_support(config, rules=list(rules.values())))
    return rules


def credit_rules(c: CreditSection, *, group_size: int = 2, refill: int = 0) -> CreditRules:
    """The rules that ``c`` names. Raises `ConfigError` as `policy_rules` does."""
    reward_rule = find_rule(REWARD_RULES, c.rewards, key="credit.rewards")
    advantage_rule = find_rule(ADVANTAGE_RULES, c.advantage, key="credit.advantage")
    for name in c.group_by or ():
        find_rule(GROUP_KEYS, name, key="credit.group_by")
    _raise_first(check_credit(c, group_size=group_size, refill=refill, rewards=reward_rule, advantage=advantage_rule))
    return CreditRules(
        rewards=function_of(c.rewards, key="credit.rewards"),
        rewards_args=c.rewards_args,
        advantage=function_of(c.advantage, key="credit.advantage"),
        advantage_args=c.advantage_args,
        group_by=None if c.group_by is None else [function_of(key, key="credit.group_by") for key in c.group_by],
        terms=[term for signal in signal_sections().values() for term in signal.terms(c)],
        **{name: getattr(c, name) for name in RULE_ARGUMENT_KEYS},
    )


def loss_rule(a: Algorithm) -> Loss:
    """The loss that ``a`` names. Raises `ConfigError` as `find_rule` does."""
    return find_rule(LOSSES, a.loss, key="algorithm.loss")


def checked_loss(a: Algorithm) -> Loss:
    """The loss that ``a`` names. Raises `ConfigError`, also for a loss that does not fit the other settings."""
    loss = loss_rule(a)
    _raise_first(check_algorithm(a, loss))
    return loss


def loss_arguments(a: Algorithm, loss: Loss) -> dict[str, Any]:
    """The keyword arguments of ``loss``, the loss of ``a``."""
    return loss.arguments({name: getattr(a, name) for name in CLIPS}, a.loss_args)


def _raise_first(problems: Iterator[tuple[KeyPath, str]]) -> None:
    for path, text in problems:
        raise ConfigError(f"{dotted(path)}: {text}")
