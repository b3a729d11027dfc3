"""The list of rollouts: filters, order and pages are the URL's query."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
import pytest

from lightning_core.records.store import Store
from tests.tools.view.made_runs import make_run, rollout
from tests.tools.view.pages import Seen, browsing, is_harmless
from tests.tools.view.recorded_run import AGENT, ERROR, TASK


def listed(client: httpx.Client, query: str, *, run: str = "sample") -> list[int]:
    html = client.get(f"/runs/{run}/rollouts{query}").raise_for_status().text
    return [int(n) for n in re.findall(rf'<td class="number"><a href="/runs/{run}/rollouts/(\d+)">', html)]


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("", [12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1]),
        ("?phase=train&step=1", [4, 3, 2, 1]),
        ("?status=infrastructure", [9]),
        ("?task=held-out", [12, 11]),
        ("?min=0.6&phase=train", [7, 6, 3, 2]),
        ("?max=0&phase=train", [5, 1]),
        ("?text=na%C3%AFve&step=2", [12, 8, 7, 6, 5]),
        ("?sort=reward&direction=down&phase=train&step=2", [7, 6, 8, 5, 9]),
        ("?sort=ordinal&phase=train&step=2", [5, 6, 7, 8, 9]),
        ("?phase=&step=&text=&sort=&task=held-out", [12, 11]),
        ("?step=77", []),
    ],
)
def test_the_query_selects_and_sorts(sample: httpx.Client, query: str, expected: list[int]) -> None:
    assert listed(sample, query) == expected


def test_rollouts_are_found_by_an_agents_name(sample: httpx.Client) -> None:
    found = sample.get("/runs/sample/rollouts", params={"agent": AGENT, "phase": "train"})
    assert "1–8 of 8" in Seen(found.text).text
    assert sample.get("/runs/sample/rollouts", params={"agent": "nobody"}).text.count("No rollouts match.") == 1


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("?step=first", "step: found 'first', expected a whole number from 0"),
        ("?step=-1", "step: found '-1', expected a whole number from 0"),
        (
            "?step=99999999999999999999999",
            "step: found '99999999999999999999999', expected a whole number from 0 to 1,000,000,000",
        ),
        ("?min=nan", "min: found 'nan', expected a finite number"),
        ("?min=2&max=1", "min: found 2, expected at most max, which is 1"),
        ("?phase=training", "phase: found 'training', expected one of train, fork, judge"),
        ("?status=<i>", "status: found '<i>', expected one of ok, failed"),
        ("?sort=id", "sort: found 'id', expected one of ordinal, step"),
        ("?page=0", "page: found '0', expected a whole number from 1"),
        ("?stpe=1", "stpe: unknown parameter, expected one of phase, step"),
    ],
)
def test_a_bad_value_is_a_message(sample: httpx.Client, query: str, message: str) -> None:
    response = sample.get(f"/runs/sample/rollouts{query}")
    assert response.status_code == 400
    assert message in Seen(response.text).text
    assert listed_rows(response.text) == []
    assert is_harmless(response.text)


def listed_rows(html: str) -> list[str]:
    return re.findall(r"<td class=\"number\"><a", html)


def test_names_errors_and_tasks_are_text(sample: httpx.Client) -> None:
    html = sample.get("/runs/sample/rollouts", params={"text": "<i>"}).text
    assert is_harmless(html)
    text = Seen(html).text
    assert TASK in text
    assert ERROR in text


def test_pages_follow_each_other_and_keep_the_filter(tmp_path: Path) -> None:
    rollouts = [rollout(n, text="same", task_id="task") for n in range(1, 121)]
    make_run(tmp_path / "many", rollouts=rollouts)
    with browsing(tmp_path) as client:
        for query in ("?task=task", "?text=same"):
            pages, at = [listed(client, query, run="many")], query
            while True:
                following = [
                    link for link in Seen(client.get(f"/runs/many/rollouts{at}").text).all("a") if "data-next" in link
                ]
                if not following:
                    break
                at = following[0]["href"] or ""
                pages.append(listed(client, at, run="many"))
            assert [number for page in pages for number in page] == list(range(120, 0, -1))
            assert len(pages) == 3


def test_a_run_without_a_store_and_an_unknown_run_are_not_found(tmp_path: Path) -> None:
    make_run(tmp_path / "empty")
    make_run(tmp_path / "new", rollouts=[])
    with browsing(tmp_path) as client:
        for path in ("rollouts", "rollouts/1", "rollouts/1/calls/x", "credit", "tasks", "tasks/t"):
            for run in ("empty", "none"):
                response = client.get(f"/runs/{run}/{path}")
                assert (response.status_code, "This page cannot be shown" in response.text) == (404, True)
        assert "This run has no rollouts yet." in client.get("/runs/new/rollouts").text
        assert "This run has no rollouts yet." in client.get("/runs/new/tasks").text


def test_agents_are_offered_in_stores_with_and_without_their_index(tmp_path: Path) -> None:
    run = make_run(tmp_path / "old", rollouts=[rollout(1), rollout(2)])
    with browsing(tmp_path) as client:
        assert "<option>talker</option>" in client.get("/runs/old/rollouts").text
        with Store(run / "store.db") as store:
            store.select("DROP INDEX spans_by_agent")
        assert "<option>talker</option>" in client.get("/runs/old/rollouts").text
