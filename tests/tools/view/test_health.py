"""The health of a run: monitors that held, with the messages that the run printed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning_core.observers.monitors import alerts
from lightning_core.records.report import Summary
from lightning_core.records.run_folder.lock import running
from lightning_core.records.run_folder.runs import read_run
from lightning_core.records.statistics.summary import RaisedMonitor
from lightning_core.tools.view.health import HealthAlert, health
from tests.tools.view.made_runs import make_run
from tests.tools.view.served import visitor

EQUAL = {"reward": 0.0, "groups": 2, "groups_equal": 2, "calls": 4, "calls_credited": 0}
"""A step without a gradient."""
BETTER = {**EQUAL, "groups_equal": 0, "calls_credited": 4}


def lines(*steps: dict[str, Any]) -> list[dict[str, Any]]:
    """``steps``, with the metrics of the monitors that hold in them."""
    numbered = [{"step": number, **line} for number, line in enumerate(steps, start=1)]
    for alert in alerts(numbered, {}):
        numbered[alert.step - 1][alert.metric] = 1.0
    return numbered


def test_a_message_is_that_of_the_last_step_in_which_the_monitor_held(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path / "run"))
    metrics = lines(EQUAL, EQUAL, EQUAL, EQUAL, BETTER)
    (alert,) = health(run, metrics, {})
    assert (alert.monitor, alert.steps, alert.holds, alert.since) == ("no_gradient", [3, 4], False, 3)
    assert alert.messages == [found.message for found in alerts(metrics[:4], {}) if found.step == 4]


def test_the_arguments_of_the_run_are_used(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path / "run", config={"monitors": {"args": {"no_gradient": {"steps": 2}}}}))
    (alert,) = health(run, [{"step": 1, **EQUAL}, {"step": 2, **EQUAL, "monitor/no_gradient": 1.0}], {})
    assert (alert.holds, alert.messages[0].startswith("nothing was trained in the last 2 steps")) == (True, True)


def test_wrong_arguments_and_monitors_of_other_code_have_no_message(tmp_path: Path) -> None:
    config = {"monitors": {"args": {"no_gradient": {"no_such": 2}}, "add": ["no_such_module:function"]}}
    run = read_run(make_run(tmp_path / "run", config=config))
    (alert,) = health(run, [{"step": 1, "monitor/own": 1.0}], {})
    assert (alert.monitor, alert.holds, alert.messages) == ("own", True, ())


def summary(*raised: RaisedMonitor) -> Summary:
    return Summary(
        eval=None, steps=5, rollouts=4, tokens_sampled=0, tokens_trained=0, wall_seconds=1, seed=0, monitors=raised
    )


def test_monitors_that_only_the_summary_has_are_shown(tmp_path: Path) -> None:
    found = RaisedMonitor(
        monitor="reward_hacking", policy=None, first_step=5, last_step=5, steps=1, message="held-out rewards fell"
    )
    earlier = RaisedMonitor(monitor="own", policy="a", first_step=2, last_step=3, steps=2, message="gone")
    run = read_run(make_run(tmp_path / "run", summary=summary(found, earlier)))
    metrics = [{"step": step, **BETTER} for step in range(1, 6)]
    assert health(run, metrics, {}) == [
        HealthAlert("reward_hacking", [5], True, ["held-out rewards fell"]),
        HealthAlert("own", [2, 3], False, ["policy a: gone"]),
    ]
    with running(run.folder):
        assert health(read_run(run.folder), metrics, {}) == [], "the summary of an earlier end"


def test_a_monitor_of_the_metrics_that_the_final_evaluation_raised_again_holds(tmp_path: Path) -> None:
    found = RaisedMonitor(monitor="own", policy=None, first_step=1, last_step=5, steps=3, message="again")
    run = read_run(make_run(tmp_path / "run", summary=summary(found)))
    metrics = [{"step": step, **BETTER, "monitor/own": 1.0 if step < 3 else None} for step in range(1, 6)]
    assert health(run, metrics, {}) == [HealthAlert("own", [1, 2, 5], True, ["again"])]


def test_the_page_shows_the_message(tmp_path: Path) -> None:
    make_run(tmp_path / "run", metrics=lines(EQUAL, EQUAL, EQUAL))
    assert "the attempts of all 6 groups earned the same" in visitor(tmp_path).get("/runs/run").text
