"""The page of ``lightning-rl improve``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from lightning_core.records.run_folder.lock import running
from lightning_core.tools.runs.improvement import read_improvement
from lightning_core.tools.view.library import Library
from lightning_core.tools.view.live import ImprovementFeed
from lightning_core.tools.view.pages.improve import improve_html, improve_values
from lightning_core.tools.view.server import open_view
from tests.tools.view.made_improvement import COMMAND, make_improvement
from tests.tools.view.made_runs import HOSTILE
from tests.tools.view.pages import Seen, browsing
from tests.tools.view.served import visitor


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "runs" / "improve-1"


def test_stages_are_a_path_with_rewards_on_one_axis(folder: Path) -> None:
    make_improvement(folder)
    with running(folder), browsing(folder) as client:
        seen = Seen(client.get("/improve/improve-1").text)
    states = [attributes["class"] for attributes in seen.all("li") if "axis" not in (attributes["class"] or "")]
    assert states == ["done", "done best", "done", "left-out", "running"], (
        "provider, policy, prompts, warm start, train"
    )
    values = improve_values(Library(folder), "improve-1")
    provider, policy, *rest = values["axis"].whiskers
    assert provider.low < provider.mean == values["axis"].provider < provider.high <= 100
    assert 0 <= policy.low < policy.mean < policy.high < provider.low
    assert rest == [None, None, None]
    for text in (
        "0.900 [0.800, 0.970]",
        "18 of 20 tasks",
        "tokens per rollout 1,000",
        "-0.700",
        "10 of 60 minutes",
        COMMAND,
    ):
        assert text in seen.text, text
    assert "warm start left out There are no traces." in seen.text
    assert "/runs/eval-1" in seen.links
    assert "/compare?run=baseline-1&run=eval-1" in seen.links


def test_the_page_follows_the_stages_until_the_end(folder: Path) -> None:
    found = make_improvement(folder)
    library = Library(folder)
    feed = ImprovementFeed(render=lambda: improve_html(library, "improve-1"))
    with running(folder):
        assert [event.name for event in feed.poll()] == ["improve"]
        assert feed.poll() == []
        replace(found, current=None, finished=True, use="lightning-rl serve runs/x").write(folder)
        assert [event.name for event in feed.poll()] == ["improve"]
    event, end = feed.poll()
    assert "Serve the best policy" in event.data
    assert end.name == "end"


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"problem": "the stage 'train' failed with exit code 1"}, "Ended early: the stage 'train' failed with exit code 1."),
        ({"stages": [], "notes": [], "best": None}, "Start again lightning-rl improve c.yaml --model large"),
    ],
)  # fmt: skip
def test_one_that_stopped_has_the_next_command(values: dict[str, object], expected: str, folder: Path) -> None:
    make_improvement(folder, **values)
    text = Seen(visitor(folder).get("/improve/improve-1").text).text
    assert expected in text
    assert "train ended early" in text


def test_it_is_found_from_the_folder_of_runs_and_from_a_stage(folder: Path) -> None:
    make_improvement(folder, result=[HOSTILE])
    listed = visitor(folder.parent).get("/")
    assert "/improve/improve-1" in Seen(listed.text).links
    assert HOSTILE not in listed.text
    assert f"lightning-rl view {folder}" in Seen(visitor(folder.parent).get("/improve/improve-1").text).text
    stage = visitor(folder / "eval-1")
    assert "/improve/improve-1" in Seen(stage.get("/runs/eval-1").text).links
    assert stage.get("/improve/improve-1").status_code == 200
    with open_view(folder) as url:
        assert "/improve/improve-1?token=" in url


def test_a_damaged_file_is_reported_and_hides_no_run(folder: Path) -> None:
    make_improvement(folder)
    assert read_improvement(folder).name == "improve-1"
    (folder / "improve.json").write_text("{}")
    client = visitor(folder)
    listed = Seen(client.get("/").text)
    assert "improve.json cannot be read" in listed.text
    assert "/runs/eval-1" in listed.links
    assert "improve.json cannot be read" in client.get("/improve/improve-1").text
    assert client.get("/improve/other").status_code == 404


def test_a_folder_of_traces_has_the_commands_that_read_it(tmp_path: Path) -> None:
    (tmp_path / "1.jsonl").touch()
    assert f"lightning-rl trace {tmp_path}" in Seen(visitor(tmp_path).get("/").text).text
