"""Samples in this process from the weights in training, with continuous batching.

Sampling has its own thread.
Requests arrive one by one, from any thread and event loop. Before each step the thread admits waiting requests: the parts
of their prompts that are not cached are computed (`Lane.admit`). Then every running row gets one token
(`Lane.step`), and finished rows are removed. A prompt's last token is computed in the first step of its row, so
identical prompts, including later ones, share everything before it. Adapters of one model share its batches.

Rows wait while the memory of the running rows has no room for them, and the newest wait again when the others outgrow it.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import random
import threading
import time
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from lightning_core.backends.backend import Delta, SamplingParams, check_request
from lightning_core.backends.torch.lanes import make_lane
from lightning_core.backends.torch.request import Request, by_age, does_not_fit
from lightning_core.backends.torch.rows import ActiveRow, Lane
from lightning_core.backends.torch.step_watch import StepWatch
from lightning_core.errors import ConstraintError, InfrastructureError, PolicyRequestError
from lightning_core.model.adapters import Adapters
from lightning_core.model.compute import ComputePlan
from lightning_core.model.constraint import Constraints, Walk
from lightning_core.model.out_of_memory import is_out_of_memory, out_of_memory_problem

logger = logging.getLogger(__name__)

_PREFILL_TOKENS = 2048
"""Prompt tokens after which a step admits no further requests."""


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
        row_bytes: int | None = None,
        deterministic: bool = False,
    ) -> None:
        """``models``: by name; the first is a live policy, the others are frozen. See also `add`.

        ``max_batch``: maximum number of rows that one model decodes together, over all adapters. ``gather_ms``: how long an
        idle engine waits for further requests after the first. ``seed``: for requests without their own seed.
        ``cached_tokens``, ``row_bytes``: see `add`. ``deterministic``: responses do not depend on other requests, to the bit.
        """
        self._make_lane = partial(make_lane, deterministic=deterministic)
        self._max_context = max_context
        self._max_batch = max_batch
        self._gather_s = gather_ms / 1000
        self._seed = seed
        self.submitted = 0
        """The number of requests. Together with ``seed`` it determines the random numbers of requests without a seed."""
        self._changed = threading.Condition()
        self.versions: dict[str, int] = {}
        """Version of each live policy, which its deltas carry."""
        self._models: dict[str, SampledModel] = {}
        self._lanes: dict[str, Lane] = {}
        self._most_rows: dict[Lane, int] = {}
        """Rows that may run together after more did not fit the memory, until the lane is idle."""
        for number, (name, sampled) in enumerate(models.items()):
            self.add(name, sampled, live=number == 0, cached_tokens=cached_tokens, row_bytes=row_bytes)
        self._pauses = 0
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="lightning-sampling", daemon=True)
        self._watch = StepWatch(self._thread)
        self._thread.start()

    def add(
        self, name: str, sampled: SampledModel, *, live: bool, cached_tokens: int = 16384, row_bytes: int | None = None
    ) -> None:
        """Serve one more model; to be called before the first request.

        ``live``: its weights are trained and have versions. ``cached_tokens``: tokens kept for later prompts, in addition
        to the running rows. ``row_bytes``: memory of the running rows; None for no bound.
        """
        with self._changed:
            beside = next((self._lanes[n] for n, s in self._models.items() if s.model is sampled.model), None)
            lane = self._lanes[name] = beside or self._make_lane(sampled.model, sampled.path, sampled.adapters)
            if live or beside is None:
                lane.remember(cached_tokens)
                if row_bytes is not None:
                    lane.bound(row_bytes)
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
        request = Request(
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
        with self._changed:  # others may append to the queue
            waiting = list(lane.waiting)
        running = by_age(lane.rows)
        for row in [*by_age(waiting), *running]:  # one that waits again has tokens too
            if row.model == model:
                row.send(self.versions.get(model), None)
        lane.waiting.extendleft(row for row in reversed(running) if row.model == model)
        lane.forget(self._models[model].adapter)

    def free_rows(self, model: str) -> bool:
        """Free all memory of the lane of ``model``, unless another policy has running rows there; returns whether it held any.

        Call it after `forget`, which keeps memory for the next rows, inside `pause`.
        """
        lane = self._lanes[model]
        if lane.rows or not lane.held_bytes:
            return False
        lane.clear()
        return True

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

    def _submit(self, request: Request) -> None:
        with self._changed:
            self._watch.check()
            if self._closing:
                raise InfrastructureError("the sampling engine is closed")
            seed = request.params.seed
            request.number = self.submitted
            request.random = random.Random(f"{self._seed}/{self.submitted}" if seed is None else f"seed {seed}")
            self.submitted += 1
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
        try:
            self._step(lane)
        except Exception as error:
            if not lane.rows or not is_out_of_memory(error):
                raise
            problem = out_of_memory_problem(error)
        else:
            if not lane.rows and not lane.waiting:
                self._most_rows.pop(lane, None)
            return
        # Outside the except clause: the traceback holds tensors of the step.
        self._free(lane, problem)

    def _step(self, lane: Lane) -> None:
        lane.drop(lambda row: row.aborted)
        lane.admit(rows=self._most_rows.get(lane, self._max_batch), tokens=_PREFILL_TOKENS)
        if not lane.rows:
            return
        lane.step()
        for row in (rows := by_age(lane.rows)):
            if row.failed is not None:
                row.fail(row.failed)
            elif (reason := row.finish_reason()) is not None or row.stream:
                row.send(self.versions.get(row.model), reason)
        ended = {row for row in rows if row.ended}
        lane.drop(ended.__contains__, remember=True)

    def _free(self, lane: Lane, problem: str) -> None:
        """Free the memory of a lane whose step did not fit: half of its rows are sampled again, and the others wait. A row alone fails."""
        rows = [row for row in by_age(lane.rows) if not row.ended]
        lane.clear()
        gc.collect()
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        if len(rows) > 1:
            self._most_rows[lane] = fewer = len(rows) // 2
            lane.waiting.extendleft(reversed(rows))
            logger.warning(
                "sampling %d responses failed, %s; %d continue, and the others wait", len(rows), problem, fewer
            )
            return
        self._most_rows.pop(lane, None)
        for row in rows:
            row.fail(does_not_fit(row, problem))

    def _fail(self, cause: Exception | None) -> None:
        with self._changed:
            requests: list[ActiveRow] = []
            for lane in self._each_lane():
                requests += [*lane.rows, *lane.waiting]
                lane.waiting.clear()
                lane.clear()
        for request in by_age(requests):
            error = InfrastructureError(
                "the sampling engine was closed" if cause is None else f"sampling failed: {cause!r}"
            )
            error.__cause__ = cause
            request.fail(error)


def _start(constraints: Constraints | None, constraint: str) -> Walk:
    if constraints is None:
        raise ConstraintError("this backend does not support structured output")
    return constraints.start(constraint)
