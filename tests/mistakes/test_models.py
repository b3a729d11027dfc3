"""Models that do not exist, or are damaged or of another kind: exit code 2, and what is missing."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers  # noqa: F401 - imported here, so that its log handler keeps no captured stream

from tests.mistakes.try_command import Try
from tests.tiny_model import make_tiny_model

TRAIN = ["train", "lightning.yaml", "tasks.eval="]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def model(home: Path, whole: Path) -> Path:
    """A copy of a whole model, under the name in ``lightning.yaml``."""
    return Path(shutil.copytree(whole, home / "model"))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("./nosuch", ["no model folder at './nosuch'", "config.json", "the working directory is"]),
        ("/models/nosuch", ["no model folder at '/models/nosuch'"]),
        ("a/b/c", ["no model folder at 'a/b/c'"]),
        ("lightning.yaml", ["'lightning.yaml' is a file: expected a Hugging Face folder"]),
        ("empty", ["the folder 'empty' has no config.json: it contains nothing; expected a complete Hugging Face folder"]),
    ],
)  # fmt: skip
def test_a_model_that_is_no_folder_is_named(home: Path, attempt: Try, name: str, words: list[str]) -> None:
    (home / "empty").mkdir()
    attempt([*TRAIN, f"policy.model={name}"], 2, *words)


@pytest.mark.parametrize("command", [TRAIN, ["eval", "lightning.yaml"]], ids=" ".join)
def test_a_run_whose_model_cannot_be_loaded_leaves_no_folder(home: Path, attempt: Try, command: list[str]) -> None:
    earlier = home / "runs" / "earlier"
    earlier.mkdir(parents=True)
    (earlier / "config.yaml").write_text("policy: {model: m}\n")
    (home / "runs" / "latest").symlink_to("earlier")
    attempt([*command, "policy.model=./nosuch"], 2, "no model folder at './nosuch'")
    assert sorted(path.name for path in (home / "runs").iterdir()) == ["earlier", "latest"]
    assert (home / "runs" / "latest").resolve() == earlier


def test_a_name_that_the_hub_cannot_be_asked_about_gives_one_message(
    attempt: Try, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    attempt([*TRAIN, "policy.model=nobody/nothing"], 2, "the model 'nobody/nothing' cannot be loaded")


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("config.json", None, ["has no config.json"]),
        ("config.json", "{", ["the model", "cannot be loaded", "config.json"]),
        ("model.safetensors", None, ["cannot be loaded", "model.safetensors"]),
        ("model.safetensors", "damaged", ["its weights are damaged or incomplete"]),
        ("tokenizer.json", None, ["has no tokenizer"]),
        ("tokenizer.json", "{}", ["the tokenizer of", "cannot be loaded"]),
        ("chat_template.jinja", None, ["chat template"]),
        ("chat_template.jinja", "{% if %}", ["chat template"]),
    ],
)
def test_a_damaged_model_is_named(model: Path, attempt: Try, file: str, content: str | None, words: list[str]) -> None:
    (model / file).unlink()
    if content is not None:
        (model / file).write_text(content)
    attempt(TRAIN, 2, *words)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "bert"}, ["lacks", "choose a checkpoint of a causal language model"]),
        ({"model_type": "vit"}, ["'vit'", "not a causal language model"]),
        ({"model_type": "nosuch"}, ["cannot be loaded", "nosuch"]),
        ({"hidden_size": 128}, ["do not fit its config.json", "should be"]),
        ({"num_hidden_layers": 3}, ["lacks", "weights"]),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, ["quantised", "unquantised weights"]),
    ],
)
def test_a_model_of_another_kind_is_named(
    model: Path, attempt: Try, changes: dict[str, object], words: list[str]
) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | changes))
    attempt(TRAIN, 2, *words)


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("rollouts.max_tokens=5000", ["rollouts.max_tokens is 5000", "4096 tokens", "lower rollouts.max_tokens"]),
        ("policy.max_context=9999", ["max_context=9999", "up to 4096 tokens"]),
        ("policy.train_layers=99", ["policy.train_layers is 99", "has 2 layers"]),
        ("policy={model: ./model, device: cuda}", ["cuda"]),
    ],
)
def test_a_setting_that_the_model_does_not_have_is_named(
    model: Path, attempt: Try, setting: str, words: list[str]
) -> None:
    if "cuda" in setting and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    attempt([*TRAIN, setting], 2, *words)
