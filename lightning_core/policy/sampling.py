"""From a checked request to sampled, recorded responses, whole or streamed."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lightning_core.capture import find_run
from lightning_core.errors import PolicyRequestError
from lightning_core.policy.backend import Backend, SamplingParams
from lightning_core.policy.chat import Chat, Memory, Prompt
from lightning_core.policy.dialects.dialect import StreamWriter
from lightning_core.policy.dialects.exchange import ChatRequest, Choice, Message
from lightning_core.policy.recording import CallSpan
from lightning_core.policy.streaming import HeldText, RunningText, cut
from lightning_core.trace import Address, describe

logger = logging.getLogger(__name__)

POLICY = "policy"
"""The model name of the weights that are trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """Who answers whom, the same for all rollouts of a phase."""

    trained: frozenset[str] = frozenset()
    frozen: Mapping[str, str] = field(default_factory=dict[str, str])
    temperature: float | None = None
    """Sampling temperature of trained agents; None leaves it to the request."""
    max_tokens: int = 1024
    """Most tokens in a response of a model served here."""
    default_temperature: float = 1.0
    """Where neither the run nor the request says one."""
    default_max_tokens: int | None = None
    """Most tokens in a response where the request asks for no number; None: ``max_tokens``."""


@dataclass(slots=True, kw_only=True)
class Session:
    """What the endpoint knows of one live rollout."""

    root: Address
    routing: Routing
    seed: int | None
    seen: Counter[str] = field(default_factory=Counter[str])
    memory: Memory = field(default_factory=Memory)
    said: dict[str, Sequence[Message]] = field(default_factory=dict[str, Sequence[Message]])
    """Conversations that a later request may continue by naming their last call."""
    tasks: set[asyncio.Task[Any]] = field(default_factory=set[asyncio.Task[Any]])


@dataclass(frozen=True, slots=True)
class SamplingJob:
    """One request, ready to be sampled."""

    session: Session
    address: Address
    request: ChatRequest
    model: str
    prompt: Prompt
    params: SamplingParams


class Sampler:
    """Samples from ``backend`` in the chat format of ``chat``."""

    def __init__(self, backend: Backend, chat: Chat) -> None:
        self._backend = backend
        self._chat = chat

    def params(self, session: Session, request: ChatRequest, prompt: Prompt, *, trained: bool) -> SamplingParams:
        """How ``prompt`` is sampled. Raises `PolicyRequestError` if it leaves no room in the context."""
        routing = session.routing
        room = self._backend.max_context - len(prompt.ids)
        if room < 1:
            raise PolicyRequestError(
                f"the prompt has {len(prompt.ids)} tokens, but the model's context holds {self._backend.max_context}; "
                "shorten it or raise policy.max_context",
                param="messages",
            )
        temperature = routing.default_temperature if request.temperature is None else request.temperature
        if trained and routing.temperature is not None:
            temperature = routing.temperature
        asked = request.max_tokens or routing.default_max_tokens or routing.max_tokens
        return SamplingParams(
            max_tokens=min(asked, routing.max_tokens, room),
            temperature=temperature,
            # Training needs the logprobs of the whole distribution, so a trained agent samples from all of it.
            top_p=1.0 if trained or request.top_p is None else request.top_p,
            seed=_seed(session, prompt) if request.seed is None else request.seed,
            stop_token_ids=self._chat.stop_token_ids,
        )

    async def respond(
        self,
        job: SamplingJob,
        span: CallSpan,
        index: int,
        emit: Callable[[Choice, list[int], list[float]], None] | None = None,
    ) -> Choice:
        """Sample one response to its end, record it, and return it. ``emit`` hears of every delta."""
        request, params = job.request, job.params
        if params.seed is not None and index:
            params = replace(params, seed=params.seed + index)
        choice = Choice(message={}, token_ids=[], logprobs=[], finish_reason="stop")
        version = 0
        stopped_by_text = False
        running = RunningText(self._chat.text)
        deltas = self._backend.generate(
            job.prompt.ids, params, model=job.model, stream=request.stream or bool(request.stop)
        )
        try:
            async for delta in deltas:
                choice.token_ids += delta.token_ids
                choice.logprobs += delta.logprobs
                choice.finish_reason = delta.finish_reason or "stop"
                version = delta.version
                if request.stop:
                    text = running(choice.token_ids)
                    stopped_by_text = any(s in text for s in request.stop)
                if emit is not None:
                    emit(choice, list(delta.token_ids), list(delta.logprobs))
                if stopped_by_text:
                    choice.finish_reason = "stop"
                    break
        finally:
            await deltas.aclose()
        message = self._chat.parse(choice.token_ids, tools=bool(request.tools))
        if stopped_by_text:
            content, choice.stop = cut(message["content"] or "", request.stop)
            message = {**message, "content": content}
        else:
            self._chat.remember(job.prompt, choice.token_ids, message, job.session.memory)
        if message.get("tool_calls"):
            choice.finish_reason = "tool_calls"
        choice.message = message
        if request.carried is not None:
            job.session.said[span.id] = (*request.carried, message)
        span.sampled(
            job.prompt,
            choice,
            version=version if job.model == POLICY else None,
            temperature=params.temperature,
            top_p=params.top_p,
        )
        span.end()
        return choice

    async def stream(self, job: SamplingJob, spans: list[CallSpan], writer: StreamWriter) -> AsyncGenerator[bytes]:
        """Server-sent events as tokens come. Text that may still become a tool call, a stop or half a character is held back."""
        events: asyncio.Queue[bytes | None] = asyncio.Queue()

        def send(event: bytes) -> None:
            if event:
                events.put_nowait(event)

        async def run(index: int, span: CallSpan) -> Choice:
            held = HeldText(RunningText(self._chat.text), job.request.stop, tools=bool(job.request.tools))
            send(writer.begin(index))

            def emit(choice: Choice, ids: list[int], logprobs: list[float]) -> None:
                send(writer.more(index, held.more(choice.token_ids), ids, logprobs))

            choice = await self.respond(job, span, index, emit)
            send(writer.finish(index, choice, held.rest(choice.message.get("content") or "")))
            return choice

        everything = asyncio.gather(*(run(i, span) for i, span in enumerate(spans)))
        everything.add_done_callback(lambda _: events.put_nowait(None))
        try:
            over = False
            while not over:
                # What waits goes out together, so that an endpoint that is behind catches up.
                waiting = [await events.get(), *(events.get_nowait() for _ in range(events.qsize()))]
                over = waiting[-1] is None
                if ready := b"".join(event for event in waiting if event):
                    yield ready
            yield writer.end(await everything)
        finally:
            everything.cancel()


def _seed(session: Session, prompt: Prompt) -> int | None:
    if session.seed is None:
        return None
    digest = hashlib.blake2b(repr((session.seed, prompt.ids)).encode(), digest_size=8).hexdigest()
    session.seen[digest] += 1
    # Requests for several choices add the choice's index, so repeats are spaced further apart than that.
    return (int(digest, 16) + 65536 * session.seen[digest]) % (1 << 62)


def abandon(spans: list[CallSpan], error: BaseException) -> None:
    """Close those of ``spans`` that are still open, as failed."""
    for span in spans:
        span.abandon(error)


def count_failure(address: Address, error: Exception) -> None:
    """Blame the machinery, on the rollout that the call belonged to."""
    logger.warning("a model call of agent %r failed: %s", address.agent, describe(error))
    run = find_run(address.rollout)
    if run is not None:
        run.blame_infrastructure(describe(error))
