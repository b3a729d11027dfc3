"""Writes a trained policy in a format that other tools read."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

import torch

from lightning_core.errors import ConfigError
from lightning_core.model import peft
from lightning_core.model.folders import whole
from lightning_core.model.merge import layers_of
from lightning_core.model.source import (
    find_file,
    hub_name,
    is_demo_model,
    load_skeleton,
    load_tokenizer,
    resolve_model,
    save_model,
)
from lightning_core.records.failures import need_path
from lightning_core.tools.export.card import make_card
from lightning_core.tools.export.gguf import OUTTYPES, SENTENCEPIECE, write_gguf
from lightning_core.tools.export.merged import convert, load_merged
from lightning_core.tools.export.trained_model import Trained
from lightning_core.trainers.torch.checkpoint import read_facts, read_weights

ExportFormat = Literal["hf", "peft", "gguf"]
ExportDtype = Literal["float32", "float16", "bfloat16", "q8_0"]
_TORCH_TYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def export(trained: Trained, out: Path, *, format: ExportFormat, dtype: ExportDtype | None = None) -> None:
    """Write ``trained`` to the folder ``out``, which appears when it is complete.

    ``dtype``: of the weights; None: bfloat16, and float32 for an adapter. Raises `ConfigError` if ``out`` exists and is not
    empty, or if the policy cannot be written in this format, and `OSError` if the disk is full.
    """
    out = out.absolute()
    check_out(out, run=trained.run)
    dtype = dtype or ("float32" if format == "peft" else "bfloat16")
    if dtype not in _TORCH_TYPES and format != "gguf":
        raise ConfigError(f"--dtype {dtype} needs --format gguf; --format {format} has {list(_TORCH_TYPES)!r}")
    write = _WRITERS[format]
    with (
        need_path(f"export to {str(out)!r}", "Check the folder and its permissions, or choose another one"),
        whole(out) as folder,
    ):
        write(trained, folder, out.name, dtype)
        check_out(out, run=trained.run)  # another program may have written to it


def check_out(out: Path, *, run: Path) -> None:
    """Raise `ConfigError` unless ``out`` is an empty folder or does not exist, and is outside the folder ``run``."""
    with need_path(f"export to {str(out)!r}", "Choose another folder"):
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise ConfigError(f"{str(out)!r} exists and is not an empty folder: choose another one, or remove it")
        if out.resolve().is_relative_to(run.resolve()):
            raise ConfigError(
                f"{str(out)!r} is inside the run's folder {str(run)!r}: choose a folder outside the run's"
            )


def _write_hf(trained: Trained, folder: Path, name: str, dtype: str) -> None:
    model, tokenizer = load_merged(trained)
    convert(model, _TORCH_TYPES[dtype])
    save_model(model, folder)
    tokenizer.save_pretrained(folder)
    usage = _python(
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        f'model = AutoModelForCausalLM.from_pretrained("{name}")',
        f'tokenizer = AutoTokenizer.from_pretrained("{name}")',
    )
    _describe(trained, folder, name, library="transformers", usage=usage)


def _write_peft(trained: Trained, folder: Path, name: str, dtype: str) -> None:
    if trained.by_verl or trained.policy.lora is None:
        why = "was trained with verl" if trained.by_verl else "trained the weights themselves (policy.tuning: full)"
        raise ConfigError(f"the run {str(trained.run)!r} {why} and has no adapter: use --format hf")
    source = resolve_model(trained.policy.model)
    model = load_skeleton(source)
    weights = {key: tensor.to(_TORCH_TYPES[dtype]) for key, tensor in read_weights(trained.folder).items()}
    if reason := peft.unloadable(model, layers_of(weights)):
        raise ConfigError(f"{reason}: use --format hf, or train without them (policy.lora.target_modules)")
    alpha = read_facts(trained.folder)["fingerprint"]["lora_alpha"]
    peft.write_adapter(folder, weights, alpha=alpha, model=model, base=hub_name(source))
    load_tokenizer(source).save_pretrained(folder)
    demo = is_demo_model(trained.policy.model)
    where = "fetch_demo_model()" if demo else f'"{hub_name(source) or Path(source).resolve().name}"'
    usage = _python(
        *(("from lightning_core.model.source import fetch_demo_model",) if demo else ()),
        "from peft import PeftModel",
        "from transformers import AutoModelForCausalLM",
        f"base = AutoModelForCausalLM.from_pretrained({where})",
        f'model = PeftModel.from_pretrained(base, "{name}")',
    )
    usage += "\n\nThe adapter belongs to exactly the weights of the base model above. With others, results differ."
    _describe(trained, folder, name, library="peft", usage=usage)


def _write_gguf(trained: Trained, folder: Path, name: str, dtype: str) -> None:
    model, tokenizer = load_merged(trained)
    file = folder / f"{name}-{OUTTYPES[dtype]}.gguf"
    with tempfile.TemporaryDirectory(dir=folder, prefix="hf-") as merged:
        # From float32, so every type is rounded once.
        save_model(model, merged)
        tokenizer.save_pretrained(merged)
        if (sentencepiece := find_file(trained.policy.model, SENTENCEPIECE)) is not None:
            shutil.copyfile(sentencepiece, Path(merged) / SENTENCEPIECE)  # transformers does not write it
        del model
        write_gguf(Path(merged), file, dtype=dtype, name=name)
    _describe(trained, folder, name, library="gguf", usage=f"```bash\nllama-cli -m {file.name}\n```")


_WRITERS: Mapping[ExportFormat, Callable[[Trained, Path, str, str], None]] = {
    "hf": _write_hf,
    "peft": _write_peft,
    "gguf": _write_gguf,
}


def _describe(trained: Trained, folder: Path, name: str, *, library: str, usage: str) -> None:
    """Add the model card, and the licence of a base model that is a folder."""
    base = resolve_model(trained.policy.model)
    if isinstance(base, Path):
        for file in sorted((*base.glob("LICENSE*"), *base.glob("NOTICE*"))):
            shutil.copy(file, folder / file.name)
    card = make_card(trained, title=name, library=library, usage=usage)
    (folder / "README.md").write_text(card, encoding="utf-8")


def _python(*lines: str) -> str:
    return "\n".join(("```python", *lines, "```"))
