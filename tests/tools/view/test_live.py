"""Pages of running runs follow them: events of what is new, over a real connection."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from httpx_sse import ServerSentEvent, connect_sse

from lightning_core.records.report import MetricsLog
from lightning_core.records.run_folder.lock import running
from lightning_core.records.store import Store
from lightning_core.tools.view.library import Library
from lightning_core.tools.view.live import ListFeed, RunFeed, ServerEvent
from lightning_core.tools.view.server import open_view
from tests.tools.view.made_runs import make_run, rollout
from tests.tools.view.served import visitor

LIMITS = httpx.Limits(max_connections=100)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_run(tmp_path / "run", metrics=[{"reward": 0.1}, {"reward": 0.2}], rollouts=[rollout(1)])
    return tmp_path


def append(folder: Path, step: int, **metrics: Any) -> None:
    with (folder / "run" / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": step, **metrics}) + "\n")


def feed(folder: Path, after: int = 2, mark: str | None = None) -> RunFeed:
    return RunFeed(Library(folder), "run", after=after, mark=mark, render=lambda status: f"{status.run.steps} steps")


def new_points(events: list[ServerEvent]) -> dict[str, list[Any]]:
    """The points of the charts in ``events``, by chart."""
    charts = [chart for event in events if event.name == "charts" for chart in json.loads(event.data)["charts"]]
    return {chart["id"]: [line["points"] for line in chart["lines"]] for chart in charts}


def test_new_steps_evaluations_and_the_state_are_events(folder: Path) -> None:
    with running(folder / "run"):
        found = feed(folder)
        assert found.poll() == [ServerEvent("status", "2 steps")]
        assert found.poll() == []
        append(folder, 3, reward=0.3, surprise=7)
        events = found.poll()
        assert [event.name for event in events] == ["charts", "status"]
        assert new_points(events) == {"reward": [[[3, 0.3]]], "other-surprise": [[[3, 7]]]}
        with Store(folder / "run" / "store.db") as store:
            store.add_rollouts([rollout(n, phase="eval", step=3) for n in range(2, 4)])
        ((((*point, low, high),),),) = new_points(found.poll()).values()
        assert point == [3, 0.5]
        assert 0 < low < 0.5 < high < 1
        assert found.poll() == []
    assert [event.name for event in found.poll()] == ["end"]


def test_a_browser_gets_only_the_steps_that_it_does_not_have(folder: Path) -> None:
    with running(folder / "run"):
        assert new_points(feed(folder, after=1).poll()) == {"reward": [[[2, 0.2]]]}


def test_half_a_line_waits_for_its_end(folder: Path) -> None:
    with running(folder / "run"), (folder / "run" / "metrics.jsonl").open("a") as file:
        found = feed(folder)
        found.poll()
        file.write('{"step": 3, ')
        file.flush()
        assert found.poll() == []
        file.write('"reward": 1}\n')
        file.flush()
        assert new_points(found.poll()) == {"reward": [[[3, 1]]]}


def test_a_resumed_run_loads_the_page_again(folder: Path) -> None:
    with running(folder / "run"):
        found = feed(folder)
        found.poll()
        MetricsLog(folder / "run" / "metrics.jsonl", keep_steps=1)
        assert [event.name for event in found.poll()] == ["restart", "end"]


def test_a_browser_that_returns_loads_the_page_again_only_if_its_last_step_was_repeated(folder: Path) -> None:
    append(folder, 3, reward=0.3)
    append(folder, 4, reward=0.4)
    with running(folder / "run"):
        page = visitor(folder).get("/runs/run").text
        after, mark = re.findall(r'data-after="(\d+)" data-mark="(\w+)"', page)[0]
        append(folder, 5, reward=0.5)
        (event,) = (e for e in feed(folder, int(after), mark).poll() if e.name == "charts")
        assert new_points([event]) == {"reward": [[[5, 0.5]]]}
        seen = json.loads(event.data)
        assert [e.name for e in feed(folder, seen["after"], seen["mark"]).poll()] == ["status"]
        MetricsLog(folder / "run" / "metrics.jsonl", keep_steps=2)
        for step in range(3, 7):
            append(folder, step, reward=0.9)
        for step, known in ((int(after), mark), (seen["after"], seen["mark"])):
            assert [e.name for e in feed(folder, step, known).poll()] == ["restart", "end"]


def test_the_stream_of_a_page_that_is_older_than_a_resume_restarts_it(folder: Path, client: httpx.Client) -> None:
    with running(folder / "run"):
        given = {"after": 2, "mark": "0" * 16}
        with connect_sse(client, "GET", "/runs/run/events", params=given) as source:
            assert [event.event for event in source.iter_sse()] == ["restart", "end"]


def test_rows_of_the_list_change_and_appear(folder: Path) -> None:
    found = ListFeed(Library(folder), render=lambda run: f"{run.state} {run.steps}")
    assert [json.loads(event.data) for event in found.poll()] == [{"name": "run", "html": "stopped 2"}]
    assert found.poll() == []
    with running(folder / "run"):
        append(folder, 3)
        make_run(folder / "second")
        rows = [json.loads(event.data) for event in found.poll()]
    assert rows == [{"name": "run", "html": "running 3"}, {"name": "second", "html": "stopped 0"}]


def test_an_event_of_several_lines_is_one_event() -> None:
    assert ServerEvent("status", "<p>\n</p>").encode() == "event: status\ndata: <p>\ndata: </p>\n\n"


@pytest.fixture
def client(folder: Path) -> Iterator[httpx.Client]:
    with open_view(folder) as url, httpx.Client(base_url=url.partition("?")[0], timeout=30, limits=LIMITS) as client:
        client.get(url)
        yield client


def read_until(events: Iterator[ServerSentEvent], wanted: Callable[[ServerSentEvent], bool]) -> ServerSentEvent:
    return next(event for event in events if wanted(event))


def test_a_stream_ends_when_the_run_does(folder: Path, client: httpx.Client) -> None:
    with ExitStack() as run:
        run.enter_context(running(folder / "run"))
        with connect_sse(client, "GET", "/runs/run/events", params={"after": 2}) as source:
            assert source.response.headers["content-type"].startswith("text/event-stream")
            assert "content-security-policy" in source.response.headers
            events = source.iter_sse()
            read_until(events, lambda event: event.event == "status")
            append(folder, 3, reward=0.25)
            assert "[3, 0.25]" in read_until(events, lambda event: event.event == "charts").data
            run.close()
            assert [event.event for event in events][-1] == "end"


def test_many_open_tabs_do_not_block_other_pages(folder: Path, client: httpx.Client) -> None:
    """More streams than the server has threads."""
    with running(folder / "run"), ExitStack() as tabs:
        for _ in range(60):
            response = tabs.enter_context(client.stream("GET", "/runs/run/events", params={"after": 0}))
            assert response.status_code == 200
        assert client.get("/runs/run").status_code == 200


def test_a_stream_ends_when_its_client_leaves(
    folder: Path, client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    polled: list[float] = []
    poll = RunFeed.poll
    monkeypatch.setattr(RunFeed, "poll", lambda self: polled.append(time.monotonic()) or poll(self))
    with running(folder / "run"):
        with client.stream("GET", "/runs/run/events") as response:
            next(response.iter_lines())
        left = time.monotonic()
        deadline = left + 30
        while time.monotonic() < deadline and time.monotonic() - polled[-1] < 3:
            time.sleep(0.05)
    assert polled[-1] - left < 5, "the server has stopped looking at the files"


def test_a_server_stops_without_a_message_although_pages_follow_runs(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with running(folder / "run"), ExitStack() as tabs:
        with open_view(folder) as url:
            client = tabs.enter_context(httpx.Client(timeout=30))
            client.get(url)
            response = tabs.enter_context(client.stream("GET", f"{url.partition('/?')[0]}/runs/run/events"))
            lines = response.iter_lines()  # the connection is closed with its iterator
            next(lines)
        assert capfd.readouterr().err == ""


@pytest.mark.parametrize("after", ["-1", "x", "1.5"])
def test_a_wrong_step_is_refused(client: httpx.Client, after: str) -> None:
    response = client.get("/runs/run/events", params={"after": after})
    assert response.status_code == 400
    assert "expected a number of steps" in response.text


def test_a_head_request_does_not_follow_a_run(client: httpx.Client) -> None:
    assert client.head("/events").status_code == 200
