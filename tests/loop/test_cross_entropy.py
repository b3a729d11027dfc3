"""``algorithm.ce`` in the whole loop on tiny random models: which tokens are chosen, and what the policy learns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_core import fit, load_config
from lightning_core.errors import ConfigError
from lightning_core.loop import Result
from lightning_core.records.store import Store
from lightning_core.signals.cross_entropy.section import cross_entropy_of
from lightning_core.signals.cross_entropy.token_sources import TokenSources
from lightning_core.trainers.torch.trainer import TorchTrainer
from lightning_core.transitions import Row
from tests.tiny_model import make_tiny_model
from tests.tools.sft.sft_agents import LISTING


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Row]:
    """The rows of all steps."""
    rows: list[Row] = []
    step = TorchTrainer.step

    def spy(self: TorchTrainer, batch: Any, *on_batch: Any) -> Any:
        rows.extend(batch)
        return step(self, batch, *on_batch)

    monkeypatch.setattr(TorchTrainer, "step", spy)
    return rows


def settings(
    model: Path, runs: Path, ce: dict[str, Any] | None, agent: str = "look_twice", **sections: Any
) -> dict[str, Any]:
    base: dict[str, dict[str, Any]] = {
        "tasks": {"train": {"source": "tests.tools.sft.sft_agents:tasks", "args": {"count": 2}}},
        "policy": {"model": str(model), "max_context": 2048, "dtype": "float32"},
        "rollouts": {"tasks_per_step": 2, "group_size": 2, "max_tokens": 6, "executor": "task"},
        "algorithm": {"ce": ce},
        "trainer": {"steps": 1, "learning_rate": 3e-3, "checkpoint_every": 0},
        "run": {"dir": str(runs), "name": "run"},
    }
    merged = {key: {**base.get(key, {}), **sections.get(key, {})} for key in {**base, **sections}}
    return {"agent": f"tests.tools.sft.sft_agents:{agent}", **merged}


def train(model: Path, runs: Path, ce: dict[str, Any] | None, agent: str = "look_twice", **sections: Any) -> Result:
    return fit(config=load_config(settings(model, runs, ce, agent, **sections)))


def texts(row: Row) -> list[str]:
    """The runs of chosen tokens of a byte-level model, as text."""
    from lightning_core.model.source import load_tokenizer

    tokenizer: Any = load_tokenizer(row_model)
    found: list[list[int]] = []
    previous = False
    for token, chosen in zip(row.token_ids.tolist(), row.cross_entropy_mask.tolist(), strict=True):
        if chosen and not previous:
            found.append([])
        if chosen:
            found[-1].append(token)
        previous = chosen
    return [tokenizer.decode(ids) for ids in found]


row_model: Path


@pytest.fixture(autouse=True)
def _model_of_rows(model: Path) -> None:
    global row_model
    row_model = model


@pytest.mark.parametrize(
    ("on", "expected"),
    [
        pytest.param("tool", [LISTING, "<|im_end|> done"], marks=pytest.mark.long),
        pytest.param("user", ["go on"], marks=pytest.mark.long),
        (["user", "tool"], [LISTING, "<|im_end|> done", "go on"]),
    ],
)
def test_only_the_messages_after_a_response_are_chosen(
    model: Path, tmp_path: Path, seen: list[Row], on: Any, expected: list[str]
) -> None:
    """Token by token: not the task, not the template's text around a message, not what the policy said."""
    metrics = train(model, tmp_path, {"weight": 0.1, "tokens": on}).metrics[0]
    assert len(seen) == 4
    for row in seen:
        assert texts(row) == expected
        assert not (row.mask & row.cross_entropy_mask).any()
        assert row.streams.cross_entropy is not None
        assert set(row.streams.cross_entropy[row.cross_entropy_mask].tolist()) == {np.float32(0.1)}
        assert len(row.segments) == 3
    assert metrics["tokens_ce"] == 4 * sum(map(len, expected))
    assert metrics["ce_messages_unknown"] == 0
    assert metrics["ce_loss"] > 1
    assert metrics["tokens_trained"] == sum(int(row.mask.sum()) for row in seen)


def test_responses_of_good_rollouts_are_chosen(model: Path, tmp_path: Path, seen: list[Row]) -> None:
    train(model, tmp_path / "a", {"weight": 0.1, "tokens": "response"})
    assert all(row.streams.cross_entropy is None for row in seen), "the reward is 0, and solved is 1"
    seen.clear()
    train(model, tmp_path / "b", {"weight": 0.1, "tokens": "response", "min_reward": 0.0})
    assert len(seen) == 4
    for row in seen:
        assert row.streams.cross_entropy is not None
        assert row.streams.cross_entropy.tolist() == (np.float32(0.1) * row.mask).tolist()


@pytest.mark.long
def test_the_policy_learns_to_predict_its_tools(model: Path, tmp_path: Path) -> None:
    """From rollouts that all have the same reward; without the term nothing is trained."""
    result = train(model, tmp_path, {"weight": 1.0}, trainer={"steps": 6, "learning_rate": 1e-2})
    losses = [metrics["ce_loss"] for metrics in result.metrics]
    assert losses[-1] < 0.6 * losses[0]
    assert [metrics["groups_wasted"] for metrics in result.metrics] == [2] * 6


def test_results_without_known_tokens_are_counted(model: Path, tmp_path: Path, seen: list[Row]) -> None:
    """The harness replaced what the policy said, so that the result may be of something else."""
    metrics = train(model, tmp_path, {"weight": 1.0}, "forgetful").metrics[0]
    assert all(row.streams.cross_entropy is None for row in seen)
    assert metrics["tokens_ce"] == 0
    assert metrics["ce_messages_unknown"] == 4


def test_agents_are_chosen_by_pattern(model: Path, tmp_path: Path, seen: list[Row]) -> None:
    train(model, tmp_path / "a", {"weight": 1.0, "agents": ["cl*"]})
    assert all(row.streams.cross_entropy is not None for row in seen)
    with pytest.raises(
        ConfigError, match=r"algorithm.ce.agents names 'cook', but the trained agents of this program are"
    ):
        train(model, tmp_path / "b", {"weight": 1.0, "agents": ["cook"]})


def test_changed_records_have_no_known_tokens(model: Path, tmp_path: Path) -> None:
    """Stored calls whose prompt is not what the messages are rendered to."""
    from dataclasses import replace

    from lightning_core.chat.chat import Chat
    from lightning_core.credit import Episode
    from lightning_core.model.source import load_tokenizer
    from lightning_core.transitions import trace_to_transitions

    config = load_config(settings(model, tmp_path, {"weight": 1.0}))
    fit(config=config)
    with Store(tmp_path / "run" / "store.db", read_only=True) as store:
        trace = store.trace(1)
    tokenizer: Any = load_tokenizer(model)
    settings_of_run = cross_entropy_of(config.algorithm)
    assert settings_of_run is not None
    sources = TokenSources(settings_of_run, {"policy": Chat(tokenizer)}, solved=1.0)

    def choose(calls: Any) -> Any:
        changed = replace(trace, calls=tuple(calls))
        return sources.choose(
            [Episode(trace=changed, transitions=trace_to_transitions(changed, agents=["clerk"]), rewards=())]
        )

    assert choose(trace.calls).unknown == 0
    assert sum(map(len, choose(trace.calls).spans.values())) == 2
    ids = trace.calls[1].prompt_ids
    assert ids is not None
    other = ids.copy()
    other[-20] += 1
    found = choose([trace.calls[0], replace(trace.calls[1], prompt_ids=other)])
    assert (found.unknown, found.spans) == (1, {})


@pytest.mark.parametrize(
    ("sections", "text"),
    [
        ({"algorithm": {"ce": {"weight": 0.1, "tokens": []}}}, "expected one or more different sources"),
        ({"algorithm": {"ce": {"weight": 0.1, "tokens": ["tool", "tool"]}}}, "expected one or more different sources"),
        ({"algorithm": {"ce": {"weight": 0.1, "tokens": "system"}}}, "expected 'tool', 'user' or 'response'"),
        ({"algorithm": {"ce": {"weight": 0.1, "min_reward": 1.0}}}, "goes with tokens: response only"),
        ({"algorithm": {"ce": {"weight": 0.1, "agents": ["b"]}}, "agents": {"train": ["a"]}}, "'b' is not trained"),
        ({"algorithm": {"ce": {"weight": 0.0}}}, "greater than 0"),
        ({"algorithm": {"reward_weight": 0.0}}, "without algorithm.distill or algorithm.ce"),
        ({"algorithm": {"ce": {"weight": 0.1, "tokens": "response"}}, "trainer": {"name": "verl"}}, "one loss per token"),
    ],
)  # fmt: skip
def test_settings_must_fit(model: Path, tmp_path: Path, sections: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        load_config(settings(model, tmp_path, None, **sections))
