"""Generates docs/models.md from the families that the tests train.

``python -m docs._generate.models > docs/models.md`` writes the page; ``python -m docs._generate.models --measure`` trains
every family and prints its figures.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from tests.model.families import FAMILIES, Family

_PAGE = """\
# Models

<!-- Generated: python -m docs._generate.models > docs/models.md -->

The embedded trainer trains causal language models of transformers, on one of two paths:

- **Tree**: a step's rows are one packed sequence in which every shared prefix is computed once, and
  sampling has its own prefix cache. For models whose layers are all plain attention, full or
  within a sliding window, with dense or expert layers in between.
- **Plain**: Hugging Face's own forward pass and cache. Each row is its own sequence. Rows of any
  lengths are sampled in one pass, and contexts are kept for later turns. Exact too, but slower,
  since training shares nothing between rows. For hybrid, recurrent and latent attention, and for all
  else that the tree does not fit.

The path is chosen when a model is loaded, by computing. Two rows with a common prefix are computed as
a tree and by the model's own forward pass, in float32 even for bfloat16 weights. The tree path
is used if all of these agree within 0.001:

| Compared | Finds |
|---|---|
| Arguments of attention: a scale and a window are allowed | masks and biases of the model's own, soft caps, sinks |
| Logits of short rows, with windows of 8 tokens | other scales and windows, layers that mix neighbors or rows |
| Gradients of all parameters | a parameter that has no effect yet, such as a bias that starts at zero |
| Hidden states of rows of 384 and 480 tokens, after the first layers | limits that no setting names |

Gradients of bfloat16 weights are themselves rounded to bfloat16, and agree within 0.024. Then a few
tokens are sampled and their logprobs compared with the trained pass's. `lightning-rl train` prints
which path was chosen and why:

```text
Qwen3_5ForCausalLM: plain path (it has layers of the types ['linear_attention'])
```

On the plain path, two uses of the model's cache are compared with passes over single rows without a
cache, in float32 and within 0.001. The log has the reason if one is not used:

| Compared | If it differs | Families below |
|---|---|---|
| Decoding rows of different lengths in one pass | a pass for each length, no context is kept | `bamba`, `deepseek_v4` |
| Continuing a cached context with several tokens | contexts are reused for equal prompts only | `jamba` |

An attention cache is cut to the prefix that a prompt shares with it. Recurrent states, convolutions and
contexts longer than a sliding window cannot be cut: they are reused by prompts that continue
them, and are also kept where the prompts of a step part, if they share 32 tokens or more.

A model that calls attention with another argument later, such as a mask for long rows only, ends the
step with the same message.

A model that fails the comparison on every path is refused. During training the metric
`logprob_difference_mean` compares sampler and trainer again in each step; above
`trainer.max_logprob_difference` the run stops with the weights unchanged.

## Families

Each family was built with random weights, sampled, trained for a step with `policy.tuning: full`,
exported with [`lightning-rl export`](export.md) and sampled again, in float32, and compared with
transformers {version}: logprobs of sampled tokens and of the exported model agree within 1e-4 nats,
gradients within 1e-5 of the largest. `make models` repeats this and prints the figures. See
[export](export.md) for the families whose adapters have limits.

| Family | Path | Reason |
|---|---|---|
{rows}

For other families the path is chosen in the same way. Models for images and text, such as SmolVLM
and Qwen3-VL, are trained on text alone; the policy endpoint refuses requests with images. Not
supported are models whose logits depend on later tokens, encoder-decoder models, models that need
their own Python code, and quantized weights. Weights in fp8, mxfp8 and mxfp4 are dequantized while
they are loaded, with a warning; checkpoints and exports are then not quantized.

A folder is refused if a file is damaged or missing, if a weight of the model is missing or has
another shape, or if prompts can have tokens without an embedding. Weights that the model does not
have are ignored, with a warning.

LoRA adapts linear layers (`torch.nn.Linear`). GPT-2 has none, and is trained with
`policy.tuning: full`.

Models with LongRoPE (Phi-3 and Phi-4 with long contexts) have a context of the original length, such
as 4,096 tokens: beyond it their frequencies depend on the longest sequence of a pass.

## Mixtures of experts

Both paths compute experts with transformers' own layers; with `trainer.deterministic` they are on the
[plain path](reproducibility.md#how-it-works). Fused experts are one tensor and no linear
layers, so LoRA does not reach them. When training starts, the weights that adapters do not change
are listed with their share:

```text
LoRA adapts 16 linear layers; not adapted, with their share of all weights: model.layers.*.mlp.experts.gate_up_proj (40%), …
```

With `policy.tuning: full` all weights are trained, routers included. The load balancing loss of
pre-training is not added.
"""


def page(families: Mapping[str, Family], version: str) -> str:
    """The page for ``families``, tested with a version of transformers."""
    rows: list[str] = []
    for name, family in sorted(families.items()):
        path, _, reason = family.path.partition(" path")
        note, _, reason = reason.partition("(")
        rows.append(f"| `{name}` | {path}{note.rstrip()} | {reason.partition('; ')[0].removesuffix(')')} |")
    return _PAGE.format(rows="\n".join(rows), version=version)


def _tested_version() -> str:
    pins = (Path(__file__).parents[2] / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return next(line.partition("==")[2] for line in pins if line.startswith("transformers=="))


def measure(families: Mapping[str, Family]) -> None:
    """Train each family and print how far it is from transformers alone."""
    from tests.model.examine import examine

    print(f"{'family':<18} {'sample':>8} {'gradient':>9} {'step':>8} {'export':>8}  path")
    for name, family in families.items():
        with tempfile.TemporaryDirectory() as folder:
            found = examine(family, Path(folder))
        figures = f"{found.sample:8.1e} {found.gradient:9.1e} {found.moved:8.1e} {found.export:8.1e}"
        print(f"{name:<18} {figures}  {found.path}", flush=True)


if __name__ == "__main__":
    if "--measure" in sys.argv:
        measure(FAMILIES)
    else:
        sys.stdout.write(page(FAMILIES, _tested_version()))
