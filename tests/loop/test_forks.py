"""Forks in the whole loop on a tiny random model: recorded, credited, trained on, computed again, resumed."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from lightning_core import fit, load_config
from lightning_core.errors import ConfigError
from lightning_core.loop import Result
from lightning_core.records.store import Store
from lightning_core.signals.air.keys import Air
from lightning_core.signals.air.rewards import with_air
from lightning_core.tools.cli.main import main
from lightning_core.tools.runs.recredit import recredit, step_episodes
from lightning_core.tools.sft.examples import Selection, read_examples
from lightning_core.trace import REPLAYS
from tests.tiny_model import make_tiny_model
from tests.tools.view.pages import browsing


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


def settings(model: Path, runs: Path, **sections: Any) -> dict[str, Any]:
    base: dict[str, dict[str, Any]] = {
        "tasks": {"train": {"source": "tests.signals.forked_agents:tasks"}},
        "policy": {"model": str(model), "max_context": 2048, "dtype": "float32"},
        "credit": {"rewards": "counterfactual", "advantage": "rloo"},
        "rollouts": {
            "tasks_per_step": 2, "group_size": 3, "max_tokens": 4, "executor": "task", "forks": {"points": 2, "samples": 2},
        },
        "trainer": {"steps": 2, "learning_rate": 5e-3},
        "run": {"dir": str(runs), "name": "run"},
    }  # fmt: skip
    merged = {key: {**base.get(key, {}), **sections.get(key, {})} for key in {**base, **sections}}
    return {"agent": "tests.signals.forked_agents:conversation", **merged}


def train(model: Path, runs: Path, **sections: Any) -> Result:
    agent = sections.pop("agent", "tests.signals.forked_agents:conversation")
    return fit(config=load_config({**settings(model, runs, **sections), "agent": agent}))


OTHERS: list[dict[str, Any]] = [
    {"rewards": "vine", "advantage": "none"},
    {"rewards": "examples.rules.tree:tree"},
    {"rewards": "tests.signals.forked_agents:outcome", "advantage": "grpo"},
]


@pytest.mark.parametrize(
    "credit", [{"rewards": "counterfactual", "advantage": "rloo"}, *(pytest.param(c, marks=pytest.mark.long) for c in OTHERS)],
    ids=lambda c: c["rewards"],
)  # fmt: skip
def test_forks_are_recorded_credited_and_trained_on(model: Path, tmp_path: Path, credit: dict[str, Any]) -> None:
    result = train(model, tmp_path, credit=credit)
    for metrics in result.metrics:
        assert (metrics["rollouts"], metrics["forks"], metrics["forks_dropped"]) == (6, 8, 0)
        assert metrics["tokens_forked"] > 0
        assert metrics["logprob_difference_max"] < 1e-4, "the sampled logprobs are those of the repeated history"
    with Store(result.folder / "store.db", read_only=True) as store:
        own = 0
        for record in store.rollouts():
            trace = store.trace(record.id)
            sampled = [call for call in trace.calls if call.replays is None]
            assert {c.call for c in store.credit(rollout=record.id)} == {call.id for call in sampled}
            assert sum(call.forks is not None for call in trace.calls) == (record.phase == "fork")
            own += sum(len(call.output_ids) for call in sampled if call.output_ids is not None)
        assert store.tokens_sampled() == own
        assert sum(store.ledger().values()) == sum(len(store.credit(rollout=r.id)) for r in store.rollouts())
        again = recredit(store, 1, load_config(result.folder / "config.yaml"))
        no_forks = ["rollouts.forks=null", "credit.rewards=broadcast"]
        without = recredit(store, 1, load_config(result.folder / "config.yaml", no_forks))
        assert {change.ordinal for change in without} < {change.ordinal for change in again}
        assert all(change.advantage == pytest.approx(change.trained.advantage) for change in again)
        assert len(again) == len(store.credit(step=1))
        episodes = step_episodes(store, 1)
        for before, after in zip(episodes, with_air(episodes, Air(call_cost=1.0, gate=False), solved=1.0), strict=True):
            costs = after.rewards[len(before.rewards) :]
            assert len(costs) == len(before.trace.calls) == 3, "a fork pays for the calls that it repeats too"


def test_forks_that_cannot_be_restored_are_counted_and_left_out(model: Path, tmp_path: Path, caplog: Any) -> None:
    result = train(
        model, tmp_path, agent="tests.signals.forked_agents:timed", rollouts={"forks": {"points": 6, "samples": 1}}
    )
    for metrics in result.metrics:
        assert (metrics["forks"], metrics["forks_dropped"]) == (6, 6)
    with Store(result.folder / "store.db", read_only=True) as store:
        errors = [record.error for record in store.rollouts(phase="fork") if record.error is not None]
        forked = [store.trace(r.id) for r in store.rollouts(phase="fork")]
        own = [c.output_ids for trace in forked for c in trace.calls if c.replays is None and c.output_ids is not None]
        assert sum(m["tokens_forked"] for m in result.metrics) == sum(map(len, own)), "dropped forks cost tokens too"
        credited = {c.rollout for c in store.credit()}
        assert not credited & {r.id for r in store.rollouts(phase="fork") if r.error is not None}
    assert len(errors) == 12
    assert all(error.startswith("fork dropped: agent 'talker' sent another prompt") for error in errors)
    assert any("a fork is dropped" in record.getMessage() for record in caplog.records)
    left_out = Counter[str]()
    assert len(read_examples([result.folder], Selection(phase="fork", min_reward=-1.0), left_out)) == 12
    assert left_out == {"forks that were dropped": 12}


def test_a_recorded_stream_comes_in_the_same_pieces(model: Path, tmp_path: Path) -> None:
    """So an agent that uses a part of it has the same text, and its forks are kept."""
    forks = {"points": 9, "samples": 1}
    result = train(
        model, tmp_path, agent="tests.signals.forked_agents:impatient", trainer={"steps": 1}, rollouts={"forks": forks}
    )
    for metrics in result.metrics:
        assert metrics["forks"] > 6
        assert metrics["forks_dropped"] == 0


def test_forks_get_recorded_results_of_tools(model: Path, tmp_path: Path, caplog: Any) -> None:
    """Without them, forks after a random tool are dropped."""
    agent, forks = "tests.signals.replayed_agents:looks_up", {"points": 6, "samples": 1}
    live = train(model, tmp_path / "live", agent=agent, trainer={"steps": 1}, rollouts={"forks": forks})
    assert (live.metrics[0]["forks"], live.metrics[0]["forks_dropped"]) == (0, 12)
    result = train(
        model, tmp_path, agent=agent, trainer={"steps": 1}, rollouts={"forks": {**forks, "tools": "recorded"}}
    )
    metrics = result.metrics[0]
    assert (metrics["forks"], metrics["forks_dropped"], metrics["fork_tools_live"]) == (12, 0, 0)
    with Store(result.folder / "store.db", read_only=True) as store:
        recorded = sum(
            REPLAYS in event.attributes for r in store.rollouts(phase="fork") for event in store.trace(r.id).events
        )
    assert metrics["fork_tools_recorded"] == recorded >= 12


def test_tools_that_cannot_be_recorded_are_logged(model: Path, tmp_path: Path, caplog: Any) -> None:
    forks = {"points": 9, "samples": 1, "tools": ["open_file", "read_file"]}
    result = train(
        model, tmp_path, agent="tests.signals.replayed_agents:opens", trainer={"steps": 1}, rollouts={"forks": forks}
    )
    metrics = result.metrics[0]
    assert metrics["forks_dropped"] == 0
    assert metrics["fork_tools_live"] > 0
    text = " ".join(record.getMessage() for record in caplog.records)
    assert "the tool 'open_file' runs again in forks: its result, of type lock, cannot be pickled: " in text
    assert "the tool 'read_file' runs again in forks: its result has " in text


def test_a_resumed_run_repeats_its_forks(model: Path, tmp_path: Path) -> None:
    few: dict[str, Any] = {"rollouts": {"tasks_per_step": 1, "forks": {"points": 1, "samples": 2}}}
    whole = train(model, tmp_path / "whole", **few)
    train(model, tmp_path / "cut", trainer={"steps": 1}, **few)
    resumed = train(model, tmp_path / "cut", run={"dir": str(tmp_path / "cut"), "name": "run", "resume": True}, **few)
    with (
        Store(whole.folder / "store.db", read_only=True) as a,
        Store(resumed.folder / "store.db", read_only=True) as b,
    ):
        rewards = [sorted((r.step, r.task_id, r.phase, r.reward) for r in store.rollouts()) for store in (a, b)]
        assert rewards[0] == rewards[1]
        assert "fork" in {phase for _, _, phase, _ in rewards[0]}


@pytest.mark.parametrize(
    ("sections", "error"),
    [
        ({"rollouts": {"forks": None}}, "credit.rewards: 'counterfactual' uses forks; set rollouts.forks"),
        ({"credit": {"rewards": "broadcast"}}, "credit.rewards: found 'broadcast', which ignores rollouts.forks; expected one of"),
        ({"rollouts": {"forks": {"tools": "look_up"}}}, "found 'look_up', expected live, recorded or a list of names: [look_up]"),
        ({"agent": {"command": ["true"]}, "rollouts": {"forks": {"tools": "recorded"}}}, "tools of a program (agent.command) run in it"),
        ({"credit": {"rewards": "vine", "advantage": "grpo"}}, "the mean of the other rollouts is the baseline"),
    ],
)  # fmt: skip
def test_forks_and_rules_must_fit(model: Path, tmp_path: Path, sections: dict[str, Any], error: str) -> None:
    agent = sections.pop("agent", "tests.signals.forked_agents:conversation")
    with pytest.raises(ConfigError) as raised:
        load_config({**settings(model, tmp_path, **sections), "agent": agent})
    assert error in str(raised.value)


def test_the_command_line_computes_credit_of_forks_again(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = train(model, tmp_path, trainer={"steps": 1})
    capsys.readouterr()
    main(["credit", str(result.folder), "credit.rewards=examples.rules.tree:tree", "credit.advantage=grpo"])
    assert "talker" in capsys.readouterr().out
    main(
        [
            "credit",
            str(result.folder),
            "--rule",
            "discounted",
            "credit.gamma=0.9",
            "rollouts.forks=null",
            "--calls",
            "100",
        ]
    )
    shown = capsys.readouterr().out
    with Store(result.folder / "store.db", read_only=True) as store:
        attempts = {r.id for r in store.rollouts(phase="train")}
        own = sum(c.rollout in attempts for c in store.credit())
        assert 0 < own < len(store.credit())
    assert f"{own} calls" in " ".join(shown.split()), shown


def test_the_trace_and_the_viewer_tell_repeated_calls_from_sampled_ones(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = train(model, tmp_path, trainer={"steps": 1}, rollouts={"forks": {"points": 9, "samples": 1}})
    with Store(result.folder / "store.db", read_only=True) as store:
        forks = [r for r in store.rollouts(phase="fork") if any(c.replays for c in store.trace(r.id).calls)]
    capsys.readouterr()
    main(["trace", str(result.folder), "--rollout", str(forks[0].ordinal)])
    shown = capsys.readouterr().out
    assert "answered from the record of call" in shown
    assert "sampled in place of call" in shown
    with browsing(tmp_path) as client:
        page = client.get(f"/runs/run/rollouts/{forks[0].ordinal}")
    assert page.status_code == 200
    assert "Answered from the record of call" in page.text
    assert "Sampled in place of call" in page.text
