"""The loop with vLLM as the sampler: real rollouts, real updates, weights pushed after each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lightning_core import fit, load_config
from lightning_core.errors import ConfigError
from lightning_core.records.store import Store
from tests.tiny_model import make_tiny_model

ARGS = ["--enforce-eager", "--max-num-seqs", "32"]


def settings(model: Path, runs: Path, steps: int, **policy: Any) -> dict[str, Any]:
    return {
        "agent": "tests.bandit:solve",
        "tasks": {"train": "tests.bandit:tasks", "eval": "tests.bandit:held_out"},
        "policy": {
            "model": str(model),
            "train_layers": None,
            "max_context": 256,
            "dtype": "float32",
            "backend": "vllm",
            **policy,
        },
        "rollouts": {"tasks_per_step": 4, "group_size": 8, "max_tokens": 4, "temperature": 0.9},
        "trainer": {"steps": steps, "learning_rate": 5e-3},
        "run": {"dir": str(runs), "name": "run"},
    }


def assert_versions(folder: Path, steps: int) -> None:
    with Store(folder / "store.db", read_only=True) as store:
        for step in range(1, steps + 1):
            calls = [c for r in store.rollouts(step=step, phase="train") for c in store.trace(r.id).calls]
            assert {c.policy_version for c in calls} == {step - 1}


def test_a_tied_model_learns_with_its_own_server(tmp_path: Path):
    """Tied, as in most small models: the output layer must be trained too."""
    model = make_tiny_model(tmp_path / "model", heads=2)
    config = load_config(settings(model, tmp_path, 12, vllm={"args": ARGS}))
    result = fit(config=config)
    summary = json.loads((result.folder / "summary.json").read_text())
    assert summary["eval_reward_after"] > summary["eval_reward_before"] + 0.3
    assert max(m["logprob_difference_max"] for m in result.metrics) < 1e-3, "sampler and trainer agree on every token"
    assert all(m["seconds_push"] > 0 for m in result.metrics)
    assert sum(m["rollouts_left_out"] for m in result.metrics) == 0
    assert_versions(result.folder, 12)


def test_adapters_are_sampled_merged_by_a_running_server(server: str, model: Path, tmp_path: Path):
    """The server may have other weights at first, here another test's, and a longer context than the run."""
    config = settings(model, tmp_path, 3, vllm={"url": server}, tuning="lora", lora={"rank": 4})
    config["trainer"]["learning_rate"] = 2e-2
    result = fit(config=load_config(config))
    assert max(m["logprob_difference_max"] for m in result.metrics) < 1e-3
    assert_versions(result.folder, 3)

    config["run"] = {**config["run"], "resume": True}
    config["trainer"]["steps"] = 4
    resumed = fit(config=load_config(config))
    assert [m["step"] for m in resumed.metrics] == [1, 2, 3, 4]
    assert resumed.metrics[-1]["logprob_difference_max"] < 1e-3, "the checkpoint's weights are the ones that sample"
    assert_versions(resumed.folder, 4)


@pytest.mark.long
def test_workers_of_the_endpoint_sample_every_version(server: str, model: Path, tmp_path: Path):
    """Each of the two has a client of its own; pushes hold both back."""
    config = {**settings(model, tmp_path, 2, vllm={"url": server}), "endpoint": {"workers": 2}}
    result = fit(config=load_config(config))
    assert max(m["logprob_difference_max"] for m in result.metrics) < 1e-3
    assert sum(m["rollouts_left_out"] for m in result.metrics) == 0
    assert_versions(result.folder, 2)


def test_a_running_server_on_a_cpu_cannot_have_a_tied_model(server: str, tmp_path: Path):
    model = make_tiny_model(tmp_path / "model", heads=2)
    with pytest.raises(ConfigError, match="tied to the embeddings"):
        fit(config=load_config(settings(model, tmp_path, 1, vllm={"url": server})))
