"""Exported folders name the weights that an adapter belongs to, and no folder of this machine."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from lightning_core.tools.cli.main import main
from lightning_core.tools.export.card import make_card
from lightning_core.tools.export.trained_model import find_trained
from tests import warm

DEMO = "smollm2-135m-instruct"
OFFLINE = """
import sys
from huggingface_hub import constants
constants.HF_HUB_CACHE, constants.HF_HUB_OFFLINE = sys.argv[1], True
from lightning_core.tools.cli.main import main
sys.exit(main(sys.argv[2:]))
"""
"""The command with another cache of the Hub, whose variables are read when its package is imported."""


@pytest.mark.parametrize(
    ("model", "named", "row"),
    [
        ("me/model", "me/model", "| Base model | me/model |"),
        ("gpt2", "gpt2", "| Base model | gpt2 |"),
        (DEMO, None, "It was trained on the dequantised weights, which differ from those on the Hub |"),
    ],
)
def test_the_card_names_a_model_on_the_hub_if_the_run_loaded_it_from_there(
    run: Callable[[str], Path], model: str, named: str | None, row: str
) -> None:
    trained = find_trained(run("lora"), overrides=[f"policy.model={model}"])
    _, header, body = make_card(trained, title="t", library="peft", usage="").split("---\n", 2)
    assert yaml.safe_load(header).get("base_model") == named
    assert yaml.safe_load(header).get("base_model_relation") == (named and "adapter")
    assert row in body


@pytest.mark.parametrize("form", ["hf", "peft"])
def test_no_file_contains_the_path_of_the_base_or_the_run(
    run: Callable[[str], Path], base: Path, tmp_path: Path, form: str
) -> None:
    out = tmp_path / "out"
    assert main(["export", str(run("lora")), str(out), "--format", form]) == 0
    for path in (base.parent, run("lora").parent, tmp_path):
        assert not [file.name for file in out.iterdir() if str(path).encode() in file.read_bytes()]
    card = (out / "README.md").read_text()
    assert f"| Base model | {base.name}, a local folder |" in card
    if form == "peft":
        assert json.loads((out / "adapter_config.json").read_text())["base_model_name_or_path"] is None
        assert f'AutoModelForCausalLM.from_pretrained("{base.name}")' in card
        assert "The adapter belongs to exactly the weights of the base model" in card


def test_an_adapter_of_a_model_on_the_hub_names_it(run: Callable[[str], Path], base: Path, tmp_path: Path) -> None:
    """The Hub's cache has the model, so no network is needed."""
    cached = tmp_path / "home" / "hub" / "models--me--base"
    shutil.copytree(base, cached / "snapshots" / "abc")
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("abc")
    command = ["export", str(run("lora")), str(tmp_path / "out"), "--format", "peft", "policy.model=me/base"]
    done = warm.run(["-c", OFFLINE, str(cached.parent), *command])
    assert done.returncode == 0, done.stderr
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "me/base"
    assert 'from_pretrained("me/base")' in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.parametrize("model", [None, DEMO])
def test_an_adapter_of_a_model_that_is_not_on_the_hub_is_not_pushed(
    run: Callable[[str], Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    model: str | None,
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_a_token")
    arguments = ["export", str(run("lora")), str(tmp_path / "out"), "--format", "peft", "--push", "me/model"]
    assert main([*arguments, *([f"policy.model={model}"] if model else [])]) == 2
    error = capsys.readouterr().err
    assert "is not on the Hub" in error
    assert "Use --format hf, which uploads the whole model" in error
    assert not (tmp_path / "out").exists()
