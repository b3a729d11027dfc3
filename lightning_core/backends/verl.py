"""Sampling from verl's model servers, through the client of verl's agent loops."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Protocol

from lightning_core.backends.backend import Delta, SamplingParams, check_request
from lightning_core.errors import ConstraintError, InfrastructureError, PolicyRequestError


class TokenOutput(Protocol):
    """The used part of ``verl.workers.rollout.replica.TokenOutput``."""

    token_ids: list[int]
    log_probs: list[float] | None
    stop_reason: str | None
    extra_fields: dict[str, Any]


class LLMClient(Protocol):
    """The used part of verl's ``LLMServerClient``.

    In asynchronous training it resumes interrupted responses.
    """

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: Mapping[str, Any]
    ) -> TokenOutput:
        """Sample one response."""
        ...


class VerlBackend:
    """A `Backend` on ``client`` with one model, the live policy ``model``.

    Versions are verl's ``global_steps``.

    Seeds are not used, because verl resumes an interrupted response with its first seed, which repeats the random numbers.
    """

    def __init__(self, client: LLMClient, *, model: str, max_context: int) -> None:
        self._client = client
        self._model = model
        self._max_context = max_context

    @property
    def models(self) -> Sequence[str]:
        return (self._model,)

    @property
    def max_context(self) -> int:
        return self._max_context

    def check(self, params: SamplingParams) -> None:
        """See `Backend.check`."""
        if params.constraint is not None:
            # The trainer must apply the sampler's mask to its logits, and verl's trainer has none.
            raise ConstraintError(
                "trainer.name: verl cannot constrain a response to a JSON schema; ask for it in the prompt, or use trainer.name: torch"
            )

    def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, *, model: str, stream: bool = False
    ) -> AsyncGenerator[Delta]:
        """Sample one response; see `Backend`. With ``stream`` each delta has one token, after the response is complete.

        A response that an update interrupted was sampled by several versions; verl reports the first and the last.
        """
        if model != self._model:
            raise PolicyRequestError(f"unknown model {model!r}: this backend has {[self._model]!r}", status=404)
        check_request(prompt_ids, params, max_context=self._max_context)
        self.check(params)
        return self._generate(prompt_ids, params, stream=stream)

    async def _generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, *, stream: bool
    ) -> AsyncGenerator[Delta]:
        settings: dict[str, Any] = {
            "max_tokens": params.max_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": -1,
            "repetition_penalty": 1.0,
            "logprobs": True,
            "stop_token_ids": sorted(params.stop_token_ids),
        }
        output = await self._client.generate(
            params.rollout or "", prompt_ids=[int(token) for token in prompt_ids], sampling_params=settings
        )
        if output.stop_reason in ("abort", "aborted") or output.log_probs is None or not output.token_ids:
            raise InfrastructureError(
                f"verl's model server aborted a response after {len(output.token_ids)} tokens ({output.stop_reason})"
            )
        if len(output.log_probs) != len(output.token_ids):
            raise InfrastructureError(
                f"verl's model server returned {len(output.log_probs)} logprobs for {len(output.token_ids)} tokens"
            )
        first, last = (output.extra_fields.get(key) for key in ("min_global_steps", "max_global_steps"))
        if first is None or last is None:
            raise InfrastructureError(
                "verl's model server does not report which version of the weights it sampled from"
            )
        size = 1 if stream else len(output.token_ids)  # a fork repeats a stream in pieces of a token
        for start in range(0, len(output.token_ids), size):
            response = slice(start, start + size)
            yield Delta(token_ids=output.token_ids[response], logprobs=output.log_probs[response], version=int(first))
        # verl reports "completed" for both.
        cut = len(output.token_ids) >= params.max_tokens and output.token_ids[-1] not in params.stop_token_ids
        yield Delta(token_ids=[], logprobs=[], version=int(last), finish_reason="length" if cut else "stop")
