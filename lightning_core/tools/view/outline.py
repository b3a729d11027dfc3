"""The tree of a rollout's agents, nodes, tools and calls, flattened to rows on a time axis."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lightning_core.trace import Call, Event, Trace

SCALE = 1000
"""Length of the time axis."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutlineRow:
    """One call or event of the tree."""

    item: Call | Event
    depth: int
    """Number of items above it; 0 for those directly below the rollout."""
    left: float
    width: float
    """Start and duration on an axis of length `SCALE`."""

    @property
    def kind(self) -> str:
        return "call" if isinstance(self.item, Call) else self.item.kind

    @property
    def name(self) -> str:
        if isinstance(self.item, Call):
            return self.item.agent or "no agent"
        return self.item.name


def make_outline(trace: Trace) -> list[OutlineRow]:
    """All calls and events but the rollout itself, each below its parent, in order of start.

    Items with an unknown parent are at the top. Foreign spans that form a cycle are too, so nothing is left out.
    """
    root = next(event for event in trace.events if event.kind == "rollout")
    items = sorted((i for i in (*trace.events, *trace.calls) if i.id != root.id), key=lambda i: (i.start_ns, i.id))
    start = min([root.start_ns, *(i.start_ns for i in items)])
    length = max([root.end_ns, *(i.end_ns for i in items)]) - start or 1
    return [
        OutlineRow(
            item=item,
            depth=depth,
            left=(item.start_ns - start) / length * SCALE,
            width=max(0, item.end_ns - item.start_ns) / length * SCALE,
        )
        for item, depth in _in_order(items, root.id)
    ]


def _in_order(items: Sequence[Call | Event], root: str) -> Iterator[tuple[Call | Event, int]]:
    """Each item after its parent, with its depth."""
    known = {item.id for item in items}
    children: dict[str, list[Call | Event]] = {}
    top: list[Call | Event] = []
    for item in items:
        if item.parent in known:
            children.setdefault(item.parent or "", []).append(item)
        else:
            top.append(item)
    seen: set[str] = {root}
    # After the tree, items in cycles: from none of these a parent leads to the root.
    for first in (*top, *items):
        # A stack, not recursion, since agents can be nested deeply.
        pending = [(first, 0)]
        while pending:
            item, depth = pending.pop()
            if item.id not in seen:
                seen.add(item.id)
                yield item, depth
                pending += [(child, depth + 1) for child in reversed(children.get(item.id, []))]
