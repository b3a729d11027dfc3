"""verl's asynchronous trainers. The synchronous one is in test_training.py."""

from __future__ import annotations

import pytest
import torch

from lightning_core.records.report import read_metrics
from lightning_core.records.store import Store
from tests.verl.conftest import Train
from tests.verl.cpu import SETTINGS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_colocated_and_dynamic_sampling(train: Train) -> None:
    """Groups of equal rewards are replaced."""
    done = train(
        agent="tests.verl.agents:earns_the_same_for_some",
        agents={"train": ["writer"]},
        rollouts={"refill": 3},
        trainer={"mode": "colocate_async", "steps": 3, "checkpoint_every": 0},
    )
    assert done.trained, done.output[-4000:]
    metrics = read_metrics(done.folder / "metrics.jsonl")
    assert [m["step"] for m in metrics][:3] == [1, 2, 3]
    assert sum(m["groups_refilled"] for m in metrics) > 0
    assert all(m["groups_refilled"] <= 3 for m in metrics)
    with Store(done.folder / "store.db", read_only=True) as store:
        flat = {r.id for r in store.rollouts(phase="train") if int(r.task_id.removeprefix("t")) % 2}
        credited = {c.rollout for c in store.credit()}
    for step in (1, 2, 3):
        rows = torch.load(done.batches / f"step-{step}.pt", weights_only=False)
        real = [row["tag"] for row in rows if not row["tag"].get("is_padding", False)]
        assert len(real) == 8, "two groups of four attempts"
        # Prompts are requested one step ahead, so the rows of an update may be one version old.
        assert all(0 <= tag["min_global_steps"] <= tag["max_global_steps"] < step for tag in real)
    assert flat - credited, "replaced groups are not trained on"


def test_separate(train: Train) -> None:
    """A separate server samples while the trainer trains. Weights are transferred by file_transport.py."""
    own = {
        **SETTINGS,
        "actor_rollout_ref.rollout.checkpoint_engine.backend": "files",
        "actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module": "tests.verl.file_transport",
        "ray_kwargs.ray_init": {**SETTINGS["ray_kwargs.ray_init"], "+num_gpus": 2},
    }
    mode = {"mode": "separate_async", "rollout_nodes": 1, "rollout_gpus_per_node": 1}
    done = train(
        agent="tests.verl.agents:digits",
        agents={"train": ["writer"]},
        trainer={**mode, "steps": 3, "checkpoint_every": 0, "verl": own},
    )
    assert done.trained, done.output[-4000:]
    versions: set[int] = set()
    for step in (1, 2, 3):
        tags = [row["tag"] for row in torch.load(done.batches / f"step-{step}.pt", weights_only=False)]
        assert all(0 <= tag["min_global_steps"] <= tag["max_global_steps"] < step for tag in tags)
        versions |= {tag["max_global_steps"] for tag in tags}
    assert len(versions) > 1, "new weights reach the server"
