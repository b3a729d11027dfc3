"""The list of runs, the comparison and the page of a run, over HTTP."""

from __future__ import annotations

import html
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightning_core.records.report import Summary
from lightning_core.records.run_folder.lock import running
from lightning_core.records.statistics.constant_answer import ConstantAnswer
from lightning_core.records.statistics.intervals import compare
from tests.tools.view.made_runs import HOSTILE, make_run, rollout
from tests.tools.view.served import visitor

OLD = Path(__file__).parents[2] / "data" / "run_of_0_1_0"


def listed(text: str) -> list[str]:
    """The names of the runs in the list, in order."""
    return [html.unescape(name) for name in re.findall(r'<tr data-run="(.*?)">', text)]


def charts(text: str) -> dict[str, Any]:
    """The charts of a page, by id."""
    found = re.search(r'<script type="application/json" id="charts">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    return {chart["id"]: chart for chart in json.loads(found[1])}


def summary(before: float, after: float) -> Summary:
    rewards = {f"t{n}": [before] for n in range(8)}, {f"t{n}": [after] for n in range(8)}
    return Summary(
        eval=compare(*rewards), steps=2, rollouts=8, tokens_sampled=1, tokens_trained=1, wall_seconds=95, seed=0
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    runs = tmp_path / "runs"
    lora = {"policy": {"model": "org/small", "tuning": "lora"}, "run": {"tags": ["night", "demo"]}}
    make_run(runs / "alpha", config=lora, metrics=[{"reward": 0.25}, {"reward": 0.75}], summary=summary(0, 1))
    make_run(runs / "beta", metrics=[{"reward": 0.5}])
    make_run(runs / "gamma", config={"trainer": {"steps": 3, "learning_rate": 0.125}})
    return runs


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("", {"alpha", "beta", "gamma"}),
        ("q=ALPH", {"alpha"}),
        ("q=org/small", {"alpha"}),
        ("q=night", {"alpha"}),
        ("q=learning_rate: 0.125", {"gamma"}),
        ("q=tiny trainer.steps: 9", {"beta"}),
        ("q=nothing", set()),
        ("state=finished", {"alpha"}),
        ("state=running", {"gamma"}),
        ("tag=demo", {"alpha"}),
        ("tag=dem", set()),
        ("state=stopped&tag=first", {"beta"}),
    ],
)
def test_runs_are_found_by_name_model_tag_setting_and_state(folder: Path, query: str, expected: set[str]) -> None:
    with running(folder / "gamma"):
        assert set(listed(visitor(folder).get(f"/?{query}").text)) == expected


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("sort=name&ascending=1", ["alpha", "beta", "gamma"]),
        ("sort=name", ["gamma", "beta", "alpha"]),
        ("sort=reward", ["alpha", "beta", "gamma"]),
        ("sort=reward&ascending=1", ["beta", "alpha", "gamma"]),
        ("sort=steps", ["alpha", "beta", "gamma"]),
    ],
)
def test_runs_are_sorted_and_those_without_a_value_come_last(folder: Path, query: str, expected: list[str]) -> None:
    assert listed(visitor(folder).get(f"/?{query}").text) == expected


def test_a_header_sorts_then_turns_and_keeps_the_search(folder: Path) -> None:
    first = visitor(folder).get("/?q=a").text
    assert 'href="/?q=a&amp;sort=reward">reward</a>' in first
    second = visitor(folder).get("/?q=a&sort=reward").text
    assert 'href="/?q=a&amp;sort=reward&amp;ascending=1">reward</a>' in second
    assert 'class="number of-reward" aria-sort="descending"' in second


def test_an_unknown_sort_or_state_shows_what_there_is(folder: Path) -> None:
    assert len(listed(visitor(folder).get("/?sort=secret").text)) == 3
    assert "No run matches." in visitor(folder).get("/?state=none").text


def test_a_row_has_progress_and_results(folder: Path) -> None:
    text = visitor(folder).get("/").text
    row = re.search(r'<tr data-run="alpha">(.*?)</tr>', text, re.DOTALL)
    assert row is not None
    cells = [" ".join(re.sub("<[^>]*>", "", cell).split()) for cell in re.findall("<td.*?</td>", row[1], re.DOTALL)]
    assert cells[1:3] == ["alpha", "finished"]
    assert cells[4:] == ["org/small", "2 / 9", "0.750", "0.000", "1.000", "+1.000", "nightdemo"]


def test_an_empty_folder_says_how_to_start(tmp_path: Path) -> None:
    response = visitor(tmp_path).get("/")
    assert response.status_code == 200
    assert "There are no runs in" in response.text
    assert "lightning-rl train CONFIG" in response.text


def test_a_run_has_charts_with_the_error_of_the_mean_and_held_out_intervals(tmp_path: Path) -> None:
    evaluated = [rollout(10 + n, phase="eval_before", step=0, reward=float(n % 2)) for n in range(8)]
    trained = [rollout(n, task_id=f"t{n % 2}", reward=float(n % 2)) for n in range(4)]
    make_run(tmp_path / "run", metrics=[{"reward": 0.5, "new/thing": 3, "loss": 0.25}], rollouts=[*trained, *evaluated])
    found = charts(visitor(tmp_path).get("/runs/run").text)
    training, held_out = found["reward"]["lines"]
    assert training == {"name": "training", "points": [[1, 0.5, 0.0, 1.0]], "shape": "line"}
    assert held_out["shape"] == "points"
    ((step, mean, low, high),) = held_out["points"]
    assert (step, mean) == (0, 0.5)
    assert 0 < low < 0.5 < high < 1
    assert found["loss"]["lines"][0]["points"] == [[1, 0.25]]
    other = found["other-new/thing"]
    assert (other["title"], other["other"], other["lines"][0]["points"]) == ("new/thing", True, [[1, 3]])


def test_metrics_of_several_policies_are_lines_of_one_chart(tmp_path: Path) -> None:
    make_run(
        tmp_path / "run",
        config={"policies": {"planner": {}, "writer": {}}},
        metrics=[{"planner/loss": 1.0, "writer/loss": 2.0, "planner/groups": 4, "planner/groups_equal": 1}],
    )
    found = charts(visitor(tmp_path).get("/runs/run").text)
    assert [line["name"] for line in found["loss"]["lines"]] == ["planner", "writer"]
    assert found["equal"]["lines"] == [{"name": "planner", "points": [[1, 0.25]], "shape": "line"}]


def test_failures_are_shown_with_their_first_error(tmp_path: Path) -> None:
    errors = ["ValueError: no answer 17", "ValueError: no answer 18", "TimeoutError: slow"]
    failed = [rollout(n, status="failed", error=error) for n, error in enumerate(errors, start=5)]
    make_run(tmp_path / "run", rollouts=[rollout(1), *failed, rollout(9, status="infrastructure", error="lost")])
    text = visitor(tmp_path).get("/runs/run").text
    assert re.search(
        r'2×</span> <code>ValueError: no answer N</code>\s*<a href="/runs/run/rollouts/2">first: 2</a>', text
    )
    assert re.search(r'href="/runs/run/rollouts\?status=failed">3</a> <span class="muted">\+ 1 left out', text)


def test_monitors_that_hold_are_alerts(tmp_path: Path) -> None:
    lines = [{"monitor/old": 1.0}, {}, {"monitor/no_gradient": 1.0}, {"monitor/no_gradient": 1.0}]
    make_run(tmp_path / "run", metrics=lines)
    text = visitor(tmp_path).get("/runs/run").text
    assert re.search(r'class="alert"><strong>no_gradient</strong>\s*holds since step 3', text)
    assert re.search(r'class="muted"><strong>old</strong>\s*held until step 1', text)


def test_the_ledger_is_a_part_that_is_loaded_later(tmp_path: Path) -> None:
    make_run(tmp_path / "run", rollouts=[rollout(1), rollout(2)])
    client = visitor(tmp_path)
    assert 'data-load="/runs/run/ledger"' in client.get("/runs/run").text
    part = client.get("/runs/run/ledger").text
    assert "<html" not in part
    assert re.search(r'<td>talker</td><td class="number">2</td>\s*<td><span class="">answered', part)


def test_runs_are_compared(folder: Path) -> None:
    stored = {"one": 0.0, "two": 1.0}
    for name, reward in stored.items():
        make_run(
            folder / name,
            config={"trainer": {"steps": 9, "learning_rate": reward}},
            metrics=[{"reward": reward, "loss": reward}],
            rollouts=[rollout(n, phase="eval_after", reward=reward) for n in range(8)],
        )
    text = visitor(folder).get("/compare?run=one&run=two&run=beta&run=one").text
    assert "Compare 3 runs" in text, "the same run counts once"
    cells = re.sub(r"\s+", " ", re.sub("<[^>]*>", " ", text))
    assert "two 8 0.000 1.000 +1.000 [0.261, 1.000] Higher." in cells
    assert "beta Not compared: no task was evaluated in both runs." in cells
    assert "trainer.learning_rate 0.0 1.0 –" in cells
    assert "trainer.steps" not in cells, "equal settings are left out"
    found = charts(text)
    assert [line["name"] for line in found["reward"]["lines"]] == ["one", "two", "beta"]
    assert [line["name"] for line in found["held-out"]["lines"]] == ["one", "two"]


@pytest.mark.parametrize("query", ["", "?run=alpha"])
def test_a_comparison_needs_two_runs(folder: Path, query: str) -> None:
    response = visitor(folder).get(f"/compare{query}")
    assert response.status_code == 200
    assert "Select at least two runs" in response.text


NAME = "<img src=x onerror=hacked()>{{ 7*7 }}'\"&?#%"


def test_names_tags_settings_and_errors_are_text(tmp_path: Path) -> None:
    config = {"policy": {"model": HOSTILE}, "run": {"tags": [HOSTILE]}, "policies": {HOSTILE: {HOSTILE: HOSTILE}}}
    failed = rollout(1, task_id=HOSTILE, status="failed", error=HOSTILE, text=HOSTILE)
    metrics = [{HOSTILE: 1.0, f"{HOSTILE}/loss": 2.0, f"monitor/{HOSTILE}": 1.0}]
    make_run(tmp_path / NAME, config=config, metrics=metrics, rollouts=[failed], summary=summary(0, 1))
    (tmp_path / NAME / "commit.txt").write_text(HOSTILE)
    make_run(tmp_path / "other")
    client = visitor(tmp_path)
    (link,) = (link for link in re.findall(r'href="(/runs/.*?)"', client.get("/").text) if link != "/runs/other")
    comparison = client.get("/compare", params={"run": [NAME, "other"]})
    missing = client.get("/compare", params={"run": HOSTILE})
    searched = client.get("/", params={"q": HOSTILE, "state": HOSTILE, "tag": HOSTILE, "sort": HOSTILE})
    pages = [client.get("/"), client.get(html.unescape(link)), client.get(html.unescape(link) + "/ledger"), comparison]
    assert [page.status_code for page in (*pages, missing, searched)] == [200, 200, 200, 200, 404, 200]
    for page in (*pages, missing, searched):
        assert "<img" not in page.text
        assert "<script>" not in page.text
        assert " 49" not in page.text
        assert re.findall(r"<script(?![^>]*(?: src=\"/static/|type=\"application/json\"))", page.text) == []
    assert charts(pages[1].text)[f"other-{HOSTILE}"]["title"] == HOSTILE


DAMAGES = [b"", b"\x00\xff\xfe", b"{[\n", b"[1]\n", b'"text"\n', b"5\n", b"null\n"]
"""The short form has them for the files that are parsed, and else the first two."""


@pytest.mark.parametrize(
    ("name", "content"),
    [
        pytest.param(name, content, marks=() if n < short else pytest.mark.long)
        for name, short in {
            "config.yaml": 5, "metrics.jsonl": 5, "summary.json": 5, "commit.txt": 2, "store.db": 2
        }.items()
        for n, content in enumerate(DAMAGES)
    ],
)  # fmt: skip
def test_a_damaged_file_does_not_break_the_pages(tmp_path: Path, name: str, content: bytes) -> None:
    make_run(tmp_path / "run", metrics=[{"reward": 0.5}], rollouts=[rollout(1)], summary=summary(0, 1))
    make_run(tmp_path / "whole", metrics=[{"reward": 0.5}], rollouts=[rollout(1)])
    (tmp_path / "run" / name).write_bytes(content)
    client = visitor(tmp_path)
    for path in ("/", "/runs/run", "/compare?run=run&run=whole"):
        assert client.get(path).status_code == 200, path
    assert client.get("/runs/run/ledger").status_code == (404 if name == "store.db" else 200)


@pytest.mark.parametrize(
    "line",
    [
        {"step": 1, "reward": "high", "loss": None, "seconds_rollouts": [], "groups": 1, "groups_equal": "x"},
        {"step": "one", "reward": 1},
        {"step": 1, "reward": 10**400, "loss": True},
        {"step": 1, "reward": 0.5, "monitor/x": "yes"},
    ],
)
def test_metrics_of_other_types_are_left_out(tmp_path: Path, line: dict[str, Any]) -> None:
    make_run(tmp_path / "run", config={"trainer": {"steps": "many"}, "policies": [1], "run": {"tags": 7}})
    (tmp_path / "run" / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    with running(tmp_path / "run"):
        client = visitor(tmp_path)
        assert [client.get(path).status_code for path in ("/", "/runs/run")] == [200, 200]


def test_a_store_with_damaged_pages_is_a_message(tmp_path: Path) -> None:
    store = make_run(tmp_path / "run", rollouts=[rollout(n) for n in range(200)]) / "store.db"
    data = bytearray(store.read_bytes())
    data[4096:] = b"\x55" * (len(data) - 4096)
    store.write_bytes(bytes(data))
    client = visitor(tmp_path)
    assert "The rollouts cannot be read" in client.get("/runs/run").text
    assert client.get("/runs/run/ledger").status_code in (404, 500)
    make_run(tmp_path / "other", rollouts=[rollout(1)])
    assert client.get("/compare?run=run&run=other").status_code == 200


def test_a_run_without_a_store_says_so(folder: Path) -> None:
    client = visitor(folder)
    text = client.get("/runs/beta").text
    assert "This run has no store.db" in text
    assert "data-load" not in text
    assert client.get("/runs/beta/ledger").status_code == 404


def test_a_running_run_has_progress_time_left_and_is_followed(tmp_path: Path) -> None:
    metrics = [{"reward": 0.5, "seconds_rollouts": 8.0, "seconds_update": 2.0}] * 3
    make_run(tmp_path / "run", metrics=metrics, rollouts=[rollout(1, step=4), rollout(2, step=3)])
    client = visitor(tmp_path)
    assert "data-events" not in client.get("/runs/run").text
    with running(tmp_path / "run"):
        text = client.get("/runs/run").text
    assert 'data-events="/runs/run/events" data-after="3"' in text
    assert '<progress max="9" value="3"' in text
    assert "<dt>time left</dt><dd>1m00s</dd>" in text
    assert '<dt>this step</dt><dd>1 <span class="muted">rollouts' in text


def test_an_improvement_of_form_is_named(tmp_path: Path) -> None:
    constant = ConstantAnswer(
        answer="yes",
        reward=1.0,
        source="reward function",
        compared=1,
        tasks=8,
        known=8,
        lead=0.0,
        lead_ci95=(-0.3, 0.3),
    )
    found = replace(summary(0, 1), constant_answer=constant)
    make_run(tmp_path / "run", metrics=[{"reward": 0.5}], rollouts=[rollout(1)], summary=found)
    text = visitor(tmp_path).get("/runs/run").text
    assert re.search(
        r'class="result warn">Improvement of form only: .*not shown to beat the best constant answer, 1.000', text
    )


def test_a_run_of_the_previous_version_is_shown(tmp_path: Path) -> None:
    shutil.copytree(OLD, tmp_path / "old")
    make_run(tmp_path / "new", metrics=[{"reward": 0.5}])
    client = visitor(tmp_path)
    assert listed(client.get("/?sort=name").text) == ["old", "new"]
    found = charts(client.get("/runs/old").text)
    assert {"reward", "loss", "entropy", "length", "equal", "seconds", "speed"} <= found.keys()
    assert "talker" in client.get("/runs/old/ledger").text
    assert client.get("/compare?run=old&run=new").status_code == 200


def test_one_run_can_be_served_instead_of_a_folder(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "alone", metrics=[{"reward": 0.5}])
    client = visitor(folder)
    assert listed(client.get("/").text) == ["alone"]
    assert client.get("/runs/alone").status_code == 200


def test_characters_that_control_a_display_are_shown_as_their_code_point(tmp_path: Path) -> None:
    text = "\x1b[2J\u202eesrever\x00"
    make_run(tmp_path / "run", rollouts=[rollout(1, task_id=text, status="failed", error=text, text=text)])
    client = visitor(tmp_path)
    for path in ("/runs/run", "/runs/run/rollouts", "/runs/run/tasks", "/runs/run/rollouts/1"):
        found = client.get(path).text
        assert not set(text) & {*found} & {"\x1b", "\u202e", "\x00"}, path
        assert r"\x1b[2J\u202eesrever\x00" in found, path


def test_a_page_after_the_last_is_empty_and_does_not_deny_the_others(tmp_path: Path) -> None:
    make_run(tmp_path / "run", rollouts=[rollout(1)])
    client = visitor(tmp_path)
    for path in ("/runs/run/rollouts", "/runs/run/tasks"):
        assert "This page is empty." in client.get(path, params={"page": 9}).text
