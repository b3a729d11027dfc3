"""What a response was sampled from and as, in sixteen bytes: taken where it is sampled, compared where it is trained on.

Between the two lie a span, perhaps a file or a network, a store, a transition, a row and a packed batch. If any of them loses a token,
shifts a logprob or mistakes the weights' version, the digests differ and the update does not happen (``trainers/proof.py``).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray


def sampling_digest(
    *,
    prompt_ids: Sequence[int] | NDArray[np.integer[Any]],
    output_ids: Sequence[int] | NDArray[np.integer[Any]],
    logprobs: Sequence[float] | NDArray[np.floating[Any]],
    temperature: float,
    version: int,
    constraint: str | None,
) -> str:
    """32 hexadecimal digits of BLAKE2b over the tokens seen [P] and sampled [T] as uint32, the logprobs [T] and the temperature as
    float32, the policy version and the constraint; each with its length, so that no token can move from one to the next.
    """
    digest = hashlib.blake2b(digest_size=16)
    for values, dtype in (
        (prompt_ids, "<u4"),
        (output_ids, "<u4"),
        (logprobs, "<f4"),
        ([temperature], "<f4"),
        ([version], "<i8"),
        (list((constraint or "").encode()), "u1"),
    ):
        data = np.asarray(values, dtype=dtype).tobytes()
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()
