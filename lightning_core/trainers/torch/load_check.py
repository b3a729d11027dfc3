"""The check of a loaded model: it samples from the distribution that it is trained on.

A few tokens are sampled as in a run (prefill, decoding, rows that finish and rows that continue them), and their logprobs
are compared with logprobs of the trained pass, on rows of different lengths in one micro-batch.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

import numpy as np
import torch

from lightning_core.backends.backend import SamplingParams
from lightning_core.backends.torch.lanes import make_lane
from lightning_core.backends.torch.rows import ActiveRow
from lightning_core.errors import TrainingError
from lightning_core.model.compute import plain_path, small_windows
from lightning_core.model.load import LoadedModel
from lightning_core.model.precision import exact_products, float32_layers
from lightning_core.model.tree_check import has_experts
from lightning_core.trainers.torch.forward import Forward
from lightning_core.trainers.torch.packing import pack
from lightning_core.transitions import Row

_ROUNDED = 0.25
"""The largest mean difference in nats that bfloat16 can explain: the demo model's logprobs differ by 0.07."""
_EXACT = 5e-3
"""As above, with layers in float32: only hidden states and logits are rounded to bfloat16. Measured is at most 2e-4."""
_ERRORS = (RuntimeError, TypeError, ValueError, IndexError, AttributeError)


def checked(loaded: LoadedModel, *, deterministic: bool = False) -> LoadedModel:
    """``loaded`` on the fastest path whose samples have the logprobs of the trained forward pass.

    ``deterministic``: and whose rows can be sampled so that their bits depend on no other row. Raises `TrainingError` if there is none.
    """
    path = loaded.path
    if deterministic and path.geometry is not None and has_experts(loaded.model):
        # A product of an expert has as many rows as tokens of the pass choose it.
        path = plain_path(loaded.model, "it has experts, with trainer.deterministic", attention=path.replaced)
    while True:
        found = replace(loaded, path=path)
        problem = _problem(found)
        if problem is None:
            return found
        if path.geometry is not None:
            path = plain_path(loaded.model, problem, attention=path.replaced)
        elif path.cache is not None:
            path = replace(path, cache=None, reason=f"{path.reason}; {problem}")
        else:
            raise TrainingError(f"{type(loaded.model).__name__} cannot be sampled exactly: {path.reason}; {problem}")


def _problem(loaded: LoadedModel) -> str | None:
    """The reason this path cannot be used, or None."""
    dtype = loaded.model.dtype
    with small_windows(loaded.model), exact_products(), loaded.adapters.use(None):
        try:
            forward = Forward(loaded.model, loaded.path, loaded.constraints)
            difference, limit = _difference(loaded, forward, dtype), 1e-3 if dtype == torch.float32 else _ROUNDED
        except _ERRORS as error:
            return f"sampling fails: {error}"
        if dtype != torch.float32 and difference < limit:  # rounding may hide more
            with suppress(*_ERRORS), float32_layers(loaded.model) as exact:
                if exact:
                    difference, limit = _difference(loaded, forward, torch.float32), _EXACT
    if difference < limit:
        return None
    return f"its samples have other logprobs than the forward pass (difference {difference:.2g} nats)"


def _sample(loaded: LoadedModel, dtype: torch.dtype) -> Sequence[ActiveRow]:
    lane = make_lane(loaded.model, loaded.path, loaded.adapters, dtype=dtype)
    lane.remember(1000)
    vocabulary: int = loaded.model.config.get_text_config().vocab_size
    tokens = [number * 7 % vocabulary for number in range(24)]

    def row(prompt: Sequence[int], number: int) -> ActiveRow:
        params = SamplingParams(max_tokens=9)
        return ActiveRow(prompt=np.asarray(prompt, dtype=np.int64), params=params, random=random.Random(number))

    def run(rows: Sequence[ActiveRow], steps: int) -> None:
        lane.waiting.extend(rows)
        for _ in range(steps):
            lane.admit(rows=8, tokens=1000)
            lane.step()

    first = [row(tokens[:12], 0), row(tokens[:12], 1), row([*tokens[:8], *tokens[20:24]], 2), row(tokens[:1], 3)]
    run(first, 4)
    lane.drop(lambda done: done is first[1], remember=True)
    run([row(first[1].context().tolist(), 4)], 5)
    return [*first, *(new for new in lane.rows if new not in first)]


@torch.inference_mode()
def _difference(loaded: LoadedModel, forward: Forward, dtype: torch.dtype) -> float:
    """The largest mean difference of a row's logprobs from ``forward``, the trained pass, in nats.

    ``dtype``: that the layers compute in.
    """
    rows = _sample(loaded, dtype)
    trained = [_row(row) for row in rows]
    (batch,) = pack(loaded.path, trained, range(len(trained)), budget=10_000)
    differences_E = np.abs(
        forward.logprobs(batch, trained)[0].cpu().numpy() - batch.gather([row.logprobs for row in trained])
    )
    ends = np.cumsum([len(columns) for columns in batch.columns])
    return max(float(part.mean()) for part in np.split(differences_E, ends[:-1]))


def _row(row: ActiveRow) -> Row:
    context = row.context()
    places = np.arange(len(context))
    logprobs = np.zeros(len(context), dtype=np.float32)
    logprobs[len(row.prompt) :] = row.logprobs
    return Row(
        rollout="check", agent="check", policy="check", token_ids=context.astype(np.uint32), mask=places >= len(row.prompt),
        logprobs=logprobs, temperatures=np.ones(len(context), dtype=np.float32), advantages=None, segments=(),
    )  # fmt: skip
