"""Finds rollouts in a store by filters, a page at a time."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, NamedTuple, get_args

from lightning_core.records.store import Phase, RolloutRecord, Status, Store

Order = Literal["ordinal", "step", "task_id", "reward", "calls", "seconds"]
ORDERS: tuple[str, ...] = get_args(Order)
LARGEST = 10**9
"""The largest step, page or number of rollouts; SQLite has no integers beyond 64 bits."""
_AGENTS = "spans_by_agent"
_NEWEST = 200
"""Number of rollouts whose agents are listed if the store has no index of agents."""


def whole_number(text: str, *, least: int = 0) -> int:
    """``text`` as an integer from ``least`` to `LARGEST`. Raises `ValueError` with what was expected."""
    expected = f"expected a whole number from {least} to {LARGEST:,}"
    try:
        # The length first: Python refuses to convert thousands of digits.
        number = int(text) if len(text) <= 20 else None
    except ValueError:
        number = None
    if number is None or not least <= number <= LARGEST:
        raise ValueError(expected)
    return number


def finite_number(text: str) -> float:
    """``text`` as a finite number. Raises `ValueError` with what was expected."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ValueError("expected a finite number")
    return number


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutFilter:
    """The rollouts to find: those that match all fields that are set."""

    phase: Phase | None = None
    step: int | None = None
    task_id: str | None = None
    status: Status | None = None
    agent: str | None = None
    """The name of an agent that made a model call."""
    min_reward: float | None = None
    max_reward: float | None = None
    text: str | None = None
    """A text in a message, a tool call, an error or the task's id, regardless of the case of ASCII letters."""

    @property
    def is_range(self) -> bool:
        """Whether ``min_reward`` is at most ``max_reward``, or either is not set."""
        return self.min_reward is None or self.max_reward is None or self.min_reward <= self.max_reward


class Page(NamedTuple):
    """A part of the rollouts that match a filter."""

    rollouts: Sequence[RolloutRecord]
    total: int
    """The number of rollouts that match."""


class Matches(NamedTuple):
    """A part of the rollouts that match a filter, without their number."""

    rollouts: Sequence[RolloutRecord]
    more: bool
    """Whether more rollouts follow."""


def find_rollouts(
    store: Store,
    wanted: RolloutFilter | None = None,
    *,
    order: Order = "ordinal",
    descending: bool = False,
    limit: int = 50,
    offset: int = 0,
) -> Page:
    """The rollouts that match ``wanted`` (None: all), sorted by ``order``: at most ``limit`` of them, after the first ``offset``."""
    query, where, values = _query(store, wanted, order, descending)
    total = store.select(f"SELECT count(*) AS total FROM rollouts WHERE {where}", *values)[0]["total"]
    return Page(store.records(query, *values, limit, offset), int(total))


def first_rollouts(
    store: Store,
    wanted: RolloutFilter | None = None,
    *,
    order: Order = "ordinal",
    descending: bool = False,
    limit: int = 50,
    offset: int = 0,
) -> Matches:
    """`find_rollouts` without the total: in the order of storage it stops at the last match that is returned.

    A total needs all texts of the store if the filter has a text.
    """
    query, _, values = _query(store, wanted, order, descending)
    records = store.records(query, *values, limit + 1, offset)
    return Matches(records[:limit], len(records) > limit)


def _query(store: Store, wanted: RolloutFilter | None, order: str, descending: bool) -> tuple[str, str, Sequence[Any]]:
    """A SELECT statement that lacks the values of LIMIT and OFFSET, its condition, and the condition's values."""
    if order not in ORDERS:
        raise ValueError(f"found order {order!r}, expected one of {', '.join(ORDERS)}")
    conditions = list(_conditions(store, wanted or RolloutFilter()))
    where = " AND ".join(text for text, _ in conditions) or "1"
    values = [value for _, arguments in conditions for value in arguments]
    direction = "DESC" if descending else "ASC"
    column = "ended_ns - started_ns" if order == "seconds" else order
    # NULLS LAST on a column without nulls would keep SQLite from using its index.
    nulls = " NULLS LAST" if order == "reward" else ""
    query = f"SELECT * FROM rollouts WHERE {where} ORDER BY {column} {direction}{nulls}, ordinal {direction} LIMIT ? OFFSET ?"
    return query, where, values


def neighbours(store: Store, ordinal: int) -> tuple[int | None, int | None]:
    """The ordinals of the rollouts stored before and after ``ordinal``; None at the ends."""
    query = "SELECT max(ordinal) AS found FROM rollouts WHERE ordinal < ?"
    later = "SELECT min(ordinal) AS found FROM rollouts WHERE ordinal > ?"
    return store.select(query, ordinal)[0]["found"], store.select(later, ordinal)[0]["found"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Facets:
    """The values that rollouts can be filtered by."""

    phases: Sequence[str]
    statuses: Sequence[str]
    agents: Sequence[str]
    """In a store without an index of agents, the agents of the newest rollouts."""
    steps: tuple[int, int] | None
    """The first and the last step; None without rollouts."""


def facets(store: Store) -> Facets:
    """The values of the rollouts in ``store``."""

    def values(column: str) -> list[str]:
        query = f"SELECT DISTINCT {column} AS value FROM rollouts ORDER BY value"
        return [row["value"] for row in store.select(query)]

    steps = store.select("SELECT min(step) AS first, max(step) AS last FROM rollouts")[0]
    return Facets(
        phases=values("phase"),
        statuses=values("status"),
        agents=_agents(store),
        steps=None if steps["first"] is None else (steps["first"], steps["last"]),
    )


def _agents(store: Store) -> list[str]:
    if _has(store, "index", _AGENTS):
        # One search of the index for each name; DISTINCT would read the whole index.
        query = """
            WITH RECURSIVE names(value) AS (
                SELECT min(agent) FROM spans WHERE operation = 'chat'
                UNION ALL
                SELECT (SELECT min(agent) FROM spans WHERE operation = 'chat' AND agent > value)
                FROM names WHERE value IS NOT NULL
            )
            SELECT value FROM names WHERE value IS NOT NULL
        """
    else:
        newest = f"SELECT id FROM rollouts ORDER BY ordinal DESC LIMIT {_NEWEST}"
        query = f"""
            SELECT DISTINCT agent AS value FROM spans
            WHERE rollout IN ({newest}) AND operation = 'chat' AND agent IS NOT NULL ORDER BY value
        """
    return [row["value"] for row in store.select(query)]


def _has(store: Store, kind: str, name: str) -> bool:
    """Whether the store has this index or table; older ones lack the index of agents and shared contents."""
    return bool(store.select("SELECT 1 FROM sqlite_master WHERE type = ? AND name = ?", kind, name))


def _conditions(store: Store, wanted: RolloutFilter) -> Iterator[tuple[str, Sequence[Any]]]:
    """SQL conditions on ``rollouts``, and their values."""
    equal = ("phase", "step", "task_id", "status")
    for name in (f.name for f in fields(wanted)):
        value = getattr(wanted, name)
        if value is None:
            continue
        if name in equal:
            yield f"{name} = ?", [value]
        elif name == "min_reward":
            yield "reward >= ?", [value]
        elif name == "max_reward":
            yield "reward <= ?", [value]
        elif name == "agent":
            # Named, since SQLite would read the spans of each rollout.
            index = f" INDEXED BY {_AGENTS}" if _has(store, "index", _AGENTS) else ""
            by_agent = f"SELECT 1 FROM spans{index} WHERE agent = ? AND operation = 'chat' AND rollout = rollouts.id"
            yield f"EXISTS ({by_agent})", [value]
        elif value:
            yield _contains(value, shared=_has(store, "table", "contents"))


def _contains(text: str, *, shared: bool) -> tuple[str, Sequence[str]]:
    # Attributes are JSON with messages as JSON inside, and calls in those: quotes and characters beyond ASCII are escaped
    # up to three times.
    escaped = [text]
    for _ in range(3):
        escaped.append(json.dumps(escaped[-1])[1:-1])
    patterns = [_like(form) for form in dict.fromkeys(escaped)]
    plain = _like(text)
    # The first condition costs less, and excludes nearly all rows.
    likely = " OR ".join("attributes LIKE ? ESCAPE '!'" for _ in patterns)
    is_text = f"(({likely}) AND attribute_texts(attributes) LIKE ? ESCAPE '!')"
    found = f"EXISTS (SELECT 1 FROM spans WHERE rollout = rollouts.id AND (error LIKE ? ESCAPE '!' OR {is_text}))"
    values = [plain, plain, plain, *patterns, plain]
    if shared:
        found += " OR EXISTS (SELECT 1 FROM contents WHERE rollout = rollouts.id AND texts_of(data) LIKE ? ESCAPE '!')"
        values.append(plain)
    return f"(task_id LIKE ? ESCAPE '!' OR error LIKE ? ESCAPE '!' OR {found})", values


def _like(text: str) -> str:
    return "%" + text.replace("!", "!!").replace("%", "!%").replace("_", "!_") + "%"
