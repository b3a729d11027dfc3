"""The summary, metrics and the curve; progress displays."""

from __future__ import annotations

import io
import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from rich.console import Console

from lightning_core.errors import MissingExtra
from lightning_core.observers.progress import (
    LiveProgress,
    PlainProgress,
    Progress,
    SilentProgress,
    format_seconds,
    show_progress,
)
from lightning_core.records.report import (
    MetricsLog,
    Summary,
    draw_curve,
    read_metrics,
    read_summary,
)
from lightning_core.records.statistics.constant_answer import ConstantAnswer, DistinctAnswers
from lightning_core.records.statistics.intervals import Estimate, compare, compare_splits
from lightning_core.records.statistics.summary import Answers, RaisedMonitor, SolvedTasks
from lightning_core.tools.cli.console import show
from lightning_core.tools.cli.summary import make_summary
from tests.tools.cli.terminal import on_terminal


def summary(**changes: object) -> Summary:
    before = {f"t{i}": [float(i % 4 == 0)] for i in range(20)}
    after = {f"t{i}": [float(i % 4 != 3)] for i in range(20)}
    values: dict[str, object] = {
        "eval": compare(before, after),
        "splits": compare_splits(before, after, {"t0": "easy", "t1": "easy", "t2": "hard"}),
        "steps": 30,
        "rollouts": 1920,
        "tokens_sampled": 123456,
        "tokens_trained": 100000,
        "wall_seconds": 754.2,
        "seed": 0,
    }
    return Summary(**{**values, **changes})  # type: ignore[arg-type]


def test_summary_file(tmp_path: Path) -> None:
    written = summary()
    written.write(tmp_path / "summary.json")
    data = json.loads((tmp_path / "summary.json").read_text())
    assert (data["eval_reward_before"], data["eval_reward_after"], data["improvement"]) == (0.25, 0.75, 0.5)
    assert data["eval_ci95_before"][0] < 0.25 < data["eval_ci95_before"][1]
    assert data["improvement_ci95"][0] > 0
    assert data["splits"]["easy"]["tasks"] == 2
    assert data["versions"]["lightning-rl"]
    assert data["versions"]["python"]
    assert read_summary(tmp_path / "summary.json") == written
    assert written.improved


def printed(shown: Summary, capsys: pytest.CaptureFixture[str]) -> str:
    """``shown`` without a terminal."""
    show(make_summary(shown))
    return capsys.readouterr().out


def test_summary_without_held_out_tasks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written = summary(eval=None, splits={})
    written.write(tmp_path / "summary.json")
    assert json.loads((tmp_path / "summary.json").read_text())["improvement_ci95"] is None
    assert read_summary(tmp_path / "summary.json") == written
    assert written.improved is None
    expected = (
        "No result was measured: set tasks.eval to evaluate on held-out tasks.\n\n"
        "30 steps, 1,920 rollouts, 123,456 tokens sampled, 100,000 trained, 12m34s, seed 0\n"
    )
    assert printed(written, capsys) == expected


OVERVIEW: dict[str, object] = {
    "solved": SolvedTasks(tasks=20, before=5, after=15),
    "groups": 240,
    "groups_wasted": 60,
    "groups_replaced": 3,
    "rollouts_failed": 12,
    "rollouts_max_calls": 5,
    "rollouts_left_out": 3,
    "first_errors": {
        "failed": "ValueError: [/bold] no number",
        "max_calls": "it made 9 model calls",
        "left_out": "UpstreamError: gone",
    },
    "monitors": (
        RaisedMonitor(
            monitor="no_gradient", policy=None, first_step=4, last_step=9, steps=5, message="nothing. Do this"
        ),
        RaisedMonitor(monitor="truncation", policy="writer", first_step=7, last_step=7, steps=1, message="cut"),
    ),
    "answers": (
        Answers(task="t1", change="rose", reward_before=0, reward_after=1, before="I [b]guess[/b]", after="42"),
        Answers(task="t2", change="fell", reward_before=1, reward_after=0, before="7", after=None),
    ),
}


def test_the_summary_shows_failures_monitors_and_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written = summary(**OVERVIEW)
    written.write(tmp_path / "summary.json")
    assert read_summary(tmp_path / "summary.json") == written
    out = printed(written, capsys).splitlines()
    assert "Solved: 5 of 20 held-out tasks (25%) before, 15 (75%) after." in out
    assert "t1             0.000 → 1.000  I [b]guess[/b]  42" in out
    assert "t2             1.000 → 0.000  7               (none)" in out
    assert "No gradient from rewards in 60 of 240 groups (25%): all their advantages were 0." in out
    assert "Replaced by rollouts.refill: 3 further groups without a gradient." in out
    assert "12 of 1,920 rollouts failed; the first: ValueError: [/bold] no number" in out
    assert "5 of 1,920 rollouts reached rollouts.max_calls; the first: it made 9 model calls" in out
    assert "3 of 1,920 rollouts were left out; the first: UpstreamError: gone" in out
    assert "Monitor no_gradient (5 steps, 4 to 9): nothing. Do this." in out
    assert "Monitor truncation of policy writer (step 7): cut." in out


FORM = ConstantAnswer(
    answer="[b]yes",
    reward=0.625,
    source="reward function",
    compared=9,
    tasks=20,
    known=20,
    lead=0.125,
    lead_ci95=(-0.1, 0.3),
)


def test_an_improvement_that_does_not_beat_the_best_constant_answer_is_one_of_form(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    distinct = DistinctAnswers(before=19, rollouts_before=20, after=2, rollouts_after=20)
    written = summary(distinct_answers=distinct, constant_answer=FORM)
    written.write(tmp_path / "summary.json")
    assert read_summary(tmp_path / "summary.json") == written
    out = " ".join(printed(written, capsys).split())
    assert "Different answers: 19 in 20 held-out rollouts before, 2 in 20 after." in out
    assert (
        "Best constant answer: 0.625 with '[b]yes' for every task (by the reward function, the best of 9 answers). "
        "After training: +0.125 [-0.100, +0.300]. " in out
    )
    recorded = replace(FORM, source="recorded", known=7, lead_ci95=(0.01, 0.3))
    out = " ".join(printed(summary(constant_answer=recorded, constant_answer_problem="it is slow"), capsys).split())
    assert "Best constant answer: at least 0.625 with '[b]yes' for every task (by the rewards of 7 of 20 tasks)." in out
    assert "The reward function was not used for it: it is slow." in out
    assert "of form only" not in out
    out = printed(summary(constant_answer_problem="no answer occurred for more than one task"), capsys)
    assert "Best constant answer not computed: no answer occurred for more than one task.\n" in out


def test_much_waste_ends_with_advice_unless_a_monitor_failures_or_solved_tasks_explain_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    wasted: dict[str, object] = {"groups": 80, "groups_wasted": 60}
    assert "all their advantages were 0. Measured to help: solved examples" in printed(summary(**wasted), capsys)
    explained = replace(cast("Any", OVERVIEW["monitors"])[0], monitor="wasted_groups")
    failures, solved = {"rollouts_failed": 960}, {"solved": SolvedTasks(tasks=20, before=5, after=19)}
    for reason in ({"monitors": (explained,)}, failures, solved):
        assert "all their advantages were 0.\n" in printed(summary(**wasted, **reason), capsys)


def test_a_summary_of_an_older_version_is_read(tmp_path: Path) -> None:
    written = summary()
    written.write(tmp_path / "summary.json")
    data = json.loads((tmp_path / "summary.json").read_text())
    newer = {*OVERVIEW, "distinct_answers", "constant_answer", "constant_answer_problem"}
    old = {key: value for key, value in data.items() if key not in newer}
    (tmp_path / "old.json").write_text(json.dumps(old))
    assert len(old) < len(data)
    assert read_summary(tmp_path / "old.json") == written


def test_the_table_is_aligned(capsys: pytest.CaptureFixture[str]) -> None:
    headline, empty, *lines = printed(summary(), capsys).splitlines()
    assert (headline.partition(":")[0], empty) == ("Significant improvement", "")
    assert lines[0] == "held-out reward  tasks  before                after                 improvement"
    assert lines[1] == "all              20     0.250 [0.087, 0.489]  0.750 [0.511, 0.913]  +0.500 [+0.175, +0.729]"
    assert lines[2].startswith("easy             2      0.500 [0.013, 0.987]  1.000 [0.158, 1.000]  +0.500 [too few")
    assert lines[5] == "In brackets: 95% intervals."


def test_a_run_that_trained_nothing_compares_equal_weights(capsys: pytest.CaptureFixture[str]) -> None:
    first, *_ = printed(summary(tokens_trained=0), capsys).splitlines()
    assert first.startswith("Nothing was trained: held-out reward 0.250 → 0.750 (+0.500)")


def test_a_narrow_terminal_loses_no_number() -> None:
    out = on_terminal(50, run=lambda _: show(make_summary(summary(splits={}))))
    assert max(map(len, out.splitlines())) <= 50
    for number in ("20", "0.250", "0.750", "+0.500"):
        assert number in out.split(), number
    for interval in ("[0.087, 0.489]", "[0.511, 0.913]", "[+0.175, +0.729]"):
        assert interval in out, "no line is broken inside an interval"


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (
            [0.0, 1.0] * 5,
            [0.0, 1.0] * 5,
            "Not significant: held-out reward 0.500 → 0.500 (+0.000) on 10 tasks; ",
        ),
        (
            [1.0] * 6,
            [0.0] * 6,
            "Significant decrease: held-out reward 1.000 → 0.000 (-1.000) on 6 tasks; ",
        ),
        (
            [0.0] * 6,
            [1.0] * 6,
            "Significant improvement: held-out reward 0.000 → 1.000 (+1.000) on 6 tasks; ",
        ),
        (
            [0.0, 0.5],
            [1.0, 1.0],
            "Too few tasks for an interval: held-out reward 0.250 → 1.000 (+0.750) on 2 tasks, expected 6 ",
        ),
    ],
)
def test_the_verdict_is_honest(
    before: list[float], after: list[float], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    first, last = ({str(i): [reward] for i, reward in enumerate(rewards)} for rewards in (before, after))
    assert printed(summary(eval=compare(first, last)), capsys).startswith(expected)


def test_metrics_log(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path)
    log.append(1, {"reward": 0.5, "kl": math.nan})
    log.append(2, {"reward": 0.6})
    with path.open("a") as file:
        file.write('{"step": 3, "rew')
    assert read_metrics(path) == [{"step": 1, "reward": 0.5, "kl": None}, {"step": 2, "reward": 0.6}]
    MetricsLog(path, keep_steps=1).append(2, {"reward": 0.7})
    assert [line["reward"] for line in read_metrics(path)] == [0.5, 0.7]
    stored = {1: {"reward": 0.5}, 2: {"reward": 0.8}, 3: {"reward": 0.9}}
    with path.open("a") as file:
        file.write(path.read_text().splitlines()[1] + "\n")
    # Of a step that has two lines one stays, and a missing one is restored.
    MetricsLog(path, keep_steps=3, stored=stored)
    assert [(line["step"], line["reward"]) for line in read_metrics(path)] == [(1, 0.5), (2, 0.7), (3, 0.9)]
    MetricsLog(path)
    assert read_metrics(path) == []


def test_curve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    evals = [(0, Estimate(0.2, 0.1, 0.3)), (3, Estimate(0.5, math.nan, math.nan))]
    draw_curve(tmp_path / "curve.png", steps=[(1, 0.2), (2, 0.3), (3, 0.5)], evals=evals, title="run")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingExtra, match=r"lightning-rl\[torch\]"):
        draw_curve(tmp_path / "curve.png", steps=[], evals=[])


def test_format_seconds() -> None:
    assert [format_seconds(s) for s in (0.4, 59, 95, 3599.6, 8000)] == ["0s", "59s", "1m35s", "1h00m", "2h13m"]


def drive(progress: Progress, tick: list[float]) -> None:
    for step in (1, 2):
        progress.phase("rollouts", 4)
        tick[0] += 2.0
        progress.advance(3, tokens=100)
        progress.advance(1, tokens=100)
        progress.phase("update", None)
        tick[0] += 3.0
        progress.step(step, 2, {"reward": 0.25 * step})
    progress.message("checkpoint [/bold] kept")
    progress.close()
    progress.close()


def test_plain_progress() -> None:
    stream, tick = io.StringIO(), [0.0]
    drive(PlainProgress(stream, clock=lambda: tick[0]), tick)
    assert stream.getvalue().splitlines() == [
        "step 1/2  reward 0.250  100 tokens/s  5s left",
        "step 2/2  reward 0.500  100 tokens/s  done",
        "checkpoint [/bold] kept",
    ]


def test_live_progress() -> None:
    stream, tick = io.StringIO(), [0.0]
    console = Console(file=stream, force_terminal=True, width=100)
    drive(LiveProgress(console, clock=lambda: tick[0]), tick)
    shown = stream.getvalue()
    assert "step 1/2  reward 0.250  100 tokens/s  5s left" in shown
    assert "checkpoint [/bold] kept" in shown


@pytest.mark.parametrize("live", [False, True], ids=["plain", "live"])
def test_the_time_left_counts_steps_and_nothing_else(live: bool) -> None:
    """Loading takes 100 seconds, each evaluation 50, a checkpoint 20 and a step 4. Before a step there is no estimate."""
    stream, tick = io.StringIO(), [0.0]

    def clock() -> float:
        return tick[0]

    console = Console(file=stream, force_terminal=True, width=100)
    progress = LiveProgress(console, clock=clock) if live else PlainProgress(stream, clock=clock)
    tick[0] += 100
    progress.phase("eval_before", 8)
    tick[0] += 50
    progress.advance(8, tokens=80)
    assert "left" not in stream.getvalue()
    for step, left in ((1, "8s left"), (2, "4s left")):
        progress.phase("train", 4)
        tick[0] += 3
        progress.advance(4, tokens=30)
        progress.phase("update")
        tick[0] += 1
        assert left not in stream.getvalue()
        progress.step(step, 3, {})
        assert left in stream.getvalue()
        tick[0] += 20
        progress.phase("eval", 8)
        tick[0] += 50
    progress.close()


@pytest.mark.parametrize("live", [False, True], ids=["plain", "live"])
def test_a_long_phase_shows_the_time_left(live: bool) -> None:
    stream, tick = io.StringIO(), [0.0]
    console = Console(file=stream, force_terminal=True, width=100)

    def clock() -> float:
        return tick[0]

    progress = LiveProgress(console, clock=clock) if live else PlainProgress(stream, clock=clock)
    progress.phase("update", 8)
    for _ in range(6):
        tick[0] += 15
        progress.advance()
    progress.close()  # a live display shows its last state
    assert "30s left" in stream.getvalue()
    if not live:  # one line in 20 seconds at most
        assert stream.getvalue().splitlines() == [
            "update 2/8  1m30s left",
            "update 4/8  1m00s left",
            "update 6/8  30s left",
        ]


def test_silent_progress_and_the_choice(capsys: pytest.CaptureFixture[str]) -> None:
    drive(SilentProgress(), [0.0])
    assert isinstance(show_progress(io.StringIO()), PlainProgress)
    assert capsys.readouterr().out == ""


def test_preparations_are_shown_and_are_no_part_of_a_step() -> None:
    tick, stream = [0.0], io.StringIO()
    progress = PlainProgress(stream, clock=lambda: tick[0])
    progress.phase("loading the model")
    tick[0] += 100
    progress.phase("train", 1)
    tick[0] += 1
    progress.step(1, 2, {})
    assert stream.getvalue() == "loading the model\nstep 1/2  1s left\n"
    live = LiveProgress(Console(file=stream, force_terminal=True, width=80))
    live.phase("loading the model")
    live.close()
    assert "0/?" not in stream.getvalue()
