"""The registry of rules: each a pure function whose signature is its configuration and whose docstring is its documentation.

    @advantage_rule("dr-grpo")
    def dr_grpo(groups):
        '''v − μ of the group (Dr. GRPO, arXiv 2503.20783).'''

Keyword-only parameters are the rule's configuration: their names are the keys, their annotations the types and bounds, their defaults the
defaults. The arguments of a decorator are facts that the configuration and the trainers need.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from types import SimpleNamespace
from typing import Annotated, Any, Generic, Literal, TypeVar, get_args, get_origin, get_type_hints

from lightning_core.errors import CreditError

F = TypeVar("F", bound=Callable[..., Any])
R = TypeVar("R", bound="DeclaredRule")


@dataclass(frozen=True, slots=True)
class Example:
    """Metadata of a parameter's annotation: a value to suggest where it is missing."""

    value: object


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """A keyword-only parameter of a rule."""

    name: str
    annotation: Any
    default: Any = inspect.Parameter.empty

    @property
    def required(self) -> bool:
        return self.default is inspect.Parameter.empty

    @property
    def example(self) -> object:
        """The value of the annotation's `Example`; None without one."""
        metadata = get_args(self.annotation)[1:] if get_origin(self.annotation) is Annotated else ()
        return next((item.value for item in metadata if isinstance(item, Example)), None)


@dataclass(frozen=True, kw_only=True)
class DeclaredRule:
    """A named rule."""

    name: str
    function: Callable[..., Any]

    @cached_property
    def description(self) -> str:
        """The first paragraph of the docstring, on one line."""
        return " ".join((inspect.getdoc(self.function) or "").split("\n\n")[0].split())

    @cached_property
    def parameters(self) -> Mapping[str, Parameter]:
        """The function's keyword-only parameters, by name."""
        keywords = [p for p in _parameters(self.function) if p.kind is inspect.Parameter.KEYWORD_ONLY]
        written = {p.name: Any if p.annotation is inspect.Parameter.empty else p.annotation for p in keywords}
        # Only these annotations are evaluated: the others may name types that are imported for type checkers alone.
        names = getattr(inspect.unwrap(self.function), "__globals__", {})
        try:
            types = get_type_hints(SimpleNamespace(__annotations__=written), globalns=names, include_extras=True)
        except NameError:  # of a type that is local to some function
            types = dict.fromkeys(written, Any)
        return {p.name: Parameter(name=p.name, annotation=types[p.name], default=p.default) for p in keywords}

    def arguments(self, common: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
        """The keyword arguments of the function: ``own``, and those of ``common`` that it has.

        Raises `CreditError` for an argument in ``own`` that it does not have, and for one that it requires and was not given.
        """
        for name in own:
            if name not in self.parameters:
                raise CreditError(f"{self.name!r} {self.unknown(name)}")
        given = {**{name: value for name, value in common.items() if name in self.parameters}, **own}
        missing = [p.name for p in self.parameters.values() if p.required and p.name not in given]
        if missing:
            raise CreditError(f"{self.name!r} needs the argument {missing[0]!r}")
        return given

    def unknown(self, name: str) -> str:
        """The end of an error about an argument that the rule does not have."""
        known = ", ".join(map(repr, self.parameters))
        return f"has no argument {name!r}; {f'its arguments are {known}' if known else 'it has none'}"


@dataclass(frozen=True, kw_only=True)
class RewardRule(DeclaredRule):
    """``rule(episode, *, …)``: a value for each of the episode's transitions, or a sequence of `Component`."""

    group: tuple[str, ...] = ("task",)
    """Group keys under which its values are compared unless ``group_by`` is set."""
    depends_on: Callable[[Any], Hashable] | None = None
    """Of an episode: all that its values depend on, besides the places of its calls. Rollouts of a group that agree in it get no advantage.
    None, for the whole function or for an episode: the values decide."""
    needs_critic: bool = False
    """Called as ``rule(episode, expected, *, …)`` with the critic's value of each call. The critic is the baseline."""


@dataclass(frozen=True, kw_only=True)
class AdvantageRule(DeclaredRule):
    """``rule(groups, *, …)``: the advantage of each call, by its id."""

    compares: Literal["group", "batch"] | None = "group"
    """Within each group; over the batch, which is then the only group; or not at all."""
    whole_batch: bool = False
    """Whether it needs all rollouts of a step at once, although it compares within groups."""

    @property
    def needs_batch(self) -> bool:
        """Whether groups cannot be given advantages one by one."""
        return self.whole_batch or self.compares == "batch"

    @property
    def attempts(self) -> int:
        """The smallest ``rollouts.group_size`` that gives a signal."""
        return 2 if self.compares == "group" else 1


@dataclass(frozen=True, kw_only=True)
class GroupKey(DeclaredRule):
    """``key(episode)``: for each of the episode's transitions a string; calls of one group have the same one."""


@dataclass(frozen=True, kw_only=True)
class Loss(DeclaredRule):
    """``loss(logprobs_E, log_ratio_E, advantages_E, *, …)``: `TokenLosses`, or a tensor [E]."""

    ratio: Literal["token", "sequence"] | None = "token"
    """Whose probability ratio ``log_ratio_E`` is. None: the loss uses no ratio, so only the first update of a step is right."""


class Registry(Mapping[str, R], Generic[R]):
    """The rules of one kind by name."""

    def __init__(self, kind: type[R], what: str, *, plain: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        self.what = what
        self._kind = kind
        self._plain = plain
        self._rules: dict[str, R] = {}

    def __getitem__(self, name: str) -> R:
        return self._rules[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._rules)

    def __len__(self) -> int:
        return len(self._rules)

    def find(self, rule: str | Callable[..., Any]) -> R:
        """The rule of that name, or of that function, which need not be declared. Raises `CreditError` for an unknown name."""
        if isinstance(rule, str):
            if rule not in self:
                near = get_close_matches(rule, self, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise CreditError(f"unknown {self.what} {rule!r}; known are {sorted(self)!r}{hint}")
            return self[rule]
        declared = next((known for known in self._rules.values() if known.function is rule), None)
        return declared or self._kind(name=getattr(rule, "__name__", repr(rule)), function=self._plain(rule))

    def declare(self, name: str, function: F, **facts: Any) -> F:
        """Add a rule. Raises `CreditError` if another function has the name."""
        before = self._rules.get(name)
        if before is not None and _place(before.function) != _place(function):
            raise CreditError(f"there is a {self.what} {name!r} already: {'.'.join(_place(before.function))}")
        self._rules[name] = self._kind(name=name, function=function, **facts)
        return function

    def forget(self, name: str) -> None:
        """Remove a rule."""
        del self._rules[name]


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # some builtins have no signature
        return []


def _place(function: Callable[..., Any]) -> tuple[str, str]:
    return function.__module__, function.__qualname__


def _as_it_is(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


def _with_gamma(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function(episode, gamma)`` as a rule with the parameter ``gamma``; others as they are."""
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    if sum(p.kind in positional for p in _parameters(function)) < 2:
        return function

    def rule(episode: Any, *, gamma: float = 1.0) -> Any:
        return function(episode, gamma)

    rule.__name__, rule.__doc__ = getattr(function, "__name__", repr(function)), function.__doc__
    return rule


REWARD_RULES: Registry[RewardRule] = Registry(RewardRule, "reward rule", plain=_with_gamma)
ADVANTAGE_RULES: Registry[AdvantageRule] = Registry(AdvantageRule, "advantage rule", plain=_as_it_is)
GROUP_KEYS: Registry[GroupKey] = Registry(GroupKey, "group key", plain=_as_it_is)
LOSSES: Registry[Loss] = Registry(Loss, "loss", plain=_as_it_is)


def reward_rule(
    name: str,
    *,
    group: tuple[str, ...] = ("task",),
    depends_on: Callable[[Any], Hashable] | None = None,
    needs_critic: bool = False,
) -> Callable[[F], F]:
    """Declare a reward rule; the facts are those of `RewardRule`."""
    return lambda function: REWARD_RULES.declare(
        name, function, group=group, depends_on=depends_on, needs_critic=needs_critic
    )


def advantage_rule(
    name: str, *, compares: Literal["group", "batch"] | None = "group", whole_batch: bool = False
) -> Callable[[F], F]:
    """Declare an advantage rule; the facts are those of `AdvantageRule`."""
    return lambda function: ADVANTAGE_RULES.declare(name, function, compares=compares, whole_batch=whole_batch)


def group_key(name: str) -> Callable[[F], F]:
    """Declare a group key."""
    return lambda function: GROUP_KEYS.declare(name, function)


def loss(name: str, *, ratio: Literal["token", "sequence"] | None = "token") -> Callable[[F], F]:
    """Declare a loss; the facts are those of `Loss`."""
    return lambda function: LOSSES.declare(name, function, ratio=ratio)
