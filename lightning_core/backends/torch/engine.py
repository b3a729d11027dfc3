"""Samples in this process from the weights in training, with continuous batching.

Sampling has its own thread.
Requests arrive one by one, from any thread and event loop. Before each step the thread admits waiting requests: the parts
of their prompts that are not cached are computed (`Lane.admit`). Then every running row gets one token
(`Lane.step`), and finished rows are removed. A prompt's last token is computed in the first step of its row, so
identical prompts, including later ones, share everything before it. Adapters of one model share its batches.
"""

from __future__ import annotations

import asyncio
import logging
import random
import threading
import time
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch

from lightning_core.backends.backend import Delta, FinishReason, SamplingParams, check_request
from lightning_core.backends.torch.lanes import make_lane
from lightning_core.backends.torch.rows import ActiveRow, Lane
from lightning_core.backends.torch.step_watch import StepWatch
from lightning_core.errors import ConstraintError, InfrastructureError, PolicyRequestError
from lightning_core.model.adapters import Adapters
from lightning_core.model.compute import ComputePlan
from lightning_core.model.constraint import Constraints, Walk

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledModel:
    """A model, or an adapter of one, that the backend serves under one name."""

    model: Any
    path: ComputePlan
    """The result of `choose_path` for ``model``."""
    adapters: Adapters | None = None
    """The adapters of ``model``; names with the same model share their batches."""
    adapter: str | None = None
    """The adapter to sample with; None for the model without an adapter."""
    constraints: Constraints | None = None
    """Structured output for the model's tokenizer; None if it is not supported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Counts since the start of the engine.

    Prefix sharing saved the fraction ``1 - prompt_tokens_computed / prompt_tokens`` of the prefill.
    """

    requests: int
    prompt_tokens: int
    prompt_tokens_computed: int
    sampled_tokens: int
    decode_steps: int


@dataclass(slots=True, kw_only=True, eq=False)
class _Request(ActiveRow):
    model: str
    stream: bool
    loop: asyncio.AbstractEventLoop
    queue: asyncio.Queue[Delta | Exception] = field(default_factory=asyncio.Queue)
    sent: int = 0


class TorchBackend:
    """A `Backend` on local weights, some of which are trained."""

    def __init__(
        self,
        models: Mapping[str, SampledModel],
        *,
        max_context: int,
        max_batch: int,
        gather_ms: float,
        seed: int,
        cached_tokens: int = 16384,
        prefill_tokens: int = 2048,
        deterministic: bool = False,
    ) -> None:
        """``models``: by name; the first is a live policy, the others are frozen. See also `add`.

        ``max_batch``: maximum number of rows that one model decodes together, over all adapters. ``gather_ms``: how long an
        idle engine waits for further requests after the first. ``seed``: for requests without their own seed.
        ``cached_tokens``: see `add`. ``prefill_tokens``: prompt tokens after which a step admits no further requests.
        ``deterministic``: responses do not depend on other requests, to the bit.
        """
        self._make_lane = partial(make_lane, deterministic=deterministic)
        self._max_context = max_context
        self._max_batch = max_batch
        self._gather_s = gather_ms / 1000
        self._prefill_tokens = prefill_tokens
        self._seed = seed
        self._submitted = 0
        self._changed = threading.Condition()
        self.versions: dict[str, int] = {}
        """Version of each live policy, which its deltas carry."""
        self._models: dict[str, SampledModel] = {}
        self._lanes: dict[str, Lane] = {}
        for number, (name, sampled) in enumerate(models.items()):
            self.add(name, sampled, live=number == 0, cached_tokens=cached_tokens)
        self._pauses = 0
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="lightning-sampling", daemon=True)
        self._watch = StepWatch(self._thread)
        self._thread.start()

    def add(self, name: str, sampled: SampledModel, *, live: bool, cached_tokens: int = 16384) -> None:
        """Serve one more model; to be called before the first request.

        ``live``: its weights are trained and have versions. ``cached_tokens``: tokens kept for later prompts, in addition
        to the running rows.
        """
        with self._changed:
            beside = next((self._lanes[n] for n, s in self._models.items() if s.model is sampled.model), None)
            lane = self._lanes[name] = beside or self._make_lane(sampled.model, sampled.path, sampled.adapters)
            if live or beside is None:
                lane.remember(cached_tokens)
            if live:
                self.versions[name] = 0
            self._models[name] = sampled

    # The protocol -----------------------------------------------------------------------------------------------------

    @property
    def models(self) -> Sequence[str]:
        """The live policies, then the others."""
        return (*self.versions, *(name for name in self._models if name not in self.versions))

    @property
    def max_context(self) -> int:
        return self._max_context

    def check(self, params: SamplingParams) -> None:
        """See `Backend.check`."""
        if params.constraint is not None:
            for constraints in {id(s.constraints): s.constraints for s in self._models.values()}.values():
                _start(constraints, params.constraint)

    def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, *, model: str, stream: bool = False
    ) -> AsyncGenerator[Delta]:
        """Sample one response; see `Backend`.

        A response that spans a weight update has one delta per version.
        """
        if model not in self._models:
            raise PolicyRequestError(f"unknown model {model!r}: this backend has {list(self.models)}", status=404)
        check_request(prompt_ids, params, max_context=self._max_context)
        rows: int = self._models[model].model.get_input_embeddings().weight.shape[0]
        if (largest := max(prompt_ids)) >= rows:  # some tokenizers have more tokens than the model
            raise PolicyRequestError(f"the prompt has the token id {largest}; the model has ids from 0 to {rows - 1}")
        return self._generate(prompt_ids, params, model, stream)

    async def _generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, model: str, stream: bool
    ) -> AsyncGenerator[Delta]:
        sampled = self._models[model]
        request = _Request(
            prompt=np.asarray(prompt_ids, dtype=np.int64),
            params=params,
            adapter=sampled.adapter,
            walk=None if params.constraint is None else _start(sampled.constraints, params.constraint),
            model=model,
            stream=stream,
            loop=asyncio.get_running_loop(),
        )
        self._submit(request)
        try:
            while True:
                item = await self._watch.next_item(request.queue)
                if isinstance(item, Exception):
                    raise item
                yield item
                if item.finish_reason is not None:
                    return
        finally:
            request.aborted = True

    # For the trainer ----------------------------------------------------------------------------------------------------

    @property
    def stats(self) -> EngineStats:
        """Counts of all models together."""
        lanes = self._each_lane()
        return EngineStats(
            requests=self._submitted,
            prompt_tokens=sum(lane.prompt_tokens for lane in lanes),
            prompt_tokens_computed=sum(lane.prompt_tokens_computed for lane in lanes),
            sampled_tokens=sum(lane.sampled_tokens for lane in lanes),
            decode_steps=sum(lane.decode_steps for lane in lanes),
        )

    @property
    def submitted(self) -> int:
        """The number of requests.

        Together with the engine's seed it determines the random numbers of requests without a seed.
        """
        return self._submitted

    @submitted.setter
    def submitted(self, count: int) -> None:
        with self._changed:
            self._submitted = count

    @contextmanager
    def pause(self) -> Generator[None]:
        """Pause sampling between two steps, for a weight update. Requests wait. After a step that hangs, sampling has ended."""
        with self._changed:
            self._pauses += 1
            self._closing |= not self._changed.wait_for(lambda: not self._watch.stepping, self._watch.left())
        try:
            yield
        finally:
            with self._changed:
                self._pauses -= 1
                self._changed.notify_all()

    @torch.inference_mode()
    def forget(self, model: str) -> None:
        """Drop the keys and values of ``model`` before its weights change; call it inside `pause`.

        Running rows are prefilled again with their prompt and the tokens sampled so far, so every token is sampled
        from exactly the version of the weights that it carries.
        """
        lane = self._lanes[model]
        for row in reversed(lane.rows):
            assert isinstance(row, _Request)
            if row.model == model:
                self._send(row, None)
                lane.waiting.appendleft(row)
        lane.forget(self._models[model].adapter)

    def forget_contexts(self) -> None:
        """See `Trainer.forget_contexts`."""
        with self.pause():
            for model in self._models:
                self.forget(model)

    def close(self) -> None:
        """Stop the thread; unfinished requests raise `InfrastructureError`."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join(self._watch.left())

    # The thread ---------------------------------------------------------------------------------------------------------

    def _submit(self, request: _Request) -> None:
        with self._changed:
            self._watch.check()
            if self._closing:
                raise InfrastructureError("the sampling engine is closed")
            seed = request.params.seed
            request.random = random.Random(f"{self._seed}/{self._submitted}" if seed is None else f"seed {seed}")
            self._submitted += 1
            self._lanes[request.model].waiting.append(request)
            self._changed.notify_all()

    def _run(self) -> None:
        with torch.inference_mode():
            while self._next_turn():
                try:
                    for lane in self._each_lane():
                        self._advance(lane)
                except Exception as error:
                    logger.exception("sampling failed")
                    self._fail(error)
                finally:
                    with self._changed:
                        self._watch.stop()
                        self._changed.notify_all()
            self._fail(None)

    def _next_turn(self) -> bool:
        """Wait for requests; False when the engine is closing."""
        with self._changed:
            idle = not self._running()
            self._changed.wait_for(lambda: self._closing or (not self._pauses and self._busy()))
            if idle and not self._closing:
                # This delays only the first request, and the first step then serves all that arrive meanwhile.
                deadline = time.monotonic() + self._gather_s
                while not self._closing and (left := deadline - time.monotonic()) > 0:
                    self._changed.wait(left)
                self._changed.wait_for(lambda: self._closing or not self._pauses)
            if not self._closing:
                self._watch.start()
            return not self._closing

    def _each_lane(self) -> Sequence[Lane]:
        """Each lane once; several models may share one."""
        return list(dict.fromkeys(self._lanes.values()))

    def _running(self) -> bool:
        return any(lane.rows for lane in self._each_lane())

    def _busy(self) -> bool:
        return self._running() or any(lane.waiting for lane in self._each_lane())

    def _advance(self, lane: Lane) -> None:
        lane.drop(lambda row: row.aborted)
        lane.admit(rows=self._max_batch, tokens=self._prefill_tokens)
        if not lane.rows:
            return
        lane.step()
        finished: list[ActiveRow] = []
        for row in lane.rows:
            assert isinstance(row, _Request)
            reason = row.finish_reason()
            if row.failed is not None:
                self._deliver(row, row.failed)
                finished.append(row)
                continue
            if reason is not None or row.stream:
                self._send(row, reason)
            if reason is not None:
                finished.append(row)
        lane.drop(lambda row: row in finished, remember=True)

    def _send(self, request: _Request, reason: FinishReason | None) -> None:
        """Send the tokens sampled since the last delta."""
        if reason is None and request.sent == len(request.tokens):
            return
        delta = Delta(
            token_ids=request.tokens[request.sent :],
            logprobs=request.logprobs[request.sent :],
            version=self.versions.get(request.model),
            finish_reason=reason,
        )
        request.sent = len(request.tokens)
        self._deliver(request, delta)

    def _deliver(self, request: _Request, item: Delta | Exception) -> None:
        try:
            request.loop.call_soon_threadsafe(request.queue.put_nowait, item)
        except RuntimeError:  # its event loop is closed, so no consumer is left
            request.aborted = True

    def _fail(self, cause: Exception | None) -> None:
        with self._changed:
            requests: list[ActiveRow] = []
            for lane in self._each_lane():
                requests += [*lane.rows, *lane.waiting]
                lane.waiting.clear()
                lane.clear()
        for request in requests:
            assert isinstance(request, _Request)
            error = InfrastructureError(
                "the sampling engine was closed" if cause is None else f"sampling failed: {cause!r}"
            )
            error.__cause__ = cause
            self._deliver(request, error)


def _start(constraints: Constraints | None, constraint: str) -> Walk:
    if constraints is None:
        raise ConstraintError("this backend does not support structured output")
    return constraints.start(constraint)
