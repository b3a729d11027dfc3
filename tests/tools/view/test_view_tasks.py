"""The tasks of a run, and all attempts at one, first to last."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
import pytest

from lightning_core.records.statistics.task_history import RewardedAttempt, find_tasks
from lightning_core.records.store import Store
from lightning_core.tools.view.attempts_plot import HEIGHT, WIDTH, make_attempts_plot
from tests.tools.view.made_runs import make_run, rollout
from tests.tools.view.pages import Seen, browsing, is_harmless
from tests.tools.view.recorded_run import TASK


def test_tasks_have_their_first_and_last_means(sample: httpx.Client) -> None:
    seen = Seen(sample.get("/runs/sample/tasks").text)
    assert "held-out held-out 0–2 2 0.000 1.000 +1.000 1.000 1" in seen.text
    assert f"{TASK} training 1–2 9 (1 left out) 0.625 0.625 +0.000 1.000 4" in seen.text
    assert "/runs/sample/task?id=%3Cscript%3Etask%3C/script%3E/1" in seen.links


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
            assert f"train 0.500{mark}hello" in Seen(client.get(f"/runs/{run}/task?id=a").text).text


def test_all_attempts_at_a_task_are_in_order_with_their_answers(sample: httpx.Client) -> None:
    html = sample.get("/runs/sample/task", params={"id": TASK}).raise_for_status().text
    assert is_harmless(html)
    table = html[html.index("<tbody") :]
    assert re.findall(r'/rollouts/(\d+)">', table) == [str(n) for n in range(1, 10)]
    assert Seen(table).text.count("<script>alert(2)</script>") == 8
    assert re.findall(r"<title>rollout (\d+), (\w+) at step (\d+)", html) == [
        (str(n), "train", str(1 + (n - 1) // 4)) for n in range(1, 9)
    ]
    assert "infrastructure TimeoutError: <i>no such page</i>" in Seen(table).text
    held_out = sample.get("/runs/sample/task?id=held-out").text
    assert "held-out, before training held-out, after training" in Seen(held_out).text


@pytest.mark.parametrize("query", ["", "?id=", "?id=none", "?id=..%2f..%2f..%2fetc%2fpasswd", "?id=a/b/c", "?id=%00"])
def test_unknown_tasks_are_not_found(sample: httpx.Client, query: str) -> None:
    response = sample.get(f"/runs/sample/task{query}")
    assert response.status_code == 404
    assert is_harmless(response.text)


@pytest.mark.parametrize(("path", "message"), [
    ("tasks?sort=name", "sort: found 'name', expected one of task_id"),
    ("tasks?direction=<i>", "direction: found '<i>', expected one of up, down"),
    ("task?id=held-out&page=x", "page: found 'x', expected a whole number from 1"),
    ("task?id=held-out&phase=train", "phase: unknown parameter"),
])  # fmt: skip
def test_a_bad_value_is_a_message(sample: httpx.Client, path: str, message: str) -> None:
    response = sample.get(f"/runs/sample/{path}")
    assert response.status_code == 400
    assert message in Seen(response.text).text
    assert is_harmless(response.text)


def test_many_attempts_are_on_pages(tmp_path: Path) -> None:
    make_run(tmp_path / "many", rollouts=[rollout(n, task_id="a&b", step=n // 10) for n in range(1, 61)])
    with browsing(tmp_path) as client:
        first, second = (client.get(f"/runs/many/task?id=a%26b&page={n}").text for n in (1, 2))
        assert ("data-next" in first, "data-prev" in first) == (True, False)
        assert ("data-next" in second, "data-prev" in second) == (False, True)
        assert "?id=a%26b&page=2" in Seen(first).links
        assert re.findall(r'<td class="number"><a href="/runs/many/rollouts/(\d+)', second) == [
            str(n) for n in range(51, 61)
        ]
        assert "This page has no attempts." in client.get("/runs/many/task?id=a%26b&page=9").text


def test_the_plot_places_attempts_by_step_and_reward() -> None:
    attempts = [RewardedAttempt(n, n % 3, "train", [-1.0, 0.0, 1.0][n % 3]) for n in range(9)]
    plot = make_attempts_plot(attempts)
    assert (len(plot.dots), plot.nth) == (9, 1)
    assert len({(dot.x, dot.y) for dot in plot.dots}) == 9
    assert all(0 <= dot.x <= WIDTH and 0 <= dot.y <= HEIGHT for dot in plot.dots)
    assert [label for _, label in plot.steps] == ["0", "1", "2"]
    assert {"-1", "0", "1"} <= {label for _, label in plot.rewards}
    assert make_attempts_plot([]).dots == []
    constant = make_attempts_plot([RewardedAttempt(1, 0, "train", 0.0)])
    assert [dot.x for dot in constant.dots] == [WIDTH / 2]


def test_a_page_reads_the_records_of_its_own_attempts_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_run(tmp_path / "many", rollouts=[rollout(n, task_id="t") for n in range(1, 121)])
    monkeypatch.setattr("lightning_core.tools.view.attempts_plot._MOST", 50)
    found: list[int] = []
    records = Store.records
    monkeypatch.setattr(Store, "records", lambda *given: found.append(len(read := records(*given))) or read)
    with browsing(tmp_path) as client:
        html = client.get("/runs/many/task?id=t&page=2").text
    assert "120 attempts, first to last" in Seen(html).text
    assert found == [50]
    assert html.count("<circle") == 40
    assert "1 in 3 attempts is drawn." in Seen(html).text


@pytest.mark.parametrize("task", ["../x", "a/../b", "a//b", ".", "100%", "a?b#c", "é"])
def test_every_task_is_linked_to_its_page(tmp_path: Path, task: str) -> None:
    make_run(tmp_path / "made", rollouts=[rollout(1, task_id=task)])
    with browsing(tmp_path) as client:
        for page in ("tasks", "rollouts", "rollouts/1"):
            (link,) = (found for found in Seen(client.get(f"/runs/made/{page}").text).links if "/task?" in found)
            assert f"Task {task} " in Seen(client.get(link).raise_for_status().text).text


@pytest.mark.parametrize("status", ["infrastructure", "invalid"])
def test_an_attempt_that_is_left_out_is_not_solved(tmp_path: Path, status: str) -> None:
    make_run(tmp_path / "made", rollouts=[rollout(1, task_id="a", reward=1.0, status=status)])
    with browsing(tmp_path) as client:
        assert f"1.000 {status} hello" in " ".join(Seen(client.get("/runs/made/task?id=a").text).text.split())
