"""A complete run: two agents of a LangGraph graph, two GRPO steps, evaluation before and after, a checkpoint, and resuming."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_core import Config, load_config, trace_to_transitions, transitions_to_rows
from lightning_core.config.build_rules import policy_rules
from lightning_core.credit import assign_by_policy
from lightning_core.records.report import read_metrics, read_summary
from lightning_core.records.store import Store
from lightning_core.rollouts.selection import trained_agents
from tests.observers.recording_tracker import reported
from tests.rollouts.collected import ScriptedAgents, collect_step
from tests.verl.conftest import Command, Train

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def run(train: Train) -> Command:
    """With a custom loss, which verl's processes import, and a custom tracker."""
    report_to = ["tests.observers.recording_tracker:RecordingTracker"]
    return train(algorithm={"loss": "tests.credit.own_rules:sapo"}, run={"report_to": report_to})


@pytest.fixture(scope="module")
def config(run: Command) -> Config:
    return load_config(run.folder / "config.yaml")


def batch(run: Command, step: int) -> list[dict[str, Any]]:
    """The rows of verl's update ``step``, without padding rows."""
    rows = torch.load(run.batches / f"step-{step}.pt", weights_only=False)
    return [row for row in rows if not row["tag"].get("is_padding", False)]


def test_it_trains(run: Command) -> None:
    assert run.trained, run.output[-4000:]
    metrics = read_metrics(run.folder / "metrics.jsonl")
    assert [m["step"] for m in metrics] == [1, 2]
    assert all(m["rollouts"] == 8 and m["rollouts_left_out"] == 0 and m["verl/actor/grad_norm"] > 0 for m in metrics)
    summary = read_summary(run.folder / "summary.json")
    assert summary.eval is not None
    assert (summary.steps, summary.rollouts, summary.eval.tasks) == (2, 16, 2)
    with Store(run.folder / "store.db", read_only=True) as store:
        assert Counter(r.phase for r in store.rollouts()) == {"eval_before": 2, "train": 16, "eval_after": 2}
        assert {e.agent for e in store.ledger() if e.kind == "call"} == {"writer", "reviewer"}
        rewards = [r.reward or 0.0 for r in store.rollouts(phase="train", step=1)]
    assert metrics[0]["reward"] == pytest.approx(np.mean(rewards))


def test_trackers_get_the_steps_and_evaluations_when_it_ends(run: Command) -> None:
    lines = reported(run.folder)
    metrics = read_metrics(run.folder / "metrics.jsonl")
    assert [line[1:] for line in lines if line[0] == "step"] == [[m.pop("step"), m] for m in metrics]
    assert [line[:3] for line in lines if line[0] == "evaluation"] == [
        ["evaluation", 0, "eval_before"],
        ["evaluation", 2, "eval_after"],
    ]
    assert (lines[0][0], lines[-1][:2]) == ("start", ["end", "finished"])
    assert "routing: writer → policy" in run.output


def test_metrics_of_rollouts_have_the_names_of_the_embedded_trainer(
    run: Command, config: Config, tmp_path: Path
) -> None:
    embedded = collect_step(config, ScriptedAgents(agents=("writer", "reviewer")), tmp_path, [{"id": "a"}, {"id": "b"}])
    own = {"step", "rows_padding_share"}
    for metrics in read_metrics(run.folder / "metrics.jsonl"):
        assert {name for name in metrics if not name.startswith("verl/")} - own == set(embedded.metrics)
        assert (metrics["rows_per_rollout"], metrics["groups"]) == (2, 2)
        assert sum(value for name, value in metrics.items() if name.startswith("context_")) == 24


@pytest.mark.parametrize("step", [1, 2])
def test_rows_are_those_of_the_core(run: Command, config: Config, step: int) -> None:
    """The rows of verl's update are bit for bit those that the embedded trainer would get."""
    rows = batch(run, step)
    with Store(run.folder / "store.db", read_only=True) as store:
        traces = [store.trace(r.id) for r in store.rollouts(phase="train", step=step, status="ok")]
        recorded = {c.call: c.advantage for c in store.credit(step=step)}
    episodes = _episodes(traces, config)
    credit = assign_by_policy(episodes, policy_rules(config))
    expected = [row for e in episodes for row in transitions_to_rows(e.transitions, credit.advantages)]
    assert recorded == credit.advantages
    assert len(rows) == 16, "one row for the writer, one for both of the reviewer's calls"
    assert Counter(_ours(row) for row in expected) == Counter(_theirs(row) for row in rows)
    assert any(row["returns"].any() for row in rows)


def test_weights_add_up_over_rollouts(run: Command) -> None:
    """Every rollout has the same weight, however many rows it has."""
    rows = batch(run, 1)
    weights: Counter[str] = Counter()
    for row in rows:
        known = (row["response_mask"] == 1) & (row["returns"] != 0)
        found = row["advantages"][known] / row["returns"][known]
        weights[row["key"].rpartition("_")[0]] += float(found.sum())
    assert all(weight == pytest.approx(1 / 8, rel=1e-5) for weight in weights.values() if weight)


def test_tags_hold_the_version_that_sampled(run: Command) -> None:
    for step in (1, 2):
        assert {(row["tag"]["min_global_steps"], row["tag"]["max_global_steps"]) for row in batch(run, step)} == {
            (step - 1, step - 1)
        }


@pytest.mark.slow
def test_the_exported_model_is_evaluated(run: Command, train: Train) -> None:
    checkpoint = run.folder / "checkpoints" / "global_step_2"
    assert (checkpoint / "actor" / "huggingface" / "model.safetensors").is_file()
    done = train(command="eval", folder=run.folder)
    assert done.code == 0, done.output[-2000:]
    assert "held-out reward" in done.output


def test_it_resumes_from_a_checkpoint(run: Command, config: Config, train: Train) -> None:
    done = train(
        "--resume", folder=run.folder, trainer=config.trainer.model_dump() | {"steps": 3, "betas": [0.9, 0.999]}
    )
    assert done.trained, done.output[-4000:]
    assert [m["step"] for m in read_metrics(run.folder / "metrics.jsonl")] == [1, 2, 3]
    assert {row["tag"]["max_global_steps"] for row in batch(done, 3)} == {2}
    with Store(run.folder / "store.db", read_only=True) as store:
        assert {r.step for r in store.rollouts(phase="eval_after")} == {2, 3}
        assert len(store.rollouts(phase="eval_before")) == 2


def _episodes(traces: list[Any], config: Config) -> list[Any]:
    from lightning_core import Episode

    trained = trained_agents(config, traces)
    return [Episode(trace=t, transitions=trace_to_transitions(t, agents=trained), rewards=t.rewards) for t in traces]


def _ours(row: Any) -> tuple[Any, ...]:
    start = int(row.mask.argmax())
    return (
        tuple(row.token_ids.tolist()),
        start,
        row.mask[start:].tobytes(),
        row.advantages[start:].tobytes(),
        row.logprobs[start:].tobytes(),
    )


def _theirs(row: dict[str, Any]) -> tuple[Any, ...]:
    return (
        tuple(row["input_ids"].tolist()),
        len(row["prompts"]),
        row["response_mask"].bool().numpy().tobytes(),
        row["returns"].float().numpy().tobytes(),
        row["rollout_log_probs"].float().numpy().tobytes(),
    )
