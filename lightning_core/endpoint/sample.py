"""Samples and records the responses to a request, with and without streaming."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Any

from lightning_core.backends.backend import Backend, Delta, SamplingParams, sampling_digest
from lightning_core.capture.address import Address
from lightning_core.chat.chat import Chat, RenderedPrompt
from lightning_core.chat.messages import Message
from lightning_core.dialects.dialect import StreamWriter
from lightning_core.dialects.exchange import ChatRequest, Choice
from lightning_core.endpoint.constraints import constrain, explain
from lightning_core.endpoint.record import CallSpan
from lightning_core.endpoint.recorded import recorded_deltas
from lightning_core.endpoint.sessions import Session
from lightning_core.endpoint.streaming import StopSearch, cut, hold
from lightning_core.endpoint.transport.large_work import BYTES_OF_TOKEN
from lightning_core.errors import ConstraintError, ContextOverflowError
from lightning_core.trace import Call, pack


@dataclass(frozen=True, slots=True)
class SamplingJob:
    """One response to sample."""

    session: Session
    address: Address
    request: ChatRequest
    model: str
    chat: Chat
    prompt: RenderedPrompt
    params: SamplingParams


class Sampler:
    """Samples from ``backend``."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def params(
        self, session: Session, request: ChatRequest, chat: Chat, prompt: RenderedPrompt, *, trained: bool
    ) -> SamplingParams:
        """Sampling parameters of the first response to ``prompt``.

        Raises `PolicyRequestError` if the prompt fills the context, or as `constrain` does.
        """
        routing = session.routing
        room = self._backend.max_context - len(prompt.ids)
        if room < 1:
            raise ContextOverflowError(
                f"the prompt has {len(prompt.ids)} tokens; expected fewer than the context length of {self._backend.max_context}. "
                "Shorten the prompt, raise policy.max_context if it is below the model's own limit, or choose another model",
                param=request.input_field,
            )
        temperature = routing.default_temperature if request.temperature is None else request.temperature
        if trained and routing.temperature is not None:
            temperature = routing.temperature
        # With the agent's own seed, all attempts at a task would be identical, and there would be nothing to learn from them.
        runs_seed = request.seed is None or (trained and session.seed is not None)
        max_tokens = request.max_tokens or routing.default_max_tokens or routing.max_tokens
        params = SamplingParams(
            max_tokens=min(max_tokens, routing.max_tokens, room),
            temperature=temperature,
            # Training assumes the whole distribution.
            top_p=1.0 if trained or request.top_p is None else request.top_p,
            seed=_seed(session, prompt) if runs_seed else request.seed,
            stop_token_ids=chat.stop_token_ids,
            rollout=session.root.rollout,
        )
        return constrain(params, self._backend, session, request, chat, prompt)

    async def respond(
        self, job: SamplingJob, span: CallSpan, emit: Callable[[Choice, list[int], list[float]], None] | None = None
    ) -> Choice:
        """Sample, record and return one response. ``emit`` is called with every delta."""
        request, params, chat = job.request, job.params, job.chat
        choice = Choice(message={}, token_ids=[], logprobs=[], finish_reason="stop")
        sampled: list[Delta] = []
        stopped_by_text, has_stop = False, StopSearch(chat.text, request.stop)
        recorded = _recorded(job, span)
        deltas = (
            recorded_deltas(recorded, stream=request.stream)
            if recorded is not None
            else self._backend.generate(
                job.prompt.ids, params, model=job.model, stream=request.stream or bool(request.stop)
            )
        )
        try:
            async for delta in deltas:
                sampled.append(delta)
                choice.token_ids += delta.token_ids
                choice.logprobs += delta.logprobs
                choice.finish_reason = delta.finish_reason or "stop"
                stopped_by_text = has_stop(choice.token_ids)
                if emit is not None:
                    emit(choice, list(delta.token_ids), list(delta.logprobs))
                if stopped_by_text:
                    choice.finish_reason = "stop"
                    break
        except ConstraintError as error:
            raise explain(error, request) from error
        finally:
            await deltas.aclose()
        finish = partial(self._finish, job, span, choice, sampled, recorded, stopped_by_text=stopped_by_text)
        size = (len(job.prompt.ids) + len(choice.token_ids)) * BYTES_OF_TOKEN
        await job.session.large_work.run(job.session.root.rollout, size, finish)
        return choice

    def _finish(
        self,
        job: SamplingJob,
        span: CallSpan,
        choice: Choice,
        sampled: Sequence[Delta],
        recorded: Call | None,
        *,
        stopped_by_text: bool,
    ) -> None:
        """Read and record ``choice``, which is complete."""
        request, params, chat = job.request, job.params, job.chat
        text, choice.stop = cut(chat.text(choice.token_ids), request.stop)
        # The recorded message, since the ids of tool calls are random.
        message = _read(job, text) if recorded is None else dict(recorded.response or {})
        if not request.prompts:
            stopped = text if stopped_by_text else None
            place = chat.remember(job.prompt, choice.token_ids, message, job.session.memory, stopped=stopped)
            job.session.prompts.add(job.address.agent, job.prompt, place)
        if message.get("tool_calls"):
            choice.has_whole_calls = choice.finish_reason == "length" and _ends_in_call(job, text)
            choice.finish_reason = "length" if choice.finish_reason == "length" else "tool_calls"
        choice.message = message
        if request.history is not None:
            job.session.conversations[span.id] = (*request.history, message)
        span.sampled(job.prompt, choice, params)
        version = sampled[-1].version
        if version is not None:
            span.trainable(
                version=version,
                first_version=sampled[0].version,
                # Of the backend's tokens, before anything is stripped or parsed.
                digest=sampling_digest(
                    prompt_ids=job.prompt.ids,
                    output_ids=[token for delta in sampled for token in delta.token_ids],
                    logprobs=[logprob for delta in sampled for logprob in delta.logprobs],
                    temperature=params.temperature,
                    version=version,
                    constraint=params.constraint,
                ),
            )
        span.end()

    async def respond_to_all(self, jobs: Sequence[SamplingJob], spans: Sequence[CallSpan]) -> list[Choice]:
        """Sample all responses to a request. If one fails, cancel the others."""
        if len(jobs) == 1:
            return [await self.respond(jobs[0], spans[0])]
        return await _gather(self.respond(job, span) for job, span in zip(jobs, spans, strict=True))

    async def stream(
        self, jobs: Sequence[SamplingJob], spans: Sequence[CallSpan], writer: StreamWriter
    ) -> AsyncGenerator[bytes]:
        """The server-sent events of a response; `HeldText` decides which text is held back."""
        events: asyncio.Queue[bytes | None] = asyncio.Queue()

        def send(event: bytes) -> None:
            if event:
                events.put_nowait(event)

        async def run(index: int, job: SamplingJob, span: CallSpan) -> Choice:
            held = hold(job.chat, job.request, thinking=job.prompt.thinking)
            send(writer.begin(index))

            def think(reasoning: str) -> None:
                if reasoning:
                    send(writer.think(index, reasoning))

            def emit(choice: Choice, ids: list[int], logprobs: list[float]) -> None:
                reasoning, text = held.more(choice.token_ids)
                think(reasoning)
                send(writer.more(index, text, ids, logprobs))

            choice = await self.respond(job, span, emit)
            reasoning, rest = held.rest(choice.message)
            think(reasoning)
            send(writer.finish(index, choice, rest))
            return choice

        everything = asyncio.ensure_future(
            _gather(run(i, *pair) for i, pair in enumerate(zip(jobs, spans, strict=True)))
        )
        everything.add_done_callback(lambda _: events.put_nowait(None))
        try:
            over = False
            while not over:
                # All waiting events are sent together, so a slow endpoint catches up.
                waiting = [await events.get(), *(events.get_nowait() for _ in range(events.qsize()))]
                over = waiting[-1] is None
                if ready := b"".join(event for event in waiting if event):
                    yield ready
            yield writer.end(await everything)
        finally:
            everything.cancel()
            await asyncio.wait({everything})


def _recorded(job: SamplingJob, span: CallSpan) -> Call | None:
    """The recorded call that answers ``job``, if any; records it, or the recorded call that ``job`` replaces."""
    if job.session.recorded is None:
        return None
    asked = (job.address.agent, job.model, job.prompt.ids)
    if (recorded := job.session.recorded.take(*asked)) is not None:
        span.replays(recorded.replays or recorded.id)
    elif (forked := job.session.recorded.reach(*asked)) is not None:
        span.forks(forked)
    return recorded


def _read(job: SamplingJob, text: str) -> Message:
    if job.request.prompts:
        return {"role": "assistant", "content": text}
    request = job.request
    is_json = request.requirements.schema is not None
    return job.chat.read(
        text, tools=request.has_tools, thinking=job.prompt.thinking, declared=request.functions, is_json=is_json
    )


def _ends_in_call(job: SamplingJob, text: str) -> bool:
    """Whether the last character of a response is of a complete call: without it, the rest has no less text around the calls."""
    whole, shorter = (len(_read(job, part).get("content") or "") for part in (text.rstrip(), text.rstrip()[:-1]))
    return whole <= shorter


async def _gather(works: Iterable[Coroutine[Any, Any, Choice]]) -> list[Choice]:
    """The results of ``works``, run concurrently. The first error cancels the others."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(work) for work in works]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]


def seeded(params: SamplingParams, choice: int) -> SamplingParams:
    """``params`` with the seed of response ``choice`` to the same prompt."""
    return params if params.seed is None else replace(params, seed=(params.seed + choice) % (1 << 63))


def _seed(session: Session, prompt: RenderedPrompt) -> int | None:
    if session.seed is None:
        return None
    seeded_by = str(session.seed).encode() + pack(prompt.ids, "<u4")
    digest = hashlib.blake2b(seeded_by, digest_size=8).hexdigest()
    times = next(session.seen.setdefault(digest, count(1)))  # in one step, since other threads count too
    # `seeded` adds the index of the choice, so the seeds of repeats are further apart.
    return (int(digest, 16) + 65536 * times) % (1 << 62)
