"""The registry of monitors. Signature and docstring of a monitor are configuration and documentation.

    @monitor("slow")
    def slow(history, held_out, *, seconds: Limit = 60.0):
        '''A step takes longer than `seconds`.'''
        found = history[-1]["seconds_rollouts"]
        return f"the rollouts took {found:.0f} s; lower rollouts.max_tokens" if found > seconds else None

``history`` has the metrics of each step as in ``metrics.jsonl``, oldest first, at least one; ``held_out`` the mean reward of
each held-out task, by the number of updates before the evaluation and by task id. The result is a message, or None.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from annotated_types import Ge, Gt, Le

from lightning_core.credit.registry import DeclaredRule, Registry
from lightning_core.errors import CreditError

F = TypeVar("F", bound=Callable[..., Any])

History = Sequence[Mapping[str, Any]]
"""The metrics of each step, oldest first. Numbers that were not finite are None."""
HeldOut = Mapping[int, Mapping[str, float]]
"""The mean reward of each held-out task, by the number of updates before the evaluation, then by task id."""
Steps = Annotated[int, Ge(1)]
Share = Annotated[float, Gt(0), Le(1)]
Limit = Annotated[float, Gt(0)]


@dataclass(frozen=True, kw_only=True)
class MonitorRule(DeclaredRule):
    """``monitor(history, held_out, *, …)`` returns a message, or None."""

    each_policy: bool = False
    """Whether it is called per policy, with the metrics ``NAME/metric`` as ``metric``."""
    needs_evaluations: bool = False
    """Whether it compares evaluations during training."""
    unless: str | None = None
    """The monitor of this name says more: while it holds, this one is not reported."""


MONITORS: Registry[MonitorRule] = Registry(
    MonitorRule,
    "monitor",
    positional=("history", "held_out"),
    adapt=lambda function: function,
    modules=("lightning_core.observers.monitors",),
)


def monitor(
    name: str,
    *,
    each_policy: bool = False,
    needs_evaluations: bool = False,
    unless: str | None = None,
) -> Callable[[F], F]:
    """Declare a monitor; see `MonitorRule` for the arguments."""
    return lambda function: MONITORS.declare(
        name,
        function,
        each_policy=each_policy,
        needs_evaluations=needs_evaluations,
        unless=unless,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """A monitor of a run, and its arguments."""

    rule: MonitorRule
    arguments: Mapping[str, Any]


def watched(
    *,
    disable: Collection[str] = (),
    args: Mapping[str, Mapping[str, Any]] | None = None,
    add: Mapping[str, Callable[..., Any]] | None = None,
) -> list[Watched]:
    """Lightning's own monitors without those in ``disable``, and the functions in ``add``, by the names that ``args`` uses for them.

    Raises `CreditError` for an unknown argument, a function with another signature, and for two monitors of one name.
    """
    args = args or {}
    builtin = {name: rule for name, rule in MONITORS.items() if rule.is_builtin and name not in disable}
    taken = {rule.name for rule in MONITORS.values() if rule.is_builtin}
    for key, function in (add or {}).items():
        rule = MONITORS.find(function)
        if rule.name in taken:
            raise CreditError(f"the monitor {key!r} has the name {rule.name!r}, which is taken; rename the function")
        taken.add(rule.name)
        builtin[key] = rule
    return [Watched(rule=rule, arguments=rule.arguments({}, args.get(key, {}))) for key, rule in builtin.items()]
