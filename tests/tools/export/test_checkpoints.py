"""Checkpoints are folders that other tools open, and hold what resuming needs and no more."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, MixtralConfig, Qwen3Config

from lightning_core import fit, load_config
from lightning_core.errors import ConfigError, TrainingError
from lightning_core.model.saved import FROZEN, write_model
from lightning_core.records.run_folder.checkpoints import checkpoints, drop_optimizer
from tests import bandit
from tests.tools.export.runs import TOLERANCE, difference, model_logprobs, sequences, trainer_logprobs

pytestmark = [
    pytest.mark.numeric,
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),  # peft's use of it
]

IDS = sequences(259)
OPTIMIZER = Path("trainer", "optimizer.safetensors")


@pytest.mark.parametrize(
    ("kind", "inside"),
    [
        ("full", ""),
        ("top", ""),
        ("lora", ""),
        pytest.param("several", "one", marks=pytest.mark.long),
        pytest.param("several", "two", marks=pytest.mark.long),
    ],
)
def test_a_checkpoint_is_opened_by_transformers_and_peft(
    run: Callable[[str], Path], base: Path, kind: str, inside: str
) -> None:
    for checkpoint in checkpoints(run(kind)):
        folder = checkpoint / inside
        expected = trainer_logprobs(run(kind), checkpoint.name, IDS, inside or "policy")
        if (folder / "adapter_config.json").exists():
            model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder)
            assert difference(model_logprobs(model, IDS), expected) < TOLERANCE
        model = AutoModelForCausalLM.from_pretrained(folder)  # an adapter's base is loaded first
        assert difference(model_logprobs(model, IDS), expected) < TOLERANCE
        assert AutoTokenizer.from_pretrained(folder).chat_template


@pytest.mark.long
def test_trained_weights_are_float32_beside_a_bfloat16_model(run: Callable[[str], Path]) -> None:
    (folder, _) = checkpoints(run("bfloat16"))
    with safe_open(folder / "model.safetensors", "pt") as file:
        names = list(file.keys())
        assert {file.get_slice(name).get_dtype() for name in names} == {"F32"}
    assert AutoModelForCausalLM.from_pretrained(folder).dtype == torch.bfloat16


def test_frozen_weights_are_written_once(run: Callable[[str], Path]) -> None:
    first, second = (folder / FROZEN for folder in checkpoints(run("top")))
    assert first.samefile(second)


def test_without_an_optimizers_state_no_run_resumes(run: Callable[[str], Path], tmp_path: Path) -> None:
    older, newest = checkpoints(run("full"))
    assert (older / OPTIMIZER).exists()
    assert (newest / OPTIMIZER).exists()

    folder = shutil.copytree(run("full"), tmp_path / "full")
    config = load_config(folder / "config.yaml", [f"run.dir={tmp_path}", "run.resume=true", "trainer.steps=3"])
    assert fit(bandit.solve, config=config).checkpoint.name == "step-000003"
    for path in checkpoints(folder):
        drop_optimizer(path)
    with pytest.raises(ConfigError, match=r"has no checkpoint that can be used.*has no optimizer state to resume from"):
        fit(bandit.solve, config=config)


def test_the_number_of_checkpoints_kept_is_that_of_the_configuration(
    run: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = shutil.copytree(run("lora"), tmp_path / "lora")
    settings = [f"run.dir={tmp_path}", "run.resume=true", "trainer.steps=5", "trainer.keep_checkpoints=3"]
    fit(bandit.solve, config=load_config(folder / "config.yaml", settings))
    assert [path.name for path in checkpoints(folder)] == ["step-000003", "step-000004", "step-000005"]
    assert [(path / OPTIMIZER).exists() for path in checkpoints(folder)] == [False, True, True]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 3}, "has format 3, but this version reads formats up to 2"),
        ({"format": None}, "has format None"),
        ({"weights": "nothing.safetensors"}, "is not a checkpoint, or is damaged"),
    ],
)
def test_a_checkpoint_that_cannot_be_read_is_refused(
    run: Callable[[str], Path], tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    folder = shutil.copytree(run("lora"), tmp_path / "run")
    file = folder / "checkpoints" / "step-000002" / "trainer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(TrainingError, match=message):
        trainer_logprobs(folder, "step-000002", IDS)


SHAPE = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}


@pytest.mark.parametrize("trained", ["all", "the top layer"])
@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**SHAPE),
        Qwen3Config(**SHAPE, head_dim=8, tie_word_embeddings=True),
        MixtralConfig(**SHAPE, num_local_experts=4),  # its experts are one tensor in memory, and several on the Hub
    ],
    ids=lambda config: config.model_type,
)
def test_weights_are_saved_exactly_for_any_family(config: Any, trained: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).float()
    weights = {name: p for name, p in model.named_parameters() if trained == "all" or ".1." in name}
    write_model(tmp_path, model, weights)
    found, problems = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(problems.values())
    expected = model.state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.state_dict().items())
