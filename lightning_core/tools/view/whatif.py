"""Other credit rules for a recorded run: a URL's parameters as settings of the run's configuration."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from lightning_core.config import Config
from lightning_core.config.credit import RULE_ARGUMENT_KEYS, CreditSection
from lightning_core.config.resolve import policy_settings
from lightning_core.config.source import parse_scalar
from lightning_core.credit import ADVANTAGE_RULES, GROUP_KEYS, REWARD_RULES
from lightning_core.credit.registry import DeclaredRule, Parameter, Registry
from lightning_core.errors import ConfigError
from lightning_core.records.run_folder.configs import load_recorded

REWARDS, ADVANTAGE, GROUP = "rewards", "advantage", "group"
"""The parameters of the URL; rule parameters are ``rewards.RULE.PARAMETER`` and ``advantage.RULE.PARAMETER``."""
_PARAMETERS = ("policy", REWARDS, ADVANTAGE, "step", "import")


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleField:
    """A parameter of a rule, as a field of the form."""

    name: str
    """The name of the URL's parameter."""
    label: str
    text: str
    """The field's value."""
    default: str
    """The meaning of an empty field."""
    choices: Sequence[str]
    """The possible values, if they are few."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleChoice:
    """A rule that can be chosen, with its parameters."""

    name: str
    description: str
    chosen: bool
    fields: Sequence[RuleField]


@dataclass(frozen=True, slots=True, kw_only=True)
class CreditForm:
    """The choices of a form for the rules of one policy."""

    policies: Sequence[str]
    policy: str
    rewards: Sequence[RuleChoice]
    advantages: Sequence[RuleChoice]
    keys: Sequence[RuleChoice]


def choose_policy(config: Config, parameters: Mapping[str, str]) -> str:
    """The policy whose rules are changed. Raises `ConfigError` for one that the run does not have."""
    known = list(policy_settings(config))
    name = parameters.get("policy") or known[0]
    if name not in known:
        raise ConfigError(f"policy: found {name!r}, expected one of {', '.join(known)}")
    return name


def make_form(config: Config, policy: str, parameters: Mapping[str, str], groups: Sequence[str] | None) -> CreditForm:
    """The form with the run's rules for ``policy``, or the rules in the URL's ``parameters``.

    ``groups``: the URL's group keys; None if it has none.
    """
    credit = policy_settings(config)[policy].credit
    flat = {key: getattr(credit, key) for key in RULE_ARGUMENT_KEYS}
    rewards, advantage = parameters.get(REWARDS) or credit.rewards, parameters.get(ADVANTAGE) or credit.advantage
    known = {credit.rewards: {**flat, **credit.rewards_args}}
    keys = _group_keys(credit, parameters, groups)
    return CreditForm(
        policies=list(policy_settings(config)),
        policy=policy,
        rewards=list(_choices(REWARD_RULES, REWARDS, rewards, credit.rewards, known, parameters)),
        advantages=list(
            _choices(
                ADVANTAGE_RULES,
                ADVANTAGE,
                advantage,
                credit.advantage,
                {credit.advantage: credit.advantage_args},
                parameters,
            )
        ),
        keys=[
            RuleChoice(name=name, description=_described(GROUP_KEYS, name), chosen=name in (keys or ()), fields=())
            for name in dict.fromkeys([*GROUP_KEYS, *(credit.group_by or ())])
        ],
    )


def changed_config(
    path: Path, config: Config, policy: str, parameters: Mapping[str, str], groups: Sequence[str] | None
) -> Config:
    """``config``, which is in the file ``path``, with the rules for ``policy`` that the URL's parameters name.

    Raises `ConfigError`: a value that the configuration does not accept, or a rule that is neither declared nor the run's own. A URL
    cannot name functions to import.
    """
    for name in parameters:
        if name not in _PARAMETERS and not name.startswith((f"{REWARDS}.", f"{ADVANTAGE}.")):
            raise ConfigError(f"{name}: unknown parameter, expected one of {', '.join(_PARAMETERS)}, {GROUP}")
    credit = policy_settings(config)[policy].credit
    rewards = _rule_name(REWARD_RULES, parameters.get(REWARDS), credit.rewards, "rewards")
    advantage = _rule_name(ADVANTAGE_RULES, parameters.get(ADVANTAGE), credit.advantage, "advantage")
    keys = _group_keys(credit, parameters, groups)
    for key in keys or ():
        _rule_name(GROUP_KEYS, key, key if key in (credit.group_by or ()) else "", "group_by")
    flat = {key: getattr(credit, key) for key in RULE_ARGUMENT_KEYS}
    reward_args = _arguments(REWARDS, rewards, {**flat, **credit.rewards_args}, parameters)
    settings: dict[str, Any] = {
        "rewards": rewards,
        **{key: reward_args.pop(key, None) for key in RULE_ARGUMENT_KEYS},
        "rewards_args": reward_args,
        "advantage": advantage,
        "advantage_args": _arguments(ADVANTAGE, advantage, credit.advantage_args, parameters),
        "group_by": None if keys is None else list(keys),
    }
    if rewards != credit.rewards:
        settings["critic"] = None
    prefix = f"policies.{policy}.credit" if config.policies else "credit"
    return load_recorded(path, [f"{prefix}.{key}={json.dumps(value)}" for key, value in settings.items()])


def _group_keys(
    credit: CreditSection, parameters: Mapping[str, str], groups: Sequence[str] | None
) -> Sequence[str] | None:
    """The group keys to use; None: the reward rule's own. The form sends a reward rule and only the keys that are chosen."""
    return credit.group_by if groups is None and not parameters.get(REWARDS) else groups


def _rule_name(registry: Registry[Any], name: str | None, default: str, key: str) -> str:
    if not name:
        return default
    if name not in registry and name != default:
        raise ConfigError(f"{key}: found {name!r}, expected one of {', '.join(registry)}")
    return name


def _arguments(kind: str, rule: str, configured: Mapping[str, Any], parameters: Mapping[str, str]) -> dict[str, Any]:
    """The arguments of ``rule`` in the URL's parameters; without a rule in the URL, also the ``configured`` ones."""
    prefix = f"{kind}.{rule}."
    arguments = {} if parameters.get(kind) else dict(configured)
    for name, text in parameters.items():
        if name.startswith(prefix) and text.strip():
            try:
                arguments[name.removeprefix(prefix)] = parse_scalar(text)
            except yaml.YAMLError:
                raise ConfigError(f"{name}: found {text!r}, expected a number or a word") from None
    return arguments


def _choices(
    registry: Registry[Any],
    kind: str,
    chosen: str,
    configured: str,
    known: Mapping[str, Mapping[str, Any]],
    given: Mapping[str, str],
) -> Iterator[RuleChoice]:
    for name in dict.fromkeys([*registry, configured]):
        rule: DeclaredRule | None = registry.get(name)
        values = known.get(name, {})
        parameters: list[Parameter] = [] if rule is None else list(rule.parameters.values())
        fields = [_field(kind, name, parameter, values, given) for parameter in parameters]
        yield RuleChoice(name=name, description=_described(registry, name), chosen=name == chosen, fields=fields)


def _field(
    kind: str, rule: str, parameter: Parameter, values: Mapping[str, Any], parameters: Mapping[str, str]
) -> RuleField:
    name = f"{kind}.{rule}.{parameter.name}"
    value = values.get(parameter.name)
    if value is None and parameter.required:
        value = parameter.example
    default = "" if parameter.required or parameter.default is None else str(parameter.default)
    return RuleField(
        name=name,
        label=parameter.name,
        text=parameters.get(name, "" if value is None else str(value)),
        default=default,
        choices=("exact", "normalised") if parameter.name == "anchor" else (),
    )


def _described(registry: Registry[Any], name: str) -> str:
    return registry[name].description if name in registry else "A function of your project."
