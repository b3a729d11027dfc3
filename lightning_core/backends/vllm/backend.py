"""Sampling from a vLLM server, with new weights pushed after each update.

Weights change between two tokens. During a push, new requests are held back and the server ends running ones; when each has returned
its tokens, the weights are replaced. An interrupted response continues from its prompt and its tokens so far, so no keys and values
of older weights are used. Callers get no error, only deltas of the older version before the new one's.
"""

from __future__ import annotations

import random
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from pathlib import Path

from lightning_core.backends.backend import Delta, SamplingParams, check_request
from lightning_core.backends.gate import POLL_SECONDS, Gate
from lightning_core.backends.vllm.api import ServerInfo, VllmApi
from lightning_core.backends.vllm.constraint import SERVER_ARGUMENTS
from lightning_core.errors import ConstraintError, InfrastructureError, PolicyRequestError, describe
from lightning_core.model.constraint import Constraints

DRAIN_SECONDS = 60
"""Seconds that a push waits for running responses to return their tokens."""
_COLDEST = 0.01


class VllmBackend:
    """A `Backend` on a ``vllm serve`` of this run only, with one model, the live policy ``model``.

    ``url``: such as ``http://127.0.0.1:8000``. ``max_context``: at most the server's. ``constraints``: of the trainer, which computes the
    distribution again; None: no response can be constrained. Raises `ConfigError` if the server was not started with the required
    settings (see ``server.py``), `InfrastructureError` if it does not respond. ``served``: the server's model and settings, if they are
    known; it is not asked then.
    """

    def __init__(
        self,
        url: str,
        *,
        model: str,
        max_context: int | None = None,
        constraints: Constraints | None = None,
        version: int = 0,
        served: ServerInfo | None = None,
    ) -> None:
        self._model = model
        self._constraints = constraints
        self._api = VllmApi(url)
        if served is None:
            served = self._api.server_info()
            self._api.resume()  # another run may have left it paused
        self.served = served
        self._max_context = min(self.served.max_context, max_context or self.served.max_context)
        self.gate = Gate(version)
        """Holds sampling back while the weights change."""

    def opener(self) -> Callable[[], VllmBackend]:
        """See `SharedBackend.opener`."""
        return partial(
            VllmBackend,
            self._api.url,
            model=self._model,
            max_context=self._max_context,
            constraints=self._constraints,
            served=self.served,
        )

    @property
    def models(self) -> Sequence[str]:
        return (self._model,)

    @property
    def max_context(self) -> int:
        return self._max_context

    @property
    def version(self) -> int:
        """The version that was pushed last, which new deltas have."""
        return self.gate.state.version

    def check(self, params: SamplingParams) -> None:
        """See `Backend.check`."""
        if 0 < params.temperature < _COLDEST:
            raise PolicyRequestError(
                f"temperature is {params.temperature!r}; vLLM samples at 0 (greedy) or at {_COLDEST} and above",
                param="temperature",
            )
        if params.constraint is not None:
            if self._constraints is None or not self.served.constrains:
                (name, value), *_ = SERVER_ARGUMENTS.items()
                raise ConstraintError(
                    f"the vLLM server {self._api.url} cannot constrain a response as the trainer does: start it with {name} '{value}' and "
                    "without --reasoning-parser, let Lightning start it, or describe the form of the response in the prompt"
                )
            self._constraints.start(params.constraint)

    def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, *, model: str, stream: bool = False
    ) -> AsyncGenerator[Delta]:
        """Sample one response; see `Backend`.

        A response interrupted by a push has deltas of each version. A constrained one begins again with the new version, since the server
        follows its constraint from the first token of a request on; its deltas are yielded when it is complete.
        """
        if model != self._model:
            raise PolicyRequestError(f"unknown model {model!r}: this backend has {[self._model]!r}", status=404)
        check_request(prompt_ids, params, max_context=self._max_context)
        self.check(params)
        return self._generate(prompt_ids, params, stream)

    async def _generate(self, prompt_ids: Sequence[int], params: SamplingParams, stream: bool) -> AsyncGenerator[Delta]:
        sampled: list[int] = []
        held: list[Delta] = []
        while True:
            version = await self.gate.enter()
            aborted, delta = False, None
            try:
                parts = self._api.sample(
                    [*prompt_ids, *sampled], _rest(params, len(sampled)), model=self.served.model, stream=stream
                )
                async with aclosing(parts):
                    async for part in parts:
                        sampled += part.token_ids
                        aborted = part.finish_reason == "abort"
                        delta = Delta(
                            token_ids=part.token_ids,
                            logprobs=part.logprobs,
                            version=version,
                            finish_reason=None if part.finish_reason == "abort" else part.finish_reason,
                        )
                        if part.finish_reason is not None:
                            break
                        if params.constraint is None:
                            yield delta
                        else:
                            held.append(delta)
                if aborted and not self.gate.state.held:
                    raise InfrastructureError(
                        f"the vLLM server {self._api.url} aborted a response: it is shutting down, or another program paused it"
                    )
            finally:
                self.gate.leave()
            if params.constraint is not None and aborted:
                sampled, held = [], []
                continue
            for earlier in held:
                yield earlier
            if delta is not None and (delta.token_ids or not aborted):
                yield delta
            if not aborted:
                return

    def push(self, folder: Path, version: int) -> None:
        """Sample from the weights in ``folder`` from now on, as ``version``.

        ``folder``: Hugging Face format (safetensors), readable by the server; not needed afterwards. Raises `InfrastructureError` if the
        server did not load them; waiting and later requests then raise it too.
        """
        try:
            self.gate.hold(DRAIN_SECONDS)
            self._drain()
            self._api.reload(folder)
            self._api.resume()
        except BaseException as error:
            self.gate.fail(f"the policy's weights could not be replaced: {describe(error)}")
            raise
        self.gate.release(version)

    def close(self) -> None:
        """Raise `InfrastructureError` for further requests. The server keeps running."""
        self.gate.fail("the vLLM backend is closed")

    def _drain(self) -> None:
        deadline = time.monotonic() + DRAIN_SECONDS
        while True:
            self._api.abort()  # repeated, because requests may still be arriving
            if self.gate.is_empty(POLL_SECONDS):
                return
            if time.monotonic() > deadline:
                raise InfrastructureError(
                    f"{self.gate.sampling} responses were still running {DRAIN_SECONDS} s after the vLLM server was requested to end them; "
                    "read each of their generators to the end, or close it"
                )


def _rest(params: SamplingParams, sampled: int) -> SamplingParams:
    """The parameters after ``sampled`` tokens, with another seed."""
    if not sampled:
        return params
    seed = None if params.seed is None else random.Random(f"{params.seed} after {sampled}").getrandbits(62)
    # The same seed would repeat the random numbers of the first tokens.
    return replace(params, max_tokens=params.max_tokens - sampled, seed=seed)
