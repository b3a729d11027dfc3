"""What the policy endpoint needs of a model: tokens in, tokens with logprobs out.

Whoever implements `Backend` says where sampling happens: in process on the trainer's weights (``trainers/torch_backend.py``), on a
vLLM server (``policy/vllm_backend.py``), from a script (``policy/scripted.py``). A backend knows tokens only; text is
``policy/chat.py``'s business.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from lightning_core.errors import PolicyRequestError

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one response is sampled. Logprobs are always those of the distribution that was sampled from."""

    max_tokens: int
    temperature: float = 1.0
    """0 means greedy; the logprobs are then those at temperature 1."""
    top_p: float = 1.0
    seed: int | None = None
    """Makes this one response repeatable whatever else runs in the same batch."""
    stop_token_ids: frozenset[int] = frozenset()
    """Sampling ends after one of these; it is part of the response, since the model chose it."""
    json_schema: str | None = None
    """The response is a JSON document that this schema (as JSON) allows, sampled from the policy's distribution over the tokens that
    keep it one. Cut short by ``max_tokens`` it is the beginning of one."""

    rollout: str | None = None
    """Whom it is for: who has several servers lets one answer all of a rollout's requests, since it remembers what it was shown."""

    @property
    def constraint(self) -> str | None:
        """All that decides which tokens are allowed where, as JSON; None if every token is."""
        if self.json_schema is None:
            return None
        wanted = {"json_schema": json.loads(self.json_schema), "stop_token_ids": sorted(self.stop_token_ids)}
        return json.dumps(wanted)  # in the order given: properties are written in it


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """Newly sampled tokens of one response. The last delta, and only it, has a ``finish_reason``."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    version: int | None
    """The policy version whose weights sampled these tokens; None for weights that are not trained."""
    finish_reason: FinishReason | None = None


class Backend(Protocol):
    """A source of sampled tokens. All methods are safe to call from any event loop and any thread."""

    @property
    def models(self) -> Sequence[str]:
        """Names that ``generate`` accepts as ``model``; live policies first, and the first of them is the default."""
        ...

    @property
    def max_context(self) -> int:
        """Most tokens that prompt and response may have together."""
        ...

    def check(self, params: SamplingParams) -> None:
        """Raise `PolicyRequestError` if nothing can be sampled like this; called before an answer is begun."""
        ...

    def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, *, model: str, stream: bool = False
    ) -> AsyncGenerator[Delta]:
        """Sample one response.

        With ``stream`` tokens are handed over as they come; without, in one delta. Closing the generator early aborts the
        response. Raises `PolicyRequestError` when prompt and response cannot fit into ``max_context``.
        """
        ...


def check_request(prompt_ids: Sequence[int], params: SamplingParams, *, max_context: int) -> None:
    """Raise `PolicyRequestError` if no backend could sample a response to this."""
    if not prompt_ids:
        raise PolicyRequestError("the prompt has no tokens")
    if params.max_tokens < 1:
        raise PolicyRequestError(f"max_tokens is {params.max_tokens}, expected at least 1", param="max_tokens")
    if not 0 <= params.temperature < float("inf") or not 0 < params.top_p <= 1:
        raise PolicyRequestError(f"temperature {params.temperature!r} or top_p {params.top_p!r} is out of range")
    if len(prompt_ids) + params.max_tokens > max_context:
        raise PolicyRequestError(
            f"{len(prompt_ids)} prompt tokens and max_tokens={params.max_tokens} do not fit into the context of "
            f"{max_context} tokens"
        )
