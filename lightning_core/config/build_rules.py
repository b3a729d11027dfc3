"""Resolves the rules that the sections ``credit`` and ``algorithm`` name."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Sequence
from typing import Any

from lightning_core.config import credit as configured
from lightning_core.config.algorithm import CLIPS, Algorithm
from lightning_core.config.checks import check_algorithm, check_credit
from lightning_core.config.checks_verl import check_verl_credit, check_verl_loss
from lightning_core.config.config import Config
from lightning_core.config.credit import RULE_ARGUMENT_KEYS
from lightning_core.config.imports import import_callable, user_code
from lightning_core.config.resolve import policy_settings
from lightning_core.config.rule_names import find_rule, function_of
from lightning_core.config.signal_sections import signal_sections
from lightning_core.config.source import KeyPath, dotted
from lightning_core.credit import (
    ADVANTAGE_RULES,
    GROUP_KEYS,
    LOSSES,
    REWARD_RULES,
    Air,
    CreditRules,
    FormatRule,
)
from lightning_core.credit.air import CallReward
from lightning_core.credit.registry import Loss
from lightning_core.credit.tool_outcomes import ToolOutcome
from lightning_core.errors import ConfigError
from lightning_core.trace import Call


def check_rules(config: Config) -> None:
    """Import the rules and the loss of ``config``. Raises `ConfigError` as `policy_rules` and `checked_loss` do."""
    policy_rules(config)
    _raise_first(check_verl_loss(config, checked_loss(config.algorithm)))


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
    for rule in rules.values():
        _raise_first(check_verl_credit(config, rule))
    return rules


def credit_rules(c: configured.CreditSection, *, group_size: int = 2, refill: int = 0) -> CreditRules:
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
        air=None if c.air is None else _air(c.air),
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


def _call_reward(name: str, key: str) -> CallReward:
    """The function ``name``, a rule of AIR. Raises `ConfigError` if it cannot be imported or called so; later, if it fails."""
    function: CallReward = import_callable(name, key=key)
    try:
        inspect.signature(function).bind("call", "tools")
    except TypeError:
        found = f"{name}{inspect.signature(function)}"
        raise ConfigError(f"{key}: {found} cannot be called as function(call, tools)") from None
    except ValueError:  # some builtins have no signature
        pass

    @functools.wraps(function)
    def reward(call: Call, tools: Sequence[ToolOutcome]) -> float:
        with user_code(f"{key}: {name} failed"):
            return function(call, tools)

    return reward


def _air(air: configured.AirSection) -> Air:
    return Air(
        tool_ok=air.tool_ok,
        tool_error=air.tool_error,
        tool_unused=air.tool_unused,
        tool_errors=air.tool_errors,
        truncated=air.truncated,
        truncated_ramp=air.truncated_ramp,
        token_cost=air.token_cost,
        call_cost=air.call_cost,
        formats=[FormatRule(pattern=f.pattern, weight=f.weight, agents=f.agents) for f in air.formats],
        rules=[
            (_call_reward(r.function, f"credit.air.rules[{i}].function"), r.weight) for i, r in enumerate(air.rules)
        ],
    )
