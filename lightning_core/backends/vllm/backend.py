"""Sampling from a vLLM server, with new weights pushed after each update.

Weights change between two tokens. During a push, new requests are held back and the server ends running ones; when each has returned
its tokens, the weights are replaced. An interrupted response continues from its prompt and its tokens so far, so no keys and values
of older weights are used. Callers get no error, only deltas of the older version before the new one's.

The server follows a constraint from the first token of a request on, so a constrained response cannot continue. A push waits for these
first. One that takes longer begins again, if its caller has none of its tokens yet.
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

WHOLE_SECONDS = 60
"""Seconds that a push waits for constrained responses to end by themselves."""
DRAIN_SECONDS = 60
"""Seconds that a push waits for running responses to return their tokens."""
MOST_ATTEMPTS = 3
"""How often a constrained response is begun."""
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

        A response interrupted by a push has deltas of each version. Raises `InfrastructureError` for a constrained one that a push
        interrupts after a delta, or `MOST_ATTEMPTS` times.
        """
        if model != self._model:
            raise PolicyRequestError(f"unknown model {model!r}: this backend has {[self._model]!r}", status=404)
        check_request(prompt_ids, params, max_context=self._max_context)
        self.check(params)
        return self._generate(prompt_ids, params, stream)

    async def _generate(self, prompt_ids: Sequence[int], params: SamplingParams, stream: bool) -> AsyncGenerator[Delta]:
        sampled: list[int] = []
        attempts, whole = 0, params.constraint is not None
        while True:
            version = await self.gate.enter(whole=whole)
            aborted, delta = False, None
            attempts += 1
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
                        yield delta
                if aborted and not self.gate.state.held:
                    raise InfrastructureError(
                        f"the vLLM server {self._api.url} aborted a response: it is shutting down, or another program paused it"
                    )
            finally:
                self.gate.leave(whole=whole)
            if whole and aborted:
                if (stream and sampled) or attempts == MOST_ATTEMPTS:
                    raise InfrastructureError(
                        f"a constrained response was interrupted by new weights, and cannot continue: {len(sampled)} tokens took more than "
                        f"{WHOLE_SECONDS} s. Lower rollouts.max_tokens, or make the JSON schema or the tools smaller"
                    )
                sampled = []
                continue
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
            self.gate.wait_for_whole(WHOLE_SECONDS)
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
