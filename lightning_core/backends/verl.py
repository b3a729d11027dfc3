"""Sampling from verl's model servers, through the client of verl's agent loops."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from importlib import import_module
from typing import Any, Protocol

from lightning_core.backends.backend import Delta, SamplingParams, check_request
from lightning_core.backends.vllm.constraint import structured_outputs
from lightning_core.errors import ConstraintError, InfrastructureError, PolicyRequestError
from lightning_core.model.constraint import Constraints


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

    def __init__(
        self,
        client: LLMClient,
        *,
        model: str,
        max_context: int,
        constraints: Constraints | str,
        whole: LLMClient | None = None,
    ) -> None:
        """``constraints``: those of the trainer, or the reason why it has none. ``whole``: samples constrained responses; it begins an
        interrupted one again, since a server follows a constraint from the first token of a request on. Default: ``client``.
        """
        self._client = client
        self._model = model
        self._max_context = max_context
        self._constraints = constraints
        self._whole = whole or client

    @property
    def models(self) -> Sequence[str]:
        return (self._model,)

    @property
    def max_context(self) -> int:
        return self._max_context

    def check(self, params: SamplingParams) -> None:
        """See `Backend.check`."""
        if params.constraint is not None:
            if isinstance(self._constraints, str):
                raise ConstraintError(
                    f"trainer.name: verl cannot constrain a response here: {self._constraints}. "
                    "Or describe the form of the response in the prompt"
                )
            self._constraints.start(params.constraint)

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
        client = self._client
        if (constraint := structured_outputs(params)) is not None:
            client, settings["structured_outputs"] = self._whole, _StructuredOutputs(constraint)
        output = await client.generate(
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


class _StructuredOutputs:
    """vLLM's ``StructuredOutputsParams`` in the process that unpickles it, the server's. vLLM is not imported here."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self._fields = fields

    def __reduce__(self) -> tuple[Any, ...]:
        return _structured_outputs, (self._fields,)


def _structured_outputs(fields: Mapping[str, Any]) -> Any:
    return import_module("vllm.sampling_params").StructuredOutputsParams(**fields)
