"""The interface of sampling backends: tokens in, tokens with logprobs out.

Implementations sample from the trainer's weights in this process (``backends/torch``), from a vLLM server (``backends/vllm``), from verl's
servers (``backends/verl.py``) or from a script (``backends/scripted.py``). Backends process tokens only; ``chat`` converts text.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from lightning_core.errors import PolicyRequestError

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of one response.

    Logprobs belong to the distribution that is sampled from.
    """

    max_tokens: int
    temperature: float = 1.0
    """0 means greedy; the logprobs are then those at temperature 1."""
    top_p: float = 1.0
    seed: int | None = None
    """Makes the response reproducible, independent of the batch."""
    stop_token_ids: frozenset[int] = frozenset()
    """Sampling ends after one of these tokens, which is part of the response."""
    json_schema: str | None = None
    """A JSON schema, as JSON. The response is a document of the schema, or a prefix of one if ``max_tokens`` cuts it; each token is sampled
    from the policy's distribution over the tokens that keep it valid."""
    grammar: str | None = None
    """A grammar of the response (``chat/output_grammar.py``), which is followed in place of ``json_schema``, a part of it."""

    rollout: str | None = None
    """Id of the rollout. Backends with several servers use one server for a rollout, for its prefix cache."""

    @property
    def constraint(self) -> str | None:
        """The constraint on tokens, as JSON; None if all tokens are allowed."""
        if self.grammar is not None:
            spec: dict[str, Any] = {"grammar": self.grammar}
        elif self.json_schema is not None:
            spec = {"json_schema": json.loads(self.json_schema)}
        else:
            return None
        # Keeps the order of properties, as the response has it.
        return json.dumps({**spec, "stop_token_ids": sorted(self.stop_token_ids)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """Newly sampled tokens of one response. Only the last delta has a ``finish_reason``."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    version: int | None
    """The version of the policy that sampled the tokens; None for models that are not trained."""
    finish_reason: FinishReason | None = None


class Backend(Protocol):
    """Samples tokens. All methods may be called from any event loop and thread."""

    @property
    def models(self) -> Sequence[str]:
        """The models that ``generate`` accepts, live policies first. The first one is the default."""
        ...

    @property
    def max_context(self) -> int:
        """Most tokens of prompt and response together."""
        ...

    def check(self, params: SamplingParams) -> None:
        """Raise `PolicyRequestError` if ``params`` are not supported.

        Called before a response is started.
        """
        ...

    def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, *, model: str, stream: bool = False
    ) -> AsyncGenerator[Delta]:
        """Sample one response.

        With ``stream``, tokens are yielded as they are sampled; otherwise in one delta. Closing the generator aborts the response.
        Raises `PolicyRequestError` if prompt and response do not fit into ``max_context``.
        """
        ...


def check_request(prompt_ids: Sequence[int], params: SamplingParams, *, max_context: int) -> None:
    """Raise `PolicyRequestError` if no backend can sample a response to this request."""
    if not prompt_ids:
        raise PolicyRequestError("the prompt has no tokens; expected at least one")
    if params.max_tokens < 1:
        raise PolicyRequestError(f"max_tokens is {params.max_tokens}; expected at least 1", param="max_tokens")
    if not 0 <= params.temperature < float("inf") or not 0 < params.top_p <= 1:
        raise PolicyRequestError(
            f"temperature is {params.temperature!r} and top_p is {params.top_p!r}; expected at least 0, and above 0 up to 1"
        )
    if len(prompt_ids) + params.max_tokens > max_context:
        raise PolicyRequestError(
            f"{len(prompt_ids)} prompt tokens and max_tokens={params.max_tokens} do not fit into the context of "
            f"{max_context} tokens"
        )


def sampling_digest(
    *,
    prompt_ids: Sequence[int] | NDArray[np.integer[Any]],
    output_ids: Sequence[int] | NDArray[np.integer[Any]],
    logprobs: Sequence[float] | NDArray[np.floating[Any]],
    temperature: float,
    version: int,
    constraint: str | None,
) -> str:
    """A digest of a response and its prompt: BLAKE2b, as 32 hexadecimal digits.

    It is computed at sampling and compared before training. In between, the data passes through a span, possibly a file or the network,
    the store, a transition, a row and a packed batch. If a token is lost, a logprob shifted or the policy version mixed up, the digests
    differ and the update is refused (``trainers/torch/proof.py``).

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
