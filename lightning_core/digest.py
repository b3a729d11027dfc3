"""A 16-byte digest of a response: computed at sampling, compared before training.

In between, the data passes through a span, possibly a file or the network, the store, a
transition, a row and a packed batch. If a token is lost, a logprob shifted or the policy version
mixed up, the digests differ and the update is refused (``trainers/torch/proof.py``).
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
    """BLAKE2b of a response and its prompt, as 32 hexadecimal digits.

    Arguments: prompt ids [P] and output ids [T] (hashed as uint32), logprobs [T] and temperature
    (as float32), policy version, constraint. Each is hashed with its length, so no token can
    move from one to the next.
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
