"""Who answers a model call, and how: a request becomes prompts, prompts become sampled responses, and each of them a span."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial

from starlette.responses import JSONResponse, Response

from lightning_core.backends.backend import Backend
from lightning_core.chat.chat import Chat, Prompt
from lightning_core.endpoint.dialects.dialect import Dialect
from lightning_core.endpoint.dialects.exchange import ChatRequest, Reply, model_name
from lightning_core.endpoint.forward import Passing
from lightning_core.endpoint.limits import Limits
from lightning_core.endpoint.record import CallSpan
from lightning_core.endpoint.request import Asked, EventStream
from lightning_core.endpoint.sample import Sampler, SamplingJob, seeded
from lightning_core.endpoint.upstream import Target
from lightning_core.errors import PolicyRequestError

_LARGE = 256 << 10
"""Bytes of a request whose tokens take so long to make that others would have to wait."""


class Answering:
    """Answers from ``backend`` in the chat format of the model that answers, or has the request passed on."""

    def __init__(self, backend: Backend, chats: Mapping[str, Chat], passing: Passing, limits: Limits) -> None:
        self._backend = backend
        self._chats = chats
        self._sampler = Sampler(backend)
        self._passing = passing
        self._limits = limits

    async def answer(self, wire: Dialect, asked: Asked) -> Response:
        """Raises `PolicyRequestError` for what cannot be honoured, and whatever a backend or an upstream server raises."""
        routing, agent = asked.session.routing, asked.address.agent
        # A configured model takes the place of the one that the agent names, here and upstream.
        requested = model_name(asked.body)
        body = {**asked.body, "model": routing.frozen.get(agent or "", requested)}
        model = self._route(wire, asked, body["model"])
        read = wire.read_request if isinstance(model, Target) else wire.parse_request
        request = read(body, said=asked.session.said)
        self._check_limits(request)
        if isinstance(model, Target):
            return await self._passing.pass_on(wire, asked, request, model)
        return await self._sample(wire, asked, request, model)

    def _route(self, wire: Dialect, asked: Asked, requested: str) -> str | Target:
        policy = asked.session.routing.policy_of(asked.address.agent)
        if policy is not None:
            return policy
        if requested in self._backend.models:
            return requested
        target = self._passing.target(
            asked.headers, wire.PATH, key_header=wire.KEY_HEADER, passed_headers=wire.PASSED_HEADERS
        )
        if target is None:
            missing = f"model {requested!r} is not served here; served are {list(self._backend.models)!r}"
            if self._passing.to_origins:
                missing = (
                    f"agent {asked.address.agent!r} is not trained, and {missing}. Train the agent, give it a model under agents.frozen, "
                    "or set policy.upstream"
                )
            raise PolicyRequestError(missing, status=404, param="model")
        return target

    def _check_limits(self, request: ChatRequest) -> None:
        if request.choices > self._limits.choices:
            raise PolicyRequestError(
                f"{request.choices} answers are asked for; there can be {self._limits.choices} to one request",
                param="n",
            )
        if len(request.messages) > self._limits.messages:
            raise PolicyRequestError(
                f"{request.prompt_field} has {len(request.messages)} messages; there can be {self._limits.messages}",
                param=request.prompt_field,
            )

    async def _sample(self, wire: Dialect, asked: Asked, request: ChatRequest, model: str) -> Response:
        """Answer from the backend: render once, sample each response, record it."""
        spans = [CallSpan(asked.address, request, model, i) for i in range(request.choices)]
        asked.spans += spans
        chat = self._chats[model]
        render = partial(_render, chat, asked, request)
        prompts = await asyncio.to_thread(render) if asked.size > _LARGE else render()
        trained = asked.session.routing.trains(asked.address.agent)
        jobs = [
            SamplingJob(asked.session, asked.address, request, model, chat, prompt, seeded(params, i))
            for prompt in prompts
            for params in (self._sampler.params(asked.session, request, chat, prompt, trained=trained),)
            for i in range(request.n)
        ]
        reply = Reply(
            request=request,
            call=spans[0].id,
            model=model,
            prompts=[prompt.ids for prompt in prompts],
            decode=chat.text,
        )
        if request.stream:
            return EventStream(self._sampler.stream(jobs, spans, wire.stream_writer(reply)))
        return JSONResponse(wire.write_answer(reply, await self._sampler.respond_to_all(jobs, spans)))


def _render(chat: Chat, asked: Asked, request: ChatRequest) -> list[Prompt]:
    if request.prompts:
        return [chat.plain(prompt) for prompt in request.prompts]
    demands = request.demands.in_words()
    return [chat.render(request.messages, request.tools, asked.session.memory, demands=demands)]
