"""Rules in the configuration: names, arguments, and functions as ``module:callable``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, TypeAdapter, ValidationError
from pydantic_core import PydanticCustomError

from lightning_core.config.imports import import_callable
from lightning_core.config.problems import INVALID_VALUE, describe, expectation
from lightning_core.config.source import KeyPath
from lightning_core.config.types import is_callable_name
from lightning_core.credit import ADVANTAGE_RULES, GROUP_KEYS, LOSSES, REWARD_RULES
from lightning_core.credit.registry import DeclaredRule, Parameter, Registry, RewardRule
from lightning_core.errors import ConfigError, CreditError, did_you_mean

R = TypeVar("R", bound=DeclaredRule)
Problems = Iterator[tuple[KeyPath, str]]


@dataclass(frozen=True, eq=False)
class NameOf:
    """Validates a name in ``registry``, or ``module:callable``."""

    registry: Registry[Any]

    def __call__(self, text: str) -> str:
        if text not in self.registry and not is_callable_name(text):
            meant, known = _key_of(text) or did_you_mean(text, self.registry), ", ".join(map(repr, self.registry))
            raise PydanticCustomError(
                INVALID_VALUE,
                "expected {known}, or 'module:callable'{hint}",
                {"known": known, "hint": meant and f"; {meant}"},
            )
        return text


def _key_of(name: str) -> str:
    """``'grpo' is a value of credit.advantage`` for the name of a rule; empty for any other."""
    registries: Mapping[str, Registry[Any]] = {
        "credit.rewards": REWARD_RULES,
        "credit.advantage": ADVANTAGE_RULES,
        "credit.group_by": GROUP_KEYS,
        "algorithm.loss": LOSSES,
    }
    keys = [key for key, registry in registries.items() if name in registry]
    return f"{name!r} is a value of {' and '.join(keys)}" if keys else ""


RewardRuleName = Annotated[str, AfterValidator(NameOf(REWARD_RULES))]
AdvantageRuleName = Annotated[str, AfterValidator(NameOf(ADVANTAGE_RULES))]
GroupKeyName = Annotated[str, AfterValidator(NameOf(GROUP_KEYS))]
LossName = Annotated[str, AfterValidator(NameOf(LOSSES))]


def function_of(name: str, *, key: str) -> str | Callable[..., Any]:
    """``name``, or the imported function if it is ``module:callable``.

    Raises `ConfigError` with ``key`` if the function does not exist.
    """
    return import_callable(name, key=key) if is_callable_name(name) else name


def with_importable_rules(data: Mapping[str, Any]) -> dict[str, Any]:
    """A dumped configuration with ``module:callable`` for each rule that custom code declares.

    Raises `ConfigError` if another process could not import such a rule.
    """
    policies: Mapping[str, dict[str, Any]] = data["policies"]
    return {
        **data,
        "algorithm": data["algorithm"] | {"loss": importable(LOSSES, data["algorithm"]["loss"], "algorithm.loss")},
        "credit": _importable_credit(data["credit"], "credit"),
        "policies": {
            name: policy | {"credit": _importable_credit(policy["credit"], f"policies.{name}.credit")}
            for name, policy in policies.items()
        },
    }


def _importable_credit(credit: Mapping[str, Any], key: str) -> dict[str, Any]:
    rewards, advantage, group_by = credit["rewards"], credit["advantage"], credit["group_by"]
    return {
        **credit,
        "rewards": rewards and importable(REWARD_RULES, rewards, f"{key}.rewards"),
        "advantage": advantage and importable(ADVANTAGE_RULES, advantage, f"{key}.advantage"),
        "group_by": group_by and [importable(GROUP_KEYS, name, f"{key}.group_by") for name in group_by],
    }


def importable(registry: Registry[Any], name: str, key: str) -> str:
    """``name``, or the ``module:callable`` of a rule that custom code declares.

    Raises `ConfigError` if another process could not import such a rule.
    """
    rule: DeclaredRule | None = declared(registry, name)
    if rule is None or rule.is_builtin:
        return name
    module, path = rule.function.__module__, getattr(rule.function, "__qualname__", repr(rule.function))
    found = f"{module}:{path}"
    if module == "__main__" or not is_callable_name(found) or import_callable(found, key=key) is not rule.function:
        raise ConfigError(
            f"{key}: other processes cannot import {name!r}, which is declared as {path!r} in {module!r}; move the function to the top "
            "level of a module"
        )
    return found


def find_rule(registry: Registry[R], name: str, *, key: str) -> R:
    """The rule ``name``, or the function if it is ``module:callable``.

    Raises `ConfigError` with ``key`` if it does not exist, or is not a rule of this kind.
    """
    try:
        return registry.find(function_of(name, key=key))
    except CreditError as error:
        raise ConfigError(f"{key}: {error}") from error


def reward_rule(name: str) -> RewardRule:
    """The reward rule ``name``. Raises `ConfigError` as `find_rule` does."""
    return find_rule(REWARD_RULES, name, key="credit.rewards")


def declared(registry: Registry[R], name: str) -> R | None:
    """The rule called ``name``, or None.

    None also for ``module:callable``: functions are not imported while a configuration is read.
    """
    return registry.get(name)


def with_parameter(registry: Registry[Any], name: str) -> list[str]:
    """Names of the rules with a parameter ``name``."""
    return [rule.name for rule in registry.values() if name in rule.parameters]


def goes_with(names: Sequence[str], found: str) -> str:
    """The error about a key that has an effect with the reward rules ``names`` only. ``found``: the rule of the configuration."""
    only = " only" if len(names) == 1 else ""
    return f"goes with rewards: {' | '.join(names)}{only}, but credit.rewards is {found!r}"


def example_of(parameter: Parameter) -> str:
    """The end of an error about a missing value: the parameter's example, or nothing."""
    return "" if parameter.example is None else f", such as {parameter.name}: {parameter.example:g}"


def argument_problems(
    rule: DeclaredRule, args: Mapping[str, Any], key: KeyPath, *, flat: tuple[str, ...] = ()
) -> Problems:
    """Yield problems of ``args``, the arguments of ``rule`` in the configuration.

    ``key``: the path of ``args``. ``flat``: parameters that have their own key in the section.
    """
    for name, value in args.items():
        if name in flat and name in rule.parameters:
            yield (*key, name), f"this argument has its own key; use {key[0]}.{name}"
        elif name not in rule.parameters:
            meant = did_you_mean(name, rule.parameters) if len(rule.parameters) > 1 else ""
            yield (*key, name), f"{rule.name!r} {rule.unknown(name)}{meant and f'; {meant}'}"
        else:
            yield from _type_problems(rule.parameters[name], value, (*key, name))
    for parameter in rule.parameters.values():
        if parameter.required and parameter.name not in (*flat, *args):
            section, mapping = key[0], key[-1]
            yield (
                (section, str(mapping).removesuffix("_args")),
                f"{rule.name!r} needs {section}.{mapping}.{parameter.name}{example_of(parameter)}",
            )


def _type_problems(parameter: Parameter, value: object, key: KeyPath) -> Problems:
    try:
        TypeAdapter(parameter.annotation).validate_python(value, strict=True)
    except ValidationError as error:
        for details in error.errors(include_url=False):
            path = (*key, *(part for part in details["loc"]))
            yield path, f"found {describe(details['input'])}, expected {expectation(details)}"
