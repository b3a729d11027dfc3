"""Saves a model with tied embeddings as one with a separate output layer.

vLLM on a CPU samples from a repacked copy of the output layer. Loading new weights renews the copies of all layers except
an output layer that is tied to the embeddings (observed in 0.27.1 and 0.32.0), which would keep its old weights. There the
model is served untied.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

_FILE = "output_layer.safetensors"


def is_tied(model: Any) -> bool:
    """Whether the output layer of the Hugging Face model ``model`` is its embedding matrix."""
    head = model.get_output_embeddings()
    return head is not None and head.weight is model.get_input_embeddings().weight


def untie_saved(folder: Path, model: Any) -> None:
    """Untie the tied model that ``model.save_pretrained(folder)`` wrote."""
    head = model.get_output_embeddings()
    (name,) = (name for name, module in model.named_modules() if module is head)
    tensor = f"{name}.weight"
    save_file({tensor: head.weight.detach().contiguous()}, folder / _FILE)
    _edit(folder / "config.json", lambda config: config.update(tie_word_embeddings=False))
    index = folder / "model.safetensors.index.json"
    if index.exists():  # files that the index does not list are ignored
        _edit(index, lambda listed: listed["weight_map"].update({tensor: _FILE}))


def _edit(file: Path, change: Any) -> None:
    value = json.loads(file.read_text(encoding="utf-8"))
    change(value)
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
