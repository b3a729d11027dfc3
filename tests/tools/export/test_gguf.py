"""Exported GGUF files in llama.cpp: its server, from the wheel of xllamacpp."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
import torch
import xllamacpp
from sentencepiece import SentencePieceTrainer
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from lightning_core.errors import ConfigError, InfrastructureError
from lightning_core.model.source import fetch_demo_model
from lightning_core.tools.cli.main import main
from lightning_core.tools.export import gguf
from tests import warm
from tests.model.families import FAMILIES, make_family
from tests.tiny_model import make_tiny_model
from tests.tools.export.runs import FEW, TOLERANCE, difference, sequences, train, trainer_logprobs

# The first export downloads the converter.
pytestmark = pytest.mark.timeout(1200)

IDS = sequences(40_000, count=1)
PLACES = [1, 3, 20, 59]
"""The tokens of a sequence whose logprobs are compared, of which a rounded model is asked for the last two."""
CONVERT = """
import runpy, sys
from pathlib import Path
del sys.argv[0]
sys.path[0] = str(Path(sys.argv[0]).parent)
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""Runs the converter in a process that has imported torch."""
NEWEST = "step-000002"
WHOLE_CHARACTER = 81
"""A token whose text is a letter."""


def make_model(folder: Path, **shape: Any) -> Path:
    """A random model with the demo model's tokenizer: llama.cpp has no tokenizer of single bytes."""
    tokenizer = AutoTokenizer.from_pretrained(fetch_demo_model())
    config = AutoConfig.from_pretrained(make_tiny_model(folder / "tiny"))
    config.bos_token_id, config.eos_token_id, config.pad_token_id = 1, tokenizer.eos_token_id, tokenizer.pad_token_id
    for name, value in {"vocab_size": len(tokenizer), **shape}.items():
        setattr(config, name, value)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).float().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A run with LoRA of a model with tied embeddings, and one with full tuning of another with biases."""
    folder, found = tmp_path_factory.mktemp("runs"), dict[str, Path]()
    shapes = {"lora": {}, "full": {"tie_word_embeddings": False, "attention_bias": True}}

    def get(tuning: str) -> Path:
        if tuning not in found:
            model = make_model(folder / f"model-{tuning}", **shapes[tuning])
            found[tuning] = train(folder, model, name=tuning, policy={"tuning": tuning}, **FEW)
        return found[tuning]

    return get


@pytest.fixture(scope="module")
def server(run: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Any]:
    """llama.cpp's server with the run of a tuning, exported with a dtype."""

    @functools.cache
    def get(tuning: str, dtype: str) -> Any:
        return start(run(tuning), tmp_path_factory.mktemp("exported") / "out", dtype)

    return get


def start(run: Path, out: Path, dtype: str) -> Any:
    assert main(["export", str(run), str(out), "--format", "gguf", "--dtype", dtype]) == 0
    (file,) = out.glob("*.gguf")
    assert str(out.parent).encode() not in file.read_bytes(), "a folder of this machine"
    assert str(run.parent).encode() not in file.read_bytes()
    settings: Any = xllamacpp.CommonParams()
    settings.model.path = str(file)
    settings.n_ctx, settings.n_parallel, settings.cpuparams.n_threads = 64, 1, 1
    # Keys and values are float16 by default.
    settings.cache_type_k = settings.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    settings.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    return xllamacpp.Server(settings)


def logprob(server: Any, context: list[int], token: int) -> float:
    """The logprob of ``token`` after ``context``."""
    request = {"prompt": context, "n_predict": 1, "n_probs": 49152, "temperature": 1.0, "cache_prompt": False}
    # The logprobs listed are of the model, without the bias. The server lists none if the sampled token is part of a character.
    request["logit_bias"] = [[WHOLE_CHARACTER, 1000]]
    listed = server.handle_completions(request)["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
    return next(entry["logprob"] for entry in listed if entry["id"] == token)


@pytest.fixture
def warm_converter(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: list[str], **_: Any) -> Any:
        return warm.run(["-c", CONVERT, *command[1:]])

    monkeypatch.setattr(gguf, "subprocess", SimpleNamespace(run=run))


@pytest.mark.parametrize(
    ("tuning", "dtype", "tolerance"),
    [
        pytest.param("full", "float32", TOLERANCE, marks=pytest.mark.long),
        pytest.param("lora", "float16", 0.02, marks=pytest.mark.long),
        pytest.param("lora", "bfloat16", 0.2, marks=pytest.mark.long),
        ("lora", "q8_0", 0.5),
    ],
)
def test_llama_cpp_gives_the_logprobs_of_the_trainer(
    run: Callable[[str], Path],
    server: Callable[[str, str], Any],
    request: pytest.FixtureRequest,
    tuning: str,
    dtype: str,
    tolerance: float,
) -> None:
    places = PLACES
    if dtype != "float32":  # which runs the converter as users do
        request.getfixturevalue("warm_converter")
        places = PLACES[2:]
    expected = [logprobs[[place - 1 for place in places]] for logprobs in trainer_logprobs(run(tuning), NEWEST, IDS)]
    exported = server(tuning, dtype)
    found = [np.array([logprob(exported, tokens[:place], tokens[place]) for place in places]) for tokens in IDS]
    assert difference(found, expected) < tolerance


@pytest.mark.usefixtures("warm_converter")
def test_llama_cpp_reads_text_as_the_tokenizer_does_and_has_the_template(server: Callable[[str, str], Any]) -> None:
    url = server("lora", "q8_0").listening_address
    tokenizer = AutoTokenizer.from_pretrained(fetch_demo_model())
    text = "<|im_start|>user\nHow many are 12 + 345?\n  it's naïve 🚀<|im_end|>\n"
    found = httpx.post(f"{url}/tokenize", json={"content": text, "add_special": False, "parse_special": True}).json()
    assert found["tokens"] == tokenizer(text)["input_ids"]
    assert httpx.get(f"{url}/props").json()["chat_template"].strip() == tokenizer.chat_template.strip()


@pytest.mark.usefixtures("warm_converter")
def test_a_model_that_the_converter_does_not_know_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The tiny model's tokenizer, of single bytes."""
    run = train(tmp_path, make_tiny_model(tmp_path / "model"), **FEW)
    assert main(["export", str(run), str(tmp_path / "out"), "--format", "gguf"]) == 2
    error = capsys.readouterr().err
    assert "does not know this model's tokenizer" in error
    assert "A tokenizer of your own cannot be converted: use --format hf" in error
    assert not (tmp_path / "out").exists()


def make_sentencepiece(file: Path) -> None:
    text = file.with_name("text.txt")
    text.write_text("some words to make pieces of words from\n" * 9)
    SentencePieceTrainer.Train(f"--input={text} --model_prefix={file.with_suffix('')} --vocab_size=20 --minloglevel=2")
    text.unlink()


@pytest.mark.usefixtures("warm_converter")
def test_a_tokenizer_that_the_converter_reads_from_a_sentencepiece_file(tmp_path: Path) -> None:
    """Phi-3's."""
    model = make_family(FAMILIES["phi3"], tmp_path / "model")
    with pytest.raises(ConfigError, match=r"from tokenizer\.model, which the model does not have\. Add the") as error:
        gguf.write_gguf(model, tmp_path / "file", dtype="float32", name="mine")
    assert "Traceback" not in str(error.value)
    make_sentencepiece(model / "tokenizer.model")
    gguf.write_gguf(model, tmp_path / "file", dtype="float32", name="mine")


@pytest.mark.long
@pytest.mark.usefixtures("warm_converter")
def test_an_export_has_the_sentencepiece_file_of_the_model(tmp_path: Path) -> None:
    """transformers does not write it with the tokenizer."""
    model = make_family(FAMILIES["phi3"], tmp_path / "model")
    make_sentencepiece(model / "tokenizer.model")
    run = train(tmp_path, model, **FEW)
    assert main(["export", str(run), str(tmp_path / "out"), "--format", "gguf"]) == 0


@pytest.mark.usefixtures("warm_converter")
def test_the_output_of_a_converter_that_fails_is_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "convert_hf_to_gguf.py").write_text("raise ZeroDivisionError('of its own')")
    monkeypatch.setenv("LLAMA_CPP", str(tmp_path))
    with pytest.raises(InfrastructureError) as error:
        gguf.write_gguf(tmp_path, tmp_path / "file", dtype="float32", name="mine")
    text = str(error.value)
    assert "failed: ZeroDivisionError: of its own. Its output is in " in text
    assert "Traceback" not in text
    (log,) = re.findall(r"output is in (\S+)\. Set LLAMA_CPP", text)
    assert "Traceback" in Path(log).read_text()
    Path(log).unlink()


def test_only_the_converter_is_downloaded_as_sources(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With ``:all:`` pip also builds the build tools of the archive, for 80 seconds of a processor in place of 12 if its cache is empty."""
    found: list[str] = []

    def download(*given: Any, **_: Any) -> Path:
        found.extend(map(str, given))
        raise InfrastructureError("no network")

    monkeypatch.setenv("LIGHTNING_CACHE", str(tmp_path))
    monkeypatch.delenv(gguf.ENV, raising=False)
    monkeypatch.setattr(gguf, "download", download)
    with pytest.raises(InfrastructureError, match="no network"):
        gguf.write_gguf(tmp_path / "model", tmp_path / "file.gguf", dtype="float16", name="m")
    assert "--no-binary=llama-cpp-python" in found
