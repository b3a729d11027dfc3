"""The tasks of a run, and all attempts at one, first to last."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
import pytest

from lightning_core.records.store import Store
from lightning_core.records.task_history import find_tasks
from lightning_core.view.attempts_plot import HEIGHT, WIDTH, make_attempts_plot
from tests.view.made_runs import make_run, rollout
from tests.view.pages import Seen, browsing, is_harmless
from tests.view.recorded_run import TASK


def test_tasks_have_their_first_and_last_means(sample: httpx.Client) -> None:
    seen = Seen(sample.get("/runs/sample/tasks").text)
    assert "held-out held-out 0–2 2 0.000 1.000 +1.000 1.000 1" in seen.text
    assert f"{TASK} training 0–1 9 (1 left out) 0.625 0.625 +0.000 1.000 4" in seen.text
    assert "/runs/sample/tasks/%3Cscript%3Etask%3C/script%3E/1" in seen.links


def test_tasks_are_found_sorted_and_counted(tmp_path: Path) -> None:
    made = [
        rollout(1, task_id="a", step=0, reward=0.0),
        rollout(2, task_id="a", step=5, reward=0.5),
        rollout(3, task_id="a", step=5, reward=1.0),
        rollout(4, task_id="A b", step=1, reward=0.25),
        rollout(5, task_id="c", step=1, status="invalid", reward=None),
        rollout(6, task_id="c", step=1, phase="judge"),
        rollout(7, task_id="a", step=9, phase="eval_after", reward=0.1),
    ]
    make_run(tmp_path / "made", rollouts=made)
    with Store(tmp_path / "made" / "store.db", read_only=True) as store:
        found = {(t.task_id, t.held_out): t for t in find_tasks(store).tasks}
        assert set(found) == {("a", False), ("a", True), ("A b", False), ("c", False)}
        a, c = found["a", False], found["c", False]
        assert (a.attempts, a.first, a.last, a.best, a.solved, a.first_step, a.last_step) == (
            3,
            0.0,
            0.75,
            1.0,
            1,
            0,
            5,
        )
        assert (c.attempts, c.failures, c.first, c.last, c.best, c.solved) == (1, 1, None, None, None, 0)
        assert find_tasks(store, solved=0.5).tasks[1].solved == 2
        by_gain = find_tasks(store, order="gain", descending=True)
        assert [t.task_id for t in by_gain.tasks] == ["a", "A b", "a", "c"]
        assert [t.task_id for t in find_tasks(store, text="A").tasks] == ["A b", "a", "a"]
        page = find_tasks(store, limit=1, offset=2)
        assert (len(page.tasks), page.total) == (1, 4)
        with pytest.raises(ValueError, match="found order '1; DROP'"):
            find_tasks(store, order="1; DROP")  # type: ignore[arg-type]


def test_the_reward_that_solves_a_task_is_the_configurations(tmp_path: Path) -> None:
    made = [rollout(1, task_id="a", reward=0.5)]
    make_run(tmp_path / "high", rollouts=made)
    make_run(tmp_path / "low", rollouts=made, config={"eval": {"solved": 0.5}})
    with browsing(tmp_path) as client:
        for run, solved, mark in (("high", "0", " "), ("low", "1", " yes ")):
            assert f"0.500 – 0.500 {solved}" in Seen(client.get(f"/runs/{run}/tasks").text).text
            assert f"train 0.500{mark}hello" in Seen(client.get(f"/runs/{run}/tasks/a").text).text


def test_all_attempts_at_a_task_are_in_order_with_their_answers(sample: httpx.Client) -> None:
    html = sample.get("/runs/sample/tasks/%3Cscript%3Etask%3C/script%3E/1").raise_for_status().text
    assert is_harmless(html)
    table = html[html.index("<tbody") :]
    assert re.findall(r'/rollouts/(\d+)">', table) == [str(n) for n in range(1, 10)]
    assert Seen(table).text.count("<script>alert(2)</script>") == 8
    assert re.findall(r"<title>rollout (\d+), (\w+) at step (\d+)", html) == [
        (str(n), "train", str((n - 1) // 4)) for n in range(1, 9)
    ]
    assert "infrastructure TimeoutError: <i>no such page</i>" in Seen(table).text
    held_out = sample.get("/runs/sample/tasks/held-out").text
    assert "held-out, before training held-out, after training" in Seen(held_out).text


@pytest.mark.parametrize("path", ["none", "%2e%2e", "..%2f..%2f..%2fetc%2fpasswd", "a/b/c", "%00"])
def test_unknown_tasks_are_not_found(sample: httpx.Client, path: str) -> None:
    response = sample.get(f"/runs/sample/tasks/{path}")
    assert response.status_code == 404
    assert is_harmless(response.text)


@pytest.mark.parametrize(("path", "message"), [
    ("tasks?sort=name", "sort: found 'name', expected one of task_id"),
    ("tasks?direction=<i>", "direction: found '<i>', expected one of up, down"),
    ("tasks/held-out?page=x", "page: found 'x', expected a whole number from 1"),
    ("tasks/held-out?phase=train", "phase: unknown parameter"),
])  # fmt: skip
def test_a_bad_value_is_a_message(sample: httpx.Client, path: str, message: str) -> None:
    response = sample.get(f"/runs/sample/{path}")
    assert response.status_code == 400
    assert message in Seen(response.text).text
    assert is_harmless(response.text)


def test_many_attempts_are_on_pages(tmp_path: Path) -> None:
    make_run(tmp_path / "many", rollouts=[rollout(n, task_id="t", step=n // 10) for n in range(1, 61)])
    with browsing(tmp_path) as client:
        first, second = (client.get(f"/runs/many/tasks/t?page={n}").text for n in (1, 2))
        assert ("data-next" in first, "data-prev" in first) == (True, False)
        assert ("data-next" in second, "data-prev" in second) == (False, True)
        assert re.findall(r'<td class="number"><a href="/runs/many/rollouts/(\d+)', second) == [
            str(n) for n in range(51, 61)
        ]
        assert "This page has no attempts." in client.get("/runs/many/tasks/t?page=9").text


def test_the_plot_places_attempts_by_step_and_reward() -> None:
    records = [rollout(n, step=n % 3, reward=[None, -1.0, 0.0, 1.0][n % 4])[0] for n in range(12)]
    plot = make_attempts_plot(records)
    assert len(plot.dots) == 9
    assert all(0 <= dot.x <= WIDTH and 0 <= dot.y <= HEIGHT for dot in plot.dots)
    assert [label for _, label in plot.steps] == ["0", "1", "2"]
    assert {"-1", "0", "1"} <= {label for _, label in plot.rewards}
    assert make_attempts_plot([]).dots == []
    constant = make_attempts_plot([rollout(1, reward=0.0)[0]])
    assert [dot.x for dot in constant.dots] == [WIDTH / 2]
