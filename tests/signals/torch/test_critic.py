"""The critic sees the policy's last hidden state at each prompt's end, and learns by least squares."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from lightning_core.config.credit import CriticSection
from lightning_core.errors import TrainingError
from lightning_core.model.source import load_model
from lightning_core.trainers.torch.critic import TorchCritic, ValueHead
from lightning_core.trainers.torch.factory import open_trainer
from lightning_core.transitions import Transition
from tests.trainers.sections import parts

pytestmark = pytest.mark.numeric


def transition(call: str, prompt: list[int], output: list[int], sequence: int, rollout: str = "r") -> Transition:
    return Transition(
        call=call,
        rollout=rollout,
        task_id="t",
        agent="a",
        policy="policy",
        version=0,
        sequence=sequence,
        prompt_ids=np.array(prompt, dtype="<u4"),
        output_ids=np.array(output, dtype="<u4"),
        logprobs=np.zeros(len(output), dtype="<f4"),
        temperature=1.0,
        constraint=None,
        digest="",
        finish_reason="stop",
    )


def test_its_features_are_the_hidden_states_at_the_ends_of_prompts(tiny_llama: Path):
    """Two turns of one conversation, a fork, and another rollout with the same prompt; in several micro-batches."""
    calls = [
        transition("one", [5, 6, 7], [8, 9], 0),
        transition("two", [5, 6, 7, 8, 9, 10], [11], 1),
        transition("fork", [5, 6, 70], [8], 2),
        transition("other", [5, 6, 7], [80, 90, 91], 0, rollout="s"),
    ]
    config = CriticSection(learning_rate=0.05, epochs=400)
    trainer = open_trainer(**parts(model=str(tiny_llama), dtype="float32", micro_batch_tokens=6))
    trained = TorchCritic(trainer, config)
    try:
        assert dict(trained.values(calls)) == {"one": 0, "two": 0, "fork": 0, "other": 0}
        targets = {"one": 1.0, "two": -1.0, "fork": 0.5, "other": 1.0}
        trained.fit_values(targets)
        found = trained.values(calls)
    finally:
        trainer.close()
    assert found["one"] == pytest.approx(found["other"], abs=1e-5), "the same prompt"
    model = load_model(tiny_llama, torch.float32)
    critic = ValueHead(model.config.hidden_size, config, torch.device("cpu"))
    with torch.no_grad():
        states = {
            c.call: model.base_model(torch.tensor([c.prompt_ids.tolist()])).last_hidden_state[0, -1] for c in calls
        }
    critic.expected(states)
    critic.learn(targets)
    assert critic.expected(states) == pytest.approx(dict(found), abs=1e-3)
    assert dict(found) == pytest.approx(targets, abs=0.2)


def test_the_critic_cannot_learn_from_calls_without_a_value():
    critic = ValueHead(4, CriticSection(), torch.device("cpu"))
    critic.expected({"a": torch.ones(4)})
    critic.learn({"a": 1.0})
    with pytest.raises(TrainingError, match=r"call 'a' has a target but was not scored"):
        critic.learn({"a": 1.0})


def test_a_checkpoint_has_the_critic(tiny_llama: Path, tmp_path: Path):
    """The trainer does not know what it saves with the weights."""
    options, calls = parts(model=str(tiny_llama), dtype="float32"), [transition("one", [5, 6], [7], 0)]
    trainer = open_trainer(**options)
    critic = TorchCritic(trainer, CriticSection(learning_rate=0.05))
    try:
        critic.values(calls)
        critic.fit_values({"one": 1.0})
        learned = dict(critic.values(calls))
        trainer.save(tmp_path / "checkpoint")
    finally:
        trainer.close()
    assert learned["one"] != 0
    assert (tmp_path / "checkpoint" / "trainer" / "critic.safetensors").is_file()
    resumed = open_trainer(**options)
    try:
        resumed.load(tmp_path / "checkpoint")  # without a critic its state is left out
        critic = TorchCritic(resumed, CriticSection())
        assert dict(critic.values(calls)) == {"one": 0}
        resumed.load(tmp_path / "checkpoint")
        assert dict(critic.values(calls)) == learned
    finally:
        resumed.close()
