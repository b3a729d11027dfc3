"""GGUF files, made by llama.cpp's own converter.

The converter is not on PyPI by itself. It is in the source distribution of llama-cpp-python (MIT), which contains the
release of llama.cpp (MIT) that it binds. That is downloaded once, and its converter is run from the cache.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from lightning_core.errors import ConfigError, InfrastructureError, LightningError
from lightning_core.model.download import download
from lightning_core.model.source import cache_folder, require

logger = logging.getLogger(__name__)

OUTTYPES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16", "q8_0": "q8_0"}
"""The converter's names of the types."""
ENV = "LLAMA_CPP"
"""Names a folder with llama.cpp's sources, to use that version's converter."""
SENTENCEPIECE = "tokenizer.model"
"""The tokenizer's file that the converter reads for some models, such as Phi-3."""
_SCRIPT = "convert_hf_to_gguf.py"
_PROJECT = "llama-cpp-python"
_SOURCES = f"{_PROJECT}==0.3.36"
_SHA256 = "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"
_PARTS = (_SCRIPT, "conversion", "gguf-py", "LICENSE")


def write_gguf(model: Path, file: Path, *, dtype: str, name: str) -> None:
    """Convert the Hugging Face folder ``model`` to ``file``.

    ``dtype``: a key of `OUTTYPES`. ``name``: the model's name in the file. Raises `ConfigError` if the converter does not
    support the model.
    """
    require("gguf", "export to GGUF")
    require("sentencepiece", "export to GGUF", extra="gguf")
    script = _converter() / _SCRIPT
    command = [sys.executable, str(script), str(model), "--outfile", str(file), "--outtype", OUTTYPES[dtype]]
    logger.info("converting with %s", script)
    done = subprocess.run([*command, "--model-name", name], capture_output=True, text=True, check=False)
    if done.returncode != 0 or not file.is_file():
        raise _failure(done.stderr, script, name)


def _failure(log: str, script: Path, name: str) -> LightningError:
    last = next((line.strip() for line in reversed(log.splitlines()) if line.strip()), "no output")
    if "pre-tokenizer was not recognized" in last:
        return ConfigError(
            f"llama.cpp's converter {str(script)!r} does not know this model's tokenizer. It knows the tokenizers of published "
            f"models only: set {ENV} to a newer llama.cpp if yours is a recent one of these. A tokenizer of your own cannot be "
            "converted: use --format hf"
        )
    if SENTENCEPIECE in last:
        return ConfigError(
            f"llama.cpp's converter {str(script)!r} reads the tokenizer of this type of model from {SENTENCEPIECE}, which the model "
            f"does not have. Add the {SENTENCEPIECE} of the original model to the folder in policy.model, or use --format hf"
        )
    if "is not supported" in last or "NotImplementedError" in last:
        return ConfigError(
            f"llama.cpp's converter {str(script)!r} cannot convert this model: {last}. Set {ENV} to a newer llama.cpp, or use "
            "--format hf"
        )
    with tempfile.NamedTemporaryFile(
        "w", prefix=f"lightning-{name}-", suffix=".gguf.log", delete=False, encoding="utf-8"
    ) as file:
        file.write(log)
    return InfrastructureError(
        f"llama.cpp's converter {str(script)!r} failed: {last}. Its output is in {file.name}. Set {ENV} to a newer llama.cpp, or use "
        "--format hf"
    )


def _converter() -> Path:
    """A folder with the converter: ``$LLAMA_CPP``, or the cached one."""
    if converter := os.environ.get(ENV):
        folder = Path(converter).expanduser()
        if not (folder / _SCRIPT).is_file():
            raise ConfigError(
                f"{ENV}={converter!r}: found no {_SCRIPT} there; expected a folder with llama.cpp's sources"
            )
        return folder
    target = cache_folder() / _SOURCES.replace("==", "-")
    if not target.is_dir():
        _fetch(target)
    return target


def _fetch(target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    # Built in a sibling folder and renamed, so other processes never see a partial file.
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as scratch:
        logger.warning("downloading llama.cpp's converter, once (77 MB)")
        advice = f"Without a network, set {ENV} to a folder with llama.cpp's sources, or use --format hf"
        # With ``:all:`` pip would also build the build tools from their sources.
        only_sources = f"--no-binary={_PROJECT}"
        archive = download(_SOURCES, Path(scratch) / "archive", only_sources, sha256=_SHA256, advice=advice)
        whole = Path(scratch) / "whole"
        with tarfile.open(archive) as sources:
            for member in sources:
                _, _, path = member.name.partition("/vendor/llama.cpp/")
                if path.split("/")[0] in _PARTS:
                    member.name = path
                    sources.extract(member, whole, filter="data")
        try:
            whole.rename(target)
        except OSError:
            if not target.is_dir():  # otherwise another process was faster
                raise
