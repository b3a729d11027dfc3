"""Registries of rules. Signature and docstring of a rule are configuration and documentation.

    @advantage_rule("dr-grpo")
    def dr_grpo(groups):
        '''v − μ of the group (Dr. GRPO, arXiv 2503.20783).'''

A rule is a pure function. Its keyword-only parameters are configuration keys: the annotations are types and bounds, the defaults are
defaults. The arguments of the decorator are properties that the configuration and the trainers use.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Annotated, Any, ClassVar, Generic, Literal, TypeVar, get_args, get_origin, get_type_hints

from lightning_core.credit.signal_names import SIGNALS
from lightning_core.errors import CreditError, LightningError, did_you_mean, explain

F = TypeVar("F", bound=Callable[..., Any])
R = TypeVar("R", bound="DeclaredRule")

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


@dataclass(frozen=True, slots=True)
class Example:
    """Metadata of a parameter's annotation: the value that errors suggest if it is missing."""

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
        """The value of the annotation's `Example`, or None."""
        metadata = get_args(self.annotation)[1:] if get_origin(self.annotation) is Annotated else ()
        return next((item.value for item in metadata if isinstance(item, Example)), None)


@dataclass(frozen=True, kw_only=True)
class DeclaredRule:
    """A named rule."""

    name: str
    function: Callable[..., Any]

    @property
    def is_builtin(self) -> bool:
        """Whether Lightning declares the rule, which makes its name known in every process."""
        return self.function.__module__.partition(".")[0] == __name__.partition(".")[0]

    def __call__(self, *inputs: object, **arguments: object) -> Any:
        """The function's result. Raises `CreditError` with the user's lines if a function of the user's fails."""
        try:
            return self.function(*inputs, **arguments)
        except LightningError:
            raise
        except (Exception, SystemExit) as error:
            if self.is_builtin:
                raise
            raise CreditError(f"the function {self.name!r} failed:\n{explain(error)}") from error

    @cached_property
    def description(self) -> str:
        """The first paragraph of the docstring, on one line."""
        return " ".join((inspect.getdoc(self.function) or "").split("\n\n")[0].split())

    @cached_property
    def parameters(self) -> Mapping[str, Parameter]:
        """The function's keyword-only parameters, by name."""
        keywords = [p for p in _parameters(self.function) if p.kind is inspect.Parameter.KEYWORD_ONLY]
        written = {p.name: Any if p.annotation is inspect.Parameter.empty else p.annotation for p in keywords}
        # Other annotations may name types that are imported for type checking only.
        names = getattr(inspect.unwrap(self.function), "__globals__", {})
        try:
            types = get_type_hints(SimpleNamespace(__annotations__=written), globalns=names, include_extras=True)
        except NameError:  # a type that is local to a function
            types = dict.fromkeys(written, Any)
        return {p.name: Parameter(name=p.name, annotation=types[p.name], default=p.default) for p in keywords}

    def arguments(self, common: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
        """The function's keyword arguments: ``own``, and the arguments in ``common`` that it accepts.

        Raises `CreditError` for an unknown argument in ``own`` and for a missing one.
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
        """The end of an error about the unknown argument ``name``."""
        known = ", ".join(map(repr, self.parameters))
        expected = f"expected {'one of ' if len(self.parameters) > 1 else ''}{known}"
        return f"has no argument {name!r}; {expected if known else 'it takes no arguments'}"


@dataclass(frozen=True, kw_only=True)
class RewardRule(DeclaredRule):
    """``rule(episode, *, …)`` returns one value per transition, or a sequence of `Component`."""

    group: tuple[str, ...] = ("task",)
    """Default group keys, if ``group_by`` is not set."""
    depends_on: Callable[[Any], Hashable] | None = None
    """Returns everything in an episode that its values depend on, except the positions of its calls. Rollouts of a group with equal
    results get no advantage. None as the function or as its result: only the values are compared."""
    needs: tuple[str, ...] = ()
    """The signals that it reads, such as ``forks``, ``information_gain`` or ``critic``. With ``critic``, call
    ``rule(episode, expected, *, …)`` with the critic's value of each call."""
    baseline: str | None = None
    """The baseline that its values already have, so they are not compared within groups: "the critic", for example."""


@dataclass(frozen=True, kw_only=True)
class AdvantageRule(DeclaredRule):
    """``rule(groups, *, …)`` returns the advantages by call id.

    If a declared rule compares, calls of flat groups (one rollout, or equal values) get 0, unless it has ``flat_groups``. Only a rule with
    that or with ``whole_batch`` is passed them.
    """

    compares: Literal["group", "batch"] | None = "group"
    """Compares values within groups, over the batch (one group), or not at all."""
    whole_batch: bool = False
    """Whether it needs all rollouts of a step at once even though it compares within groups."""
    flat_groups: bool = False
    """Whether calls of flat groups get the advantages that it returns for them. Values of rollouts with equal outcomes
    (`RewardRule.depends_on`) are replaced by their mean."""

    @property
    def uses_groups(self) -> bool:
        """Whether its advantages can depend on the groups, which a user's rule always gets."""
        return self.compares == "group" or not self.is_builtin

    @property
    def needs_batch(self) -> bool:
        """Whether the rule needs all groups of a step at once; see `CreditRules.needs_batch` for the groups themselves."""
        return self.whole_batch or self.compares == "batch"

    @property
    def attempts(self) -> int:
        """The smallest ``rollouts.group_size`` that gives a signal."""
        return 2 if self.compares == "group" else 1


@dataclass(frozen=True, kw_only=True)
class GroupKey(DeclaredRule):
    """``key(episode)`` returns a string per transition; equal strings form a group."""


@dataclass(frozen=True, kw_only=True)
class Loss(DeclaredRule):
    """``loss(logprobs_E, log_ratio_E, advantages_E, *, …)`` returns `TokenLosses` or [E]."""

    ratio: Literal["token", "sequence"] | None = "token"
    """The unit of the ratio in ``log_ratio_E``. None: the loss uses no ratio, so only the first update of a step is correct."""
    whole_batch: bool = False
    """Whether a token's loss depends on the other tokens of its mini-batch. If so, the function is called with all tokens."""


_RULES_OF_SIGNALS = tuple(f"lightning_core.signals.{name}.rules" for name in SIGNALS)
_loading = threading.RLock()  # reentrant: what is imported may read a registry
_begun: set[str] = set()


class Registry(Mapping[str, R], Generic[R]):
    """The rules of one kind by name."""

    _all: ClassVar[list[Registry[Any]]] = []

    def __init__(
        self,
        kind: type[R],
        label: str,
        *,
        positional: tuple[str, ...],
        adapt: Callable[[Callable[..., Any]], Callable[..., Any]],
        modules: Sequence[str] = _RULES_OF_SIGNALS,
    ) -> None:
        """``positional``: names of the arguments that a rule is called with; ``adapt``: accepts other signatures; ``modules``: declare
        rules, and are imported when a rule is first looked up. Some may not exist.
        """
        self.label = label
        self.labels = f"{label}es" if label.endswith("s") else f"{label}s"
        self._kind = kind
        self._positional = positional
        self._adapt = adapt
        self._modules = modules
        self._is_loaded = False
        self._rules: dict[str, R] = {}
        self._all.append(self)

    def __getitem__(self, name: str) -> R:
        self._load()
        return self._rules[name]

    def __iter__(self) -> Iterator[str]:
        self._load()
        return iter(self._rules)

    def __len__(self) -> int:
        self._load()
        return len(self._rules)

    def find(self, rule: str | Callable[..., Any]) -> R:
        """The rule with this name or function. A function need not be declared.

        Raises `CreditError` for an unknown name, a rule of another kind, or a function with another signature.
        """
        if isinstance(rule, str):
            if rule not in self:
                meant = did_you_mean(rule, self)
                raise CreditError(
                    f"unknown {self.label} {rule!r}; expected one of {sorted(self)!r}{meant and f'; {meant}'}"
                )
            return self[rule]
        for registry in self._all:
            for known in registry.values():
                if known.function is rule:
                    if registry is not self:
                        raise CreditError(
                            f"found {known.name!r} of the {registry.labels}, expected one of the {self.labels}"
                        )
                    return known
        name, function = getattr(rule, "__name__", repr(rule)), self._adapt(rule)
        if not _accepts(function, len(self._positional)):
            raise CreditError(
                f"the function {name}{inspect.signature(rule)} cannot be one of the {self.labels}; "
                f"expected the signature ({', '.join(self._positional)}, *, …)"
            )
        return self._kind(name=name, function=function)

    def declare(self, name: str, function: F, **properties: Any) -> F:
        """Add a rule. Raises `CreditError` if another function has this name."""
        before = self._rules.get(name)
        if before is not None and _qualified_name(before.function) != _qualified_name(function):
            raise CreditError(
                f"{self.label} {name!r} is already declared by {'.'.join(_qualified_name(before.function))}; use another name"
            )
        self._rules[name] = self._kind(name=name, function=function, **properties)
        return function

    def forget(self, name: str) -> None:
        """Remove a rule."""
        del self._rules[name]

    def _load(self) -> None:
        # They import modules of this package, and declare rules in several registries.
        if self._is_loaded:
            return
        with _loading:
            for name in self._modules:
                if name not in _begun:
                    _begun.add(name)
                    try:
                        if find_spec(name) is not None:
                            import_module(name)
                    except BaseException:
                        _begun.discard(name)
                        raise
            self._is_loaded = True


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # some builtins have no signature
        return []


def _accepts(function: Callable[..., Any], count: int) -> bool:
    """Whether ``function`` can be called with ``count`` positional arguments."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some builtins have no signature
        return True
    positional = [p for p in parameters if p.kind in _POSITIONAL]
    required = sum(p.default is p.empty for p in positional)
    return required <= count and (count <= len(positional) or any(p.kind is p.VAR_POSITIONAL for p in parameters))


def _qualified_name(function: Callable[..., Any]) -> tuple[str, str]:
    return function.__module__, function.__qualname__


def _unchanged(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


def _with_gamma(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function(episode, gamma)`` as a rule with the keyword ``gamma``; others unchanged."""
    positional = [p for p in _parameters(function) if p.kind in _POSITIONAL]
    if len(positional) < 2 or sum(p.default is p.empty for p in positional) > 2:
        return function

    def rule(episode: Any, *, gamma: float = 1.0) -> Any:
        return function(episode, gamma)

    rule.__name__, rule.__doc__ = getattr(function, "__name__", repr(function)), function.__doc__
    rule.__module__ = getattr(function, "__module__", None) or rule.__module__
    return rule


REWARD_RULES: Registry[RewardRule] = Registry(RewardRule, "reward rule", positional=("episode",), adapt=_with_gamma)
ADVANTAGE_RULES: Registry[AdvantageRule] = Registry(
    AdvantageRule, "advantage rule", positional=("groups",), adapt=_unchanged
)
GROUP_KEYS: Registry[GroupKey] = Registry(GroupKey, "group key", positional=("episode",), adapt=_unchanged)
LOSSES: Registry[Loss] = Registry(
    Loss, "loss", positional=("logprobs_E", "log_ratio_E", "advantages_E"), adapt=_unchanged
)


def reward_rule(
    name: str,
    *,
    group: tuple[str, ...] = ("task",),
    depends_on: Callable[[Any], Hashable] | None = None,
    needs: tuple[str, ...] = (),
    baseline: str | None = None,
) -> Callable[[F], F]:
    """Declare a reward rule; see `RewardRule` for the arguments.

    Raises `CreditError` if the function needs another positional argument.
    """

    def declare(function: F) -> F:
        extra = [p.name for p in _parameters(function) if p.kind in _POSITIONAL and p.default is p.empty]
        if len(extra) > (limit := 2 if "critic" in needs else 1):
            raise CreditError(
                f"the reward rule {name!r} has the positional parameter {extra[limit]!r}; write '*' before it, as in "
                f"'def rule({', '.join(extra[:limit])}, *, {extra[limit]})', or use the function as 'module:callable' without declaring it"
            )
        return REWARD_RULES.declare(
            name,
            function,
            group=group,
            depends_on=depends_on,
            needs=needs,
            baseline=baseline,
        )

    return declare


def advantage_rule(
    name: str,
    *,
    compares: Literal["group", "batch"] | None = "group",
    whole_batch: bool = False,
    flat_groups: bool = False,
) -> Callable[[F], F]:
    """Declare an advantage rule; see `AdvantageRule` for the arguments."""
    return lambda function: ADVANTAGE_RULES.declare(
        name, function, compares=compares, whole_batch=whole_batch, flat_groups=flat_groups
    )


def group_key(name: str) -> Callable[[F], F]:
    """Declare a group key."""
    return lambda function: GROUP_KEYS.declare(name, function)


def loss(
    name: str, *, ratio: Literal["token", "sequence"] | None = "token", whole_batch: bool = False
) -> Callable[[F], F]:
    """Declare a loss; see `Loss` for the arguments."""
    return lambda function: LOSSES.declare(name, function, ratio=ratio, whole_batch=whole_batch)
