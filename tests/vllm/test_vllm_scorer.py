"""A teacher behind a vLLM server."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from lightning_core import fit, load_config
from lightning_core.backends.vllm.backend import VllmBackend
from lightning_core.errors import ConfigError, InfrastructureError, TrainingError
from lightning_core.model.source import load_tokenizer
from lightning_core.signals.distill.server_scorer import ServerScorer
from tests.tiny_model import make_tiny_model
from tests.trainers.rows import make_row


def scorer(url: str, folder: Path, count: int = 0) -> ServerScorer:
    tokenizer: Any = load_tokenizer(folder)
    return ServerScorer(
        url,
        api_key=None,
        encode=lambda text: tokenizer.encode(text, add_special_tokens=False),
        decode=lambda token: tokenizer.decode([token]),
        count=count,
    )


def test_candidates_are_the_most_likely_tokens(server: str, backend: VllmBackend, model: Path) -> None:
    rng = np.random.default_rng(1)
    row = make_row(*[(rng.integers(0, 200, size=n).tolist(), n % 2 == 1) for n in (30, 7, 12, 1)])
    found = scorer(server, model, 5).candidates([row], 5)
    with torch.no_grad():
        network: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        logits = network(torch.tensor(row.token_ids.astype(np.int64))[None]).logits[0].log_softmax(-1)
    top = logits[:-1].topk(5)
    for segment in row.segments:
        own = slice(segment.start - 1, segment.stop - 1)
        np.testing.assert_allclose(found[segment.call].logprobs_TK, top.values[own].numpy(), atol=1e-4)
        assert found[segment.call].token_ids_TK.tolist() == top.indices[own].tolist()


def test_a_server_that_returns_fewer_candidates_is_refused(server: str, backend: VllmBackend, model: Path) -> None:
    with pytest.raises(ConfigError, match="it must return 5000 logprobs a token"):
        scorer(server, model, 5000)


def test_scores_are_those_of_the_model(server: str, backend: VllmBackend, model: Path) -> None:
    rng = np.random.default_rng(0)
    parts = [(rng.integers(0, 200, size=n).tolist(), n % 2 == 1) for n in (30, 7, 12, 1)]
    rows = [make_row(*parts), make_row(*parts[:2], rollout="r1")]
    found = scorer(server, model).logprobs(rows)
    with torch.no_grad():
        network: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        logits = network(torch.tensor(rows[0].token_ids.astype(np.int64))[None]).logits[0].log_softmax(-1)
    expected = logits[:-1].gather(1, torch.tensor(rows[0].token_ids[1:].astype(np.int64))[:, None])[:, 0].numpy()
    for segment in [*rows[0].segments, *rows[1].segments]:
        np.testing.assert_allclose(found[segment.call], expected[segment.start - 1 : segment.stop - 1], atol=1e-4)


def test_a_server_teaches_as_the_same_model_here(
    server: str, backend: VllmBackend, model: Path, other_model: Path, tmp_path: Path
) -> None:
    def divergences(teacher: str, name: str) -> list[float]:
        config = load_config(
            {
                "agent": "tests.loop.taught_agents:equal",
                "tasks": {"train": {"source": "tests.bandit:tasks", "args": {"count": 8}}},
                "policy": {"model": str(other_model), "max_context": 2048, "dtype": "float32"},
                "rollouts": {"tasks_per_step": 2, "group_size": 4, "max_tokens": 8},
                "algorithm": {"distill": {"teacher": teacher}, "reward_weight": 0.0},
                "trainer": {"steps": 2, "learning_rate": 3e-3, "checkpoint_every": 0},
                "run": {"dir": str(tmp_path), "name": name},
            }
        )
        return [metrics["teacher_kl"] for metrics in fit(config=config).metrics]

    assert divergences(f"{server}/v1", "server") == pytest.approx(divergences(str(model), "here"), abs=1e-3)


def test_constrained_responses_are_left_out_with_one_warning(
    server: str, backend: VllmBackend, model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    teacher = scorer(server, model, 5)
    free, row = (make_row(([1, 2], False), ([3], True), ([4], False), ([5, 6], True)) for _ in range(2))
    first, last = row.segments
    mixed = replace(row, segments=(first, replace(last, constraint="{}")))
    none = make_row(([1, 2], False), ([3], True), constraint="{}")
    kept = [s.call for s in free.segments] + [first.call]
    assert [*teacher.logprobs([free, mixed, none])] == kept
    assert [*teacher.candidates([free, mixed, none], 5)] == kept
    (warning,) = [record.getMessage() for record in caplog.records if "algorithm.distill" in record.getMessage()]
    assert "constrained to a JSON schema or to tool calls" in warning
    assert "first of ['writer']" in warning


def test_what_a_server_cannot_score_is_an_error(server: str, backend: VllmBackend, model: Path, tmp_path: Path) -> None:
    teacher = scorer(server, model)
    with pytest.raises(TrainingError, match=r"sampled at \[0.5\]; set rollouts.temperature: 1.0"):
        teacher.logprobs([make_row(([1, 2], False), ([3], True), temperature=0.5)])
    with pytest.raises(InfrastructureError, match="returned status 400"):
        teacher.logprobs([make_row(([1] * 5000, False), ([3], True))])
    other = make_tiny_model(tmp_path / "other", texts=["The quick brown fox of another language"] * 20)
    with pytest.raises(ConfigError, match=r"both need the same\s+tokenizer"):
        scorer(server, other)
    with pytest.raises(InfrastructureError, match=r"no usable response from the teacher's server http://127.0.0.1:9"):
        scorer("http://127.0.0.1:9", model)
