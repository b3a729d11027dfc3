"""Rows as an endpoint records them."""

from __future__ import annotations

import numpy as np

from lightning_core.backends.backend import sampling_digest
from lightning_core.transitions import Row, Transition, transitions_to_rows


def recorded_row(
    *, prompt: int = 4, output: int = 3, advantage: float = 0.5, version: int = 7, first: int | None = None
) -> Row:
    """One call's row with ``prompt`` tokens of prompt and ``output`` sampled tokens."""
    prompt_ids = np.arange(10, 10 + prompt, dtype=np.uint32)
    output_ids = np.arange(50, 50 + output, dtype=np.uint32)
    logprobs = np.linspace(-1.0, -0.1, output).astype(np.float32)
    digest = sampling_digest(
        prompt_ids=prompt_ids,
        output_ids=output_ids,
        logprobs=logprobs,
        temperature=1.0,
        version=version,
        constraint=None,
    )
    transition = Transition(
        call="c",
        rollout="r",
        task_id="t",
        agent="writer",
        policy="policy",
        version=version,
        first_version=first,
        sequence=0,
        prompt_ids=prompt_ids,
        output_ids=output_ids,
        logprobs=logprobs,
        temperature=1.0,
        constraint=None,
        digest=digest,
        finish_reason="stop",
    )
    (row,) = transitions_to_rows([transition], {"c": advantage})
    return row
