"""What the doctor finds in lists of tasks."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_core.tools.doctor.finding import Finding
from lightning_core.tools.doctor.tasks import TaskLists, checks
from tests.tools.doctor.conftest import named


def examine(train: list[dict[str, Any]], held_out: list[dict[str, Any]], limit: int | None = None) -> list[Finding]:
    lists = TaskLists(train=train, eval=held_out, eval_limit=limit, tasks_per_step=4)
    return list(checks.examine("tasks", lists))


def numbered(count: int, first: int = 0) -> list[dict[str, Any]]:
    return [{"id": f"q{n}", "question": f"{n}?"} for n in range(first, first + count)]


def test_enough_different_tasks_are_healthy() -> None:
    assert [(f.name, f.level) for f in examine(numbered(8), numbered(30, 100))] == [("number", "ok")]


@pytest.mark.parametrize(
    ("count", "text"), [(1, "learn its answer by heart"), (3, "fewer than rollouts.tasks_per_step")]
)
def test_too_few_training_tasks_are_named(count: int, text: str) -> None:
    (few,) = named(examine(numbered(count), []), "number")
    assert text in few.found


def test_equal_content_under_several_ids_is_named() -> None:
    (copies,) = named(examine([*numbered(4), {"question": "2?", "id": "again"}], []), "duplicates")
    assert copies.found == "1 of 5 training tasks repeat the content of another: again"


def test_tasks_that_are_only_an_id_differ() -> None:
    found = examine([{"id": "a"}, {"id": "b"}], [{"id": "c"}])
    assert named(found, "duplicates") == named(found, "overlap") == []


def test_a_part_of_the_held_out_tasks_that_is_trained_on_is_a_problem() -> None:
    (overlap,) = named(
        examine(numbered(4), [{"id": "e", "question": "0?"}, {"id": "q0", "question": "new"}]), "overlap"
    )
    assert (overlap.level, overlap.found) == ("problem", "1 of 2 evaluated tasks are also training tasks: e")


def test_only_the_tasks_that_are_evaluated_count() -> None:
    """As in training, which checks the same sample."""
    held_out = [*numbered(9, 100), {"id": "e", "question": "0?"}]
    found = [named(examine(numbered(4), held_out, limit), "overlap") for limit in (1, 10)]
    assert [len(f) for f in found] == [0, 1]


def test_more_evaluated_tasks_than_there_are_is_named() -> None:
    (more,) = named(examine(numbered(4), numbered(40, 100), limit=50), "eval.tasks")
    assert more.found == "eval.tasks is 50, but there are 40 held-out tasks"
    assert named(examine(numbered(4), numbered(40, 100), limit=40), "eval.tasks") == []


def test_an_id_of_two_tasks_is_named() -> None:
    held_out = [{"id": "q1", "question": "other?"}, *numbered(30, 100)]
    assert [(f.name, f.level, f.found) for f in examine(numbered(8), held_out) if f.level != "ok"] == [
        ("ids", "warning", "1 of 31 held-out tasks have the id of a training task of other content: q1")
    ]


def test_ids_that_are_numbers_are_the_tasks_own() -> None:
    """Loading tasks without ids logs a warning; the doctor cannot see the difference."""
    tasks = [{"id": str(n), "question": f"{n}?"} for n in range(8)]
    assert [f.level for f in examine(tasks, [])] == ["ok"]
