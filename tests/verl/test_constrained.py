"""JSON schemas and required calls with verl: sampled under a constraint, and trained under the same distribution."""

from __future__ import annotations

import pytest

from lightning_core.records.report import read_metrics
from lightning_core.records.store import Store
from tests.verl.conftest import Train

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.mark.parametrize("mode", ["sync", "colocate_async"])
def test_constrained_responses_are_trained(train: Train, mode: str) -> None:
    """The servers' logprobs are those that verl's actor computes again; without the masks they differ in every token."""
    done = train(
        agent="tests.verl.agents:typed",
        agents={"train": ["writer"]},
        rollouts={"max_tokens": 40},
        algorithm={"importance": {"high": 2.0}},
        trainer={"mode": mode, "steps": 2, "checkpoint_every": 0},
    )
    assert done.trained, done.output[-4000:]
    assert "only an instruction" not in done.output
    metrics = read_metrics(done.folder / "metrics.jsonl")
    assert all(m["rollouts_failed"] == 0 and m["verl/actor/grad_norm"] > 0 for m in metrics)
    assert metrics[0]["verl/training/rollout_probs_diff_max"] < 1e-3
    with Store(done.folder / "store.db", read_only=True) as store:
        calls = [call for r in store.rollouts(phase="train") for call in store.trace(r.id).calls]
    assert calls
    assert all(call.constraint is not None for call in calls)
