"""A run with verl on what rewards do not say: a teacher on a vLLM server, and a cross-entropy on messages of the user."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_core.backends.vllm.api import CPU_ARGS
from lightning_core.backends.vllm.server import serve_vllm
from lightning_core.records.report import read_metrics
from tests.tiny_model import make_tiny_model
from tests.verl.conftest import Train
from tests.verl.cpu import ENVIRONMENT

pytestmark = [pytest.mark.timeout(900), pytest.mark.slow]


def test_the_policy_is_trained_without_a_difference_in_rewards(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loss is the divergence from the teacher and half the cross-entropy, which is the larger part."""
    for name, value in ENVIRONMENT.items():
        if name.startswith(("VLLM_", "HF_", "TORCHDYNAMO")):
            monkeypatch.setenv(name, value)
    teacher = make_tiny_model(tmp_path / "teacher", arch="qwen2", heads=2, seed=1)
    options = (*CPU_ARGS, "--enforce-eager", "--max-num-seqs", "16")
    with serve_vllm(teacher, dtype="float32", max_context=512, args=options, start_seconds=270) as url:
        run = train(
            agent="tests.verl.agents:says_twice",
            agents={"train": ["writer"]},
            algorithm={
                "distill": {"teacher": f"{url}/v1"},
                "ce": {"weight": 0.5, "tokens": "user"},
                "reward_weight": 0.0,
            },
            trainer={"steps": 6, "learning_rate": 3e-3},
        )
    assert run.trained, run.output[-4000:]
    metrics = read_metrics(run.folder / "metrics.jsonl")
    assert all(m["groups_equal"] == 2 and m["verl/actor/grad_norm"] > 0 for m in metrics)
    assert all(m["tokens_distilled"] == m["tokens_trained"] for m in metrics)
    assert all(m["tokens_ce"] == 8 * len("and now?") and m["ce_messages_unknown"] == 0 for m in metrics)
    losses = [m["verl/actor/pg_loss"] for m in metrics]
    assert losses[0] > metrics[0]["teacher_kl"] + 1
    assert losses[-1] < losses[0] - 1
