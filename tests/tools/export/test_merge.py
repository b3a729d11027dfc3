"""Adapters are merged into every place of a shared layer, and refused where layers share a weight but no adapter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, LlamaConfig

from lightning_core.errors import ConfigError
from lightning_core.model.adapters import Adapters
from lightning_core.model.merge import merge
from lightning_core.tools.cli.main import main
from lightning_core.trainers.torch.factory import open_trainer
from lightning_core.trainers.torch.vllm_trainer import VllmTrainer
from tests.model.families import FAMILIES, make_family
from tests.tools.export.runs import FEW, TOLERANCE, difference, model_logprobs, sequences, train, trainer_logprobs
from tests.trainers.sections import parts

pytestmark = [
    pytest.mark.numeric,
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),  # peft's use of it
]

IDS = sequences(97, count=1)
ATTENTION = {"tuning": "lora", "lora": {"target_modules": ["shared_transformer.self_attn.q_proj"]}, "max_context": 128}


def test_a_layer_in_two_places_is_merged_in_both() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
    )
    models: list[Any] = [AutoModelForCausalLM.from_config(config).eval() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    adapted, target = models
    adapted.model.layers[1].mlp = adapted.model.layers[0].mlp
    adapters = Adapters(adapted)
    matrices = adapters.add("a", rank=2, alpha=6, targets=["down_proj"], seed=0)
    torch.nn.init.normal_(matrices["model.layers.0.mlp.down_proj.lora_B"])
    merged = merge(adapted, matrices, alpha=6)
    assert sorted(merged) == [f"model.layers.{number}.mlp.down_proj.weight" for number in (0, 1)]
    target.load_state_dict(adapted.state_dict() | merged)
    found = model_logprobs(target, IDS)
    with adapters.use("a"):
        assert difference(found, model_logprobs(adapted, IDS)) < TOLERANCE
    with adapters.use(None):
        assert difference(found, model_logprobs(adapted, IDS)) > 100 * TOLERANCE


@pytest.mark.long
def test_layers_that_share_a_weight_keep_their_own_adapters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Zamba2 has the weights of one attention block in several layers."""
    base = make_family(FAMILIES["zamba2"], tmp_path / "model")
    run = train(tmp_path, base, policy=ATTENTION, **FEW)
    assert main(["export", str(run), str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert (
        "the weights of 2 layers, such as 'model.layers.1.shared_transformer.self_attn.q_proj', belong to other"
        in error
    )
    assert "Use --format peft" in error
    assert main(["export", str(run), str(tmp_path / "adapter"), "--format", "peft"]) == 0
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "adapter")
    expected = trainer_logprobs(run, "step-000002", IDS)
    assert difference(model_logprobs(model, IDS), expected) < TOLERANCE
    assert difference(model_logprobs(model.unload(), IDS), expected) > 10 * TOLERANCE


@pytest.mark.parametrize(
    ("family", "note"),
    [
        ("zamba2", "the adapter cannot be merged,"),
        ("glm4_moe", "checkpoints have no adapter_config.json,"),
        pytest.param("falcon_h1", "checkpoints have no adapter_config.json,", marks=pytest.mark.long),
        ("llama", None),
    ],
)
def test_the_notes_say_at_the_start_what_cannot_be_exported(family: str, note: str | None, tmp_path: Path) -> None:
    trainer = open_trainer(**parts(model=str(make_family(FAMILIES[family], tmp_path)), tuning="lora"))
    trainer.close()
    found = [text.partition(" since ")[0] for text in trainer.model.notes if " since " in text]
    assert found == ([] if note is None else [note])


def test_vllm_is_refused_before_it_starts_if_it_cannot_get_the_merged_weights(tmp_path: Path) -> None:
    base = make_family(FAMILIES["zamba2"], tmp_path)
    trainer = open_trainer(**parts(model=str(base), tuning="lora"))
    with pytest.raises(ConfigError, match="needs adapters merged into the weights, and the weights of"):
        VllmTrainer(trainer, url="http://127.0.0.1:9", args=())
    with pytest.raises(ConfigError, match="the adapter cannot be merged"):
        trainer.save_pretrained(tmp_path / "out")
