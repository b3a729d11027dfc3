"""Sampling in process from the weights that are trained: continuous batching on a thread of its own.

Requests arrive one by one, from any thread and event loop. Before each step the thread takes in whoever waits: what of their
prompts no earlier request has left behind is computed once, packed (`Lane.admit`); then every running row gets one token
(`Lane.step`), and rows that are done leave. A prompt's last token is computed as the first step of its row, so that identical
prompts, also those that come later, share all else. Adapters of one model share its batches.
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
from typing import Any

import numpy as np
import torch

from lightning_core.backends.backend import Delta, FinishReason, SamplingParams, check_request
from lightning_core.backends.torch.lane import Lane, Row
from lightning_core.errors import InfrastructureError, PolicyRequestError
from lightning_core.model.adapters import Adapters
from lightning_core.model.attention import Geometry
from lightning_core.model.constraint import Constraints, Walk

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledModel:
    """What the backend samples from under one name: a model switched by `use_lightning_attention`, or an adapter of one."""

    model: Any
    geometry: Geometry
    adapters: Adapters | None = None
    """Those of ``model``; names with the same model and adapters share their batches."""
    adapter: str | None = None
    """Which of them; None: the model without one."""
    constraints: Constraints | None = None
    """Of the model's vocabulary; None: its responses cannot be constrained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Counts since the start. How much prefix sharing saved: ``1 - prompt_tokens_computed / prompt_tokens``."""

    requests: int
    prompt_tokens: int
    prompt_tokens_computed: int
    sampled_tokens: int
    decode_steps: int


@dataclass(slots=True, kw_only=True, eq=False)
class _Request(Row):
    model: str
    stream: bool
    loop: asyncio.AbstractEventLoop
    queue: asyncio.Queue[Delta | Exception] = field(default_factory=asyncio.Queue)
    sent: int = 0


class TorchBackend:
    """A `Backend` on local weights. The first of ``models`` is a live policy, the others are frozen; `add` adds more of either."""

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
    ) -> None:
        """``gather_ms``: how long an idle engine waits for company of a first request.

        ``max_batch``: rows that one model decodes together, whatever their adapters. ``cached_tokens``: contexts that are remembered
        for each model and each of its live adapters beyond the running rows, for reuse by later prompts.
        """
        self._max_context = max_context
        self._max_batch = max_batch
        self._gather_s = gather_ms / 1000
        self._cached_tokens = cached_tokens
        self._prefill_tokens = prefill_tokens
        self._seed = seed
        self._submitted = 0
        self._changed = threading.Condition()
        self.versions: dict[str, int] = {}
        """Of the live policies: what their deltas are stamped with."""
        self._models: dict[str, SampledModel] = {}
        self._lanes: dict[str, Lane] = {}
        for number, (name, sampled) in enumerate(models.items()):
            self.add(name, sampled, live=number == 0)
        self._pauses = 0
        self._stepping = False
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="lightning-sampling", daemon=True)
        self._thread.start()

    def add(self, name: str, sampled: SampledModel, *, live: bool) -> None:
        """Serve one more model, before the first request. ``live``: its weights are trained, so they have versions."""
        with self._changed:
            beside = next((self._lanes[n] for n, s in self._models.items() if s.model is sampled.model), None)
            lane = self._lanes[name] = beside or Lane(sampled.model, sampled.geometry, adapters=sampled.adapters)
            if live or beside is None:
                lane.remember(self._cached_tokens)
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
        """Sample one response; see `Backend`. A response that lives through a weight change has a delta per version."""
        if model not in self._models:
            raise PolicyRequestError(f"unknown model {model!r}: this backend has {list(self.models)}", status=404)
        check_request(prompt_ids, params, max_context=self._max_context)
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
                item = await request.queue.get()
                if isinstance(item, Exception):
                    raise item
                yield item
                if item.finish_reason is not None:
                    return
        finally:
            request.aborted = True

    # What the trainer uses ----------------------------------------------------------------------------------------------

    @property
    def stats(self) -> EngineStats:
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
        """Requests so far; together with the seed it determines the random numbers of those without a seed."""
        return self._submitted

    @submitted.setter
    def submitted(self, count: int) -> None:
        with self._changed:
            self._submitted = count

    @contextmanager
    def pause(self) -> Generator[None]:
        """Hold sampling between two steps while the weights change. Requests wait."""
        with self._changed:
            self._pauses += 1
            self._changed.wait_for(lambda: not self._stepping)
        try:
            yield
        finally:
            with self._changed:
                self._pauses -= 1
                self._changed.notify_all()

    @torch.inference_mode()
    def forget(self, model: str) -> None:
        """Forget what the weights of ``model`` computed, and free that memory, before they change; inside `pause`.

        Its running rows start over from their prompt and what they have sampled so far, so that every token is sampled from
        exactly the weights of the version that it carries.
        """
        lane = self._lanes[model]
        for row in reversed(lane.rows):
            assert isinstance(row, _Request)
            if row.model == model:
                self._send(row, None)
                lane.waiting.appendleft(row)
        lane.forget(self._models[model].adapter)

    def close(self) -> None:
        """Stop the thread; whoever still waits gets an `InfrastructureError`."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    # The thread ---------------------------------------------------------------------------------------------------------

    def _submit(self, request: _Request) -> None:
        with self._changed:
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
                        self._stepping = False
                        self._changed.notify_all()
            self._fail(None)

    def _next_turn(self) -> bool:
        """Wait until there is something to do; False when closing."""
        with self._changed:
            idle = not self._running()
            self._changed.wait_for(lambda: self._closing or (not self._pauses and self._busy()))
            if idle and not self._closing:
                # Nobody is held up by this but the first, and the first step serves all who come in the meantime.
                deadline = time.monotonic() + self._gather_s
                while not self._closing and (left := deadline - time.monotonic()) > 0:
                    self._changed.wait(left)
                self._changed.wait_for(lambda: self._closing or not self._pauses)
            self._stepping = not self._closing
            return self._stepping

    def _each_lane(self) -> Sequence[Lane]:
        """Each once, though several models may share it."""
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
        finished: list[Row] = []
        for row in lane.rows:
            assert isinstance(row, _Request)
            reason = row.finish_reason()
            if reason is not None or row.stream:
                self._send(row, reason)
            if reason is not None:
                finished.append(row)
        lane.drop(lambda row: row in finished, remember=True)

    def _send(self, request: _Request, reason: FinishReason | None) -> None:
        """Hand over what has been sampled since the last delta."""
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
        except RuntimeError:  # its event loop is closed: nobody waits any more
            request.aborted = True

    def _fail(self, cause: Exception | None) -> None:
        with self._changed:
            requests: list[Row] = []
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
        raise PolicyRequestError("this backend cannot constrain its responses", param="response_format")
    return constraints.start(constraint)
