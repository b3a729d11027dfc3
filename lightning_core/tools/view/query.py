"""The query of a URL as typed values. A value that cannot be read is a problem to show, never an error."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar, get_args
from urllib.parse import urlencode

from lightning_core.records.store import Phase, Status
from lightning_core.tools.runs.browse import ORDERS, Order, RolloutFilter, finite_number, whole_number

T = TypeVar("T")

PAGE_SIZE = 50


@dataclass(slots=True)
class Query:
    """The parameters of a URL, and the problems of those that were read so far."""

    given: Mapping[str, str]
    problems: list[str] = field(default_factory=list[str])

    def text(self, name: str) -> str | None:
        """The value of ``name``; None without one, or if it is empty."""
        return self.given.get(name) or None

    def choice(self, name: str, known: Sequence[str]) -> str | None:
        """The value of ``name``, which must be one of ``known``."""
        value = self.text(name)
        if value is not None and value not in known:
            self.problems.append(f"{name}: found {value!r}, expected one of {', '.join(known)}")
            return None
        return value

    def whole(self, name: str, *, least: int = 0) -> int | None:
        """The value of ``name`` as an integer from ``least``."""
        return self._parsed(name, partial(whole_number, least=least))

    def number(self, name: str) -> float | None:
        """The value of ``name`` as a finite number."""
        return self._parsed(name, finite_number)

    def only(self, known: Sequence[str]) -> None:
        """Report parameters that are not in ``known``."""
        self.problems += [
            f"{name}: unknown parameter, expected one of {', '.join(known)}" for name in self.given if name not in known
        ]

    def _parsed(self, name: str, parse: Callable[[str], T]) -> T | None:
        text = self.text(name)
        if text is None:
            return None
        try:
            return parse(text)
        except ValueError as error:
            self.problems.append(f"{name}: found {text!r}, {error}")
            return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """The rollouts to list, and their order."""

    wanted: RolloutFilter
    order: Order
    descending: bool
    page: int
    """The page's number, from 1."""
    given: Mapping[str, str]
    problems: Sequence[str]

    @property
    def offset(self) -> int:
        return (self.page - 1) * PAGE_SIZE

    @property
    def is_filtered(self) -> bool:
        return self.wanted != RolloutFilter()

    def link(self, **changes: Any) -> str:
        """The query of this listing with ``changes``; None removes a parameter."""
        return with_changes(self.given, changes)

    def sorted_by(self, order: str) -> str:
        """The query of this listing by ``order``; in the other direction if it has that order already."""
        turned = self.order == order and not self.descending
        return self.link(sort=order, direction="down" if turned else "up", page=None)


def with_changes(parameters: Mapping[str, str], changes: Mapping[str, Any]) -> str:
    """``?`` and ``parameters`` with ``changes``; None removes a parameter."""
    values = {name: value for name, value in {**parameters, **changes}.items() if value not in (None, "")}
    return f"?{urlencode(values, errors='backslashreplace')}"


_LISTING = ("phase", "step", "task", "agent", "status", "min", "max", "text", "sort", "direction", "page")


def read_listing(parameters: Mapping[str, str]) -> Listing:
    """The listing that ``parameters`` describe; without ``sort``, the newest rollouts first."""
    query = Query(parameters)
    query.only(_LISTING)
    filters = RolloutFilter(
        phase=query.choice("phase", get_args(Phase)),  # type: ignore[arg-type]
        step=query.whole("step"),
        task_id=query.text("task"),
        agent=query.text("agent"),
        status=query.choice("status", get_args(Status)),  # type: ignore[arg-type]
        min_reward=query.number("min"),
        max_reward=query.number("max"),
        text=query.text("text"),
    )
    if not filters.is_range:
        query.problems.append(f"min: found {parameters['min']}, expected at most max, which is {parameters['max']}")
    order = query.choice("sort", ORDERS)
    direction = query.choice("direction", ("up", "down"))
    return Listing(
        wanted=filters,
        order=order or "ordinal",  # type: ignore[arg-type]
        descending=direction == "down" if order or direction else True,
        page=query.whole("page", least=1) or 1,
        given=parameters,
        problems=query.problems,
    )
