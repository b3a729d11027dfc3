"""Routes a model call, then forwards it or samples and records its responses."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial

from starlette.responses import JSONResponse, Response

from lightning_core.backends.backend import Backend
from lightning_core.chat.chat import Chat, RenderedPrompt
from lightning_core.endpoint.dialects.dialect import Dialect
from lightning_core.endpoint.dialects.exchange import ChatRequest, ResponseContext, model_name
from lightning_core.endpoint.forward import Forwarder
from lightning_core.endpoint.limits import Limits
from lightning_core.endpoint.record import CallSpan
from lightning_core.endpoint.request import EventStream, IncomingRequest
from lightning_core.endpoint.sample import Sampler, SamplingJob, seeded
from lightning_core.endpoint.upstream import Target
from lightning_core.errors import PolicyRequestError

_LARGE = 256 << 10
"""Bytes of a request from which on tokenising would delay other requests, so that it runs on another thread."""


class Responder:
    """Responds from ``backend``, in the chat format of the model, or forwards the request."""

    def __init__(self, backend: Backend, chats: Mapping[str, Chat], forwarder: Forwarder, limits: Limits) -> None:
        self._backend = backend
        self._chats = chats
        self._sampler = Sampler(backend)
        self._forwarder = forwarder
        self._limits = limits

    async def respond(self, dialect: Dialect, incoming: IncomingRequest) -> Response:
        """The response to ``incoming``.

        Raises `PolicyRequestError` for requests that are not supported, and the errors of the backend and the upstream server.
        """
        routing, agent = incoming.session.routing, incoming.address.agent
        # A model under agents.frozen replaces the requested one, here and upstream.
        requested = model_name(incoming.body)
        body = {**incoming.body, "model": routing.frozen.get(agent or "", requested)}
        model = self._route(dialect, incoming, body["model"])
        read = dialect.read_request if isinstance(model, Target) else dialect.parse_request
        request = read(body, conversations=incoming.session.conversations)
        self._check_limits(request)
        if isinstance(model, Target):
            return await self._forwarder.forward(dialect, incoming, request, model)
        return await self._sample(dialect, incoming, request, model)

    def _route(self, dialect: Dialect, incoming: IncomingRequest, requested: str) -> str | Target:
        policy = incoming.session.routing.policy_of(incoming.address.agent)
        if policy is not None:
            return policy
        if requested in self._backend.models:
            return requested
        target = self._forwarder.target(
            incoming.headers, dialect.PATH, key_header=dialect.KEY_HEADER, forwarded_headers=dialect.FORWARDED_HEADERS
        )
        if target is None:
            missing = f"model {requested!r} is not served here; the models are {list(self._backend.models)!r}"
            if self._forwarder.to_origins:
                missing = (
                    f"agent {incoming.address.agent!r} is not trained, and {missing}. Train the agent, set its model under "
                    "agents.frozen, or set policy.upstream"
                )
            raise PolicyRequestError(missing, status=404, param="model")
        return target

    def _check_limits(self, request: ChatRequest) -> None:
        if request.choices > self._limits.choices:
            raise PolicyRequestError(
                f"the request has {request.choices} responses; expected at most {self._limits.choices}",
                param="n",
            )
        if len(request.messages) > self._limits.messages:
            raise PolicyRequestError(
                f"{request.input_field} has {len(request.messages)} messages; expected at most {self._limits.messages}",
                param=request.input_field,
            )

    async def _sample(self, dialect: Dialect, incoming: IncomingRequest, request: ChatRequest, model: str) -> Response:
        """Render the prompt, sample each response from the backend, and record it."""
        spans = [CallSpan(incoming.address, request, model, i) for i in range(request.choices)]
        incoming.spans += spans
        chat = self._chats[model]
        render = partial(_render, chat, incoming, request)
        prompts = await asyncio.to_thread(render) if incoming.size > _LARGE else render()
        trained = incoming.session.routing.trains(incoming.address.agent)
        jobs = [
            SamplingJob(incoming.session, incoming.address, request, model, chat, prompt, seeded(params, i))
            for prompt in prompts
            for params in (self._sampler.params(incoming.session, request, chat, prompt, trained=trained),)
            for i in range(request.n)
        ]
        context = ResponseContext(
            request=request,
            call=spans[0].id,
            model=model,
            prompts=[prompt.ids for prompt in prompts],
            decode=chat.text,
        )
        if request.stream:
            return EventStream(self._sampler.stream(jobs, spans, dialect.stream_writer(context)))
        return JSONResponse(dialect.write_response(context, await self._sampler.respond_to_all(jobs, spans)))


def _render(chat: Chat, incoming: IncomingRequest, request: ChatRequest) -> list[RenderedPrompt]:
    if request.prompts:
        return [chat.plain(prompt) for prompt in request.prompts]
    instruction = request.requirements.instruction()
    return [chat.render(request.messages, request.tools, incoming.session.memory, instruction=instruction)]
