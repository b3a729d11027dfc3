"""Rollouts are found by filters, sorted, a page at a time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lightning_core import trace as tr
from lightning_core.records.store import Store
from lightning_core.tools.runs.browse import RolloutFilter, facets, find_rollouts, first_rollouts, neighbours
from lightning_core.trace import SpanRecord
from tests.records.test_store import record, root

TEXTS = ["plain", 'a "quoted" word', "naïve 🚀", "100% of_it"]


def spans(identity: str, agent: str, text: str) -> list[SpanRecord]:
    """A rollout with one call of ``agent`` that got ``text``."""
    messages = json.dumps([{"role": "user", "content": text}])
    attributes = {tr.OPERATION: "chat", tr.AGENT: agent, tr.INPUT_MESSAGES: messages}
    times: dict[str, Any] = {"start_ns": 10, "end_ns": 20}
    call = SpanRecord(name="c", trace_id=identity, span_id="b" * 16, parent_id=None, attributes=attributes, **times)
    return [root(identity), call]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    opened = Store(tmp_path / "store.db")
    for n, text in enumerate(TEXTS):
        identity = f"{n:032x}"
        made = record(
            identity, step=n // 2, task_id=f"t{n % 2}", reward=None if n == 3 else n / 2, ended_ns=100 - n,
            status="failed" if n == 3 else "ok", error="ValueError: no 7" if n == 3 else None,
        )  # fmt: skip
        opened.add_rollout(made, spans(identity, "ab"[n % 2], text))
    return opened


def ordinals(store: Store, **wanted: Any) -> list[int]:
    return [r.ordinal for r in find_rollouts(store, RolloutFilter(**wanted)).rollouts]


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ({}, [1, 2, 3, 4]),
        ({"phase": "train", "step": 1}, [3, 4]),
        ({"phase": "eval"}, []),
        ({"task_id": "t1"}, [2, 4]),
        ({"status": "failed"}, [4]),
        ({"agent": "b"}, [2, 4]),
        ({"min_reward": 0.5}, [2, 3]),
        ({"max_reward": 0.5}, [1, 2]),
        ({"text": "PLAIN"}, [1]),
        ({"text": '"quoted"'}, [2]),
        ({"text": "naïve 🚀"}, [3]),
        ({"text": "100% of_"}, [4]),
        ({"text": "100% of-"}, []),
        ({"text": "no 7"}, [4]),
        ({"text": ""}, [1, 2, 3, 4]),
        ({"text": "content"}, []),
        ({"text": "user"}, []),
        ({"text": "chat"}, []),
        ({"agent": "b", "step": 0}, [2]),
    ],
)
def test_rollouts_match_all_filters(store: Store, wanted: dict[str, Any], expected: list[int]) -> None:
    assert ordinals(store, **wanted) == expected


def test_pages_are_sorted_and_know_the_total(store: Store) -> None:
    page = find_rollouts(store, order="reward", descending=True, limit=2)
    assert ([r.ordinal for r in page.rollouts], page.total) == ([3, 2], 4)
    page = find_rollouts(store, order="reward", descending=True, limit=2, offset=2)
    assert [r.ordinal for r in page.rollouts] == [1, 4], "rollouts without a reward come last"
    assert [r.ordinal for r in find_rollouts(store, order="seconds").rollouts] == [4, 3, 2, 1]
    with pytest.raises(ValueError, match="found order 'id; DROP'"):
        find_rollouts(store, order="id; DROP")  # type: ignore[arg-type]


def test_the_first_matches_are_found_without_a_total(store: Store) -> None:
    found = first_rollouts(store, RolloutFilter(phase="train"), limit=3)
    assert ([r.ordinal for r in found.rollouts], found.more) == ([1, 2, 3], True)
    found = first_rollouts(store, RolloutFilter(phase="train"), limit=3, offset=3)
    assert ([r.ordinal for r in found.rollouts], found.more) == ([4], False)
    assert [r.ordinal for r in first_rollouts(store, order="reward", descending=True).rollouts] == [3, 2, 1, 4]


def test_stores_without_the_index_of_agents_are_filtered_too(store: Store) -> None:
    store.select("DROP INDEX spans_by_agent")
    assert facets(store).agents == ["a", "b"]
    assert ordinals(store, agent="b") == [2, 4]


def test_facets_and_neighbours(store: Store) -> None:
    found = facets(store)
    assert (found.phases, found.statuses, found.agents) == (["train"], ["failed", "ok"], ["a", "b"])
    assert found.steps == (0, 1)
    assert neighbours(store, 1) == (None, 2)
    assert neighbours(store, 4) == (3, None)
