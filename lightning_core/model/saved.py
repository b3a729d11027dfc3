"""A model on disk as a Hugging Face folder, with its trained weights in their own file.

The trained weights are float32, even for a bfloat16 model, whose type ``config.json`` has. The others are written once
and linked afterwards.

model.safetensors                   all weights are trained
model-00001-of-00002.safetensors    some are: the trained ones
model-00002-of-00002.safetensors    the others
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

FROZEN = "model-00002-of-00002.safetensors"
_ALL, _TRAINED, _INDEX = "model.safetensors", "model-00001-of-00002.safetensors", "model.safetensors.index.json"


def write_model(folder: Path, model: Any, trained: Mapping[str, Tensor], *, earlier: Path | None = None) -> str:
    """Write ``model`` with the weights ``trained``, by its own names; returns the name of the file with these weights.

    ``earlier``: a folder written before, with the same frozen weights. Without the tokenizer.
    """
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    config.dtype = model.dtype
    config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    frozen = _frozen(model, trained)
    if not frozen:
        _save(folder / _ALL, trained)
        return _ALL
    _save(folder / _TRAINED, trained)
    if earlier is None or not _linked(earlier / FROZEN, folder / FROZEN):
        _save(folder / FROZEN, {name: _halved(tensor) for name, tensor in frozen.items()})
    files = {**dict.fromkeys(trained, _TRAINED), **dict.fromkeys(frozen, FROZEN)}
    size = sum(tensor.nbytes for tensor in (*trained.values(), *frozen.values()))
    index = {"metadata": {"total_size": size}, "weight_map": files}
    (folder / _INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return _TRAINED


def _frozen(model: Any, trained: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights and buffers that are not trained; of tied weights the first."""
    first = dict(model.named_parameters())
    tied = {name for name, _ in model.named_parameters(remove_duplicate=False)} - first.keys()
    return {name: tensor for name, tensor in model.state_dict().items() if name not in trained and name not in tied}


def _halved(tensor: Tensor) -> Tensor:
    """``tensor`` in bfloat16 if that is the same, as for weights that were loaded from bfloat16."""
    if tensor.dtype != torch.float32:
        return tensor
    small = tensor.bfloat16()
    return small if torch.equal(small.float(), tensor) else tensor


def _save(path: Path, tensors: Mapping[str, Tensor]) -> None:
    # transformers reads only files with this entry.
    save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, path, metadata={"format": "pt"})


def _linked(source: Path, target: Path) -> bool:
    """Make ``target`` a hard link to ``source``; False if there is no such file, or the file system has no links."""
    try:
        os.link(source, target)
    except OSError:
        return False
    return True
