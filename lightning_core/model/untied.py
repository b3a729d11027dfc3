"""An output layer of its own for a model that shares it with the embeddings.

vLLM on a CPU keeps a repacked copy of the output layer's weights. When new weights are loaded it renews the copy of every layer but of one
that is tied to the embeddings (seen in 0.27.1 and 0.32.0): the old output layer would go on sampling. So there it is served untied.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

_FILE = "output_layer.safetensors"


def is_tied(model: Any) -> bool:
    """Whether the Hugging Face model ``model`` computes logits with the matrix of its embeddings."""
    head = model.get_output_embeddings()
    return head is not None and head.weight is model.get_input_embeddings().weight


def untie_saved(folder: Path, model: Any) -> None:
    """Change what ``model.save_pretrained(folder)`` wrote of a tied model into the same model untied."""
    head = model.get_output_embeddings()
    (name,) = (name for name, module in model.named_modules() if module is head)
    tensor = f"{name}.weight"
    save_file({tensor: head.weight.detach().contiguous()}, folder / _FILE)
    _edit(folder / "config.json", lambda config: config.update(tie_word_embeddings=False))
    index = folder / "model.safetensors.index.json"
    if index.exists():  # only what it lists is read
        _edit(index, lambda listed: listed["weight_map"].update({tensor: _FILE}))


def _edit(file: Path, change: Any) -> None:
    value = json.loads(file.read_text(encoding="utf-8"))
    change(value)
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
