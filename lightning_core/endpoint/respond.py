"""Routes a model call, then forwards it or samples and records its responses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from starlette.responses import JSONResponse, Response

from lightning_core.backends.backend import Backend
from lightning_core.chat.chat import Chat, RenderedPrompt
from lightning_core.chat.token_bytes import token_bytes
from lightning_core.content.shared_content import KeptText
from lightning_core.dialects.dialect import Dialect
from lightning_core.dialects.exchange import ChatRequest, ResponseContext, model_name
from lightning_core.dialects.fields import collect_notes
from lightning_core.endpoint.agents.known_agents import Decision, KnownAgents
from lightning_core.endpoint.agents.roles import RoleOfCall
from lightning_core.endpoint.agents.routing import DEFAULT_AGENT
from lightning_core.endpoint.forwarding.forward import Forwarder, answer_recorded
from lightning_core.endpoint.forwarding.upstream import Remote
from lightning_core.endpoint.prompts import note_unknown_variables, render_prompts, warn_of_hosted_tools
from lightning_core.endpoint.record import CallSpan
from lightning_core.endpoint.refusals import advise_base, unserved_model
from lightning_core.endpoint.request import IncomingRequest
from lightning_core.endpoint.sample import Sampler, SamplingJob, seeded
from lightning_core.endpoint.sessions import Session
from lightning_core.endpoint.transport.event_stream import EventStream
from lightning_core.endpoint.transport.large_work import BYTES_OF_TOKEN
from lightning_core.endpoint.transport.limits import Limits
from lightning_core.trace import POLICY


class Responder:
    """Responds from ``backend``, in the chat format of the model, or forwards the request."""

    def __init__(
        self,
        backend: Backend,
        chats: Mapping[str, Chat],
        forwarder: Forwarder,
        known_agents: KnownAgents,
        limits: Limits,
    ) -> None:
        self._backend = backend
        self._chats = chats
        self._sampler = Sampler(backend)
        self._forwarder = forwarder
        self._known_agents = known_agents
        self._limits = limits

    async def respond(self, dialect: Dialect, incoming: IncomingRequest) -> Response:
        """The response to ``incoming``.

        Raises `PolicyRequestError` for requests that are not supported, and the errors of the backend and the upstream server.
        """
        sent = incoming.body
        model, request, decision = await self.read(dialect, incoming, dialect.PATH)
        incoming.open_call()
        if decision.unnamed:
            shown = await incoming.off_loop(partial(RoleOfCall, sent))
            incoming.session.roles[decision.address.agent or DEFAULT_AGENT].add(shown)
        trained = decision.policy is not None
        if isinstance(model, Remote):
            recorded = answer_recorded(dialect, incoming, request, model)
            return recorded or await self._forwarder.forward(dialect, incoming, request, model, trained=trained)
        return await self._sample(dialect, incoming, request, model, trained=trained)

    async def _decide(self, incoming: IncomingRequest, requested: str) -> Decision:
        """The agent of the call. An auxiliary call of a trained agent gets its own name, and is not trained on."""
        routing = incoming.session.routing
        names, rules = [], []
        if routing.named or routing.auxiliary:  # else there is nothing that another thread could do
            names, rules = await incoming.off_loop(partial(routing.rules_for, incoming.body))
        models, policies = self._backend.models, {POLICY, *incoming.session.routing.policies.values()}
        decision = self._known_agents.decide(
            incoming.session,
            incoming.address,
            incoming.body,
            names,
            names_served_model=requested in models and requested not in policies,
        )
        rule = next((rule.name for rule in rules if rule.is_of(decision.address.agent)), None)
        if rule is None or decision.policy is None:
            return decision
        address = replace(decision.address, agent=f"{decision.address.agent}/{rule}", mark=None)
        return replace(decision, address=address, policy=None, here=decision.policy, unnamed=False)

    async def read(
        self, dialect: Dialect, incoming: IncomingRequest, path: str
    ) -> tuple[str | Remote, ChatRequest, Decision]:
        """The model that answers ``incoming``, which gets the prompt of its agent, and the agent. ``path``: of an upstream server."""
        requested, routing = model_name(incoming.body), incoming.session.routing
        decision = await self._decide(incoming, requested)
        incoming.address, agent = decision.address, decision.address.agent
        incoming.body, prompt = routing.prompts.insert(agent, dialect.PATH, incoming.body)
        # A model under agents.frozen, or eval.model, replaces the requested one.
        model_requested = decision.stand_in or routing.frozen_model(agent) or requested
        # A server may have a default model for requests without one.
        body = {**incoming.body, "model": model_requested} if model_requested else incoming.body
        here = None if decision.stand_in else decision.policy or decision.here
        model = here or self._route(dialect, incoming, model_requested, path)
        if isinstance(model, Remote) and not decision.stand_in:
            model = replace(model, advice=advise_base(agent))
        parse = partial(self._parse, dialect, body, incoming.session, None if isinstance(model, Remote) else model)
        return model, replace(await incoming.off_loop(parse), prompt=prompt), decision

    def _parse(self, dialect: Dialect, body: Mapping[str, Any], session: Session, model: str | None) -> ChatRequest:
        """The request in ``body``. ``model``: that answers it here."""
        read = dialect.read_request if model is None else dialect.parse_request
        with collect_notes() as notes:
            request = replace(read(body, conversations=session.conversations), notes=notes)
            if model is not None:
                note_unknown_variables(self._chats[model], request)
        self._limits.check(request)
        return request

    def _route(self, dialect: Dialect, incoming: IncomingRequest, requested: str, path: str) -> str | Remote:
        if requested in self._backend.models:
            return requested
        remote = self._forwarder.remote(
            incoming.headers, path, key_header=dialect.KEY_HEADER, forwarded_headers=dialect.FORWARDED_HEADERS
        )
        if remote is None:
            models, forwards = self._backend.models, self._forwarder.to_origins
            raise unserved_model(
                dialect, incoming.session, incoming.address.agent, requested, models, forwards=forwards
            )
        return remote

    def render(
        self, incoming: IncomingRequest, request: ChatRequest, model: str, kept: Sequence[KeptText] | None = None
    ) -> list[RenderedPrompt]:
        """The prompts of ``request`` for ``model``. ``kept``: see `Chat.render`."""
        return render_prompts(self._chats[model], request, incoming.session, incoming.address.agent, kept)

    async def _sample(
        self, dialect: Dialect, incoming: IncomingRequest, request: ChatRequest, model: str, *, trained: bool
    ) -> Response:
        """Render the prompt, sample each response from the backend, and record it."""
        warn_of_hosted_tools(incoming.session, incoming.address.agent, request)
        prepare = partial(self._prepare, incoming, request, model, trained=trained)
        chat, compiles = self._chats[model], request.requirements.constrain
        spans, prompts, jobs = await incoming.off_loop(prepare, compiles=compiles)
        context = ResponseContext(
            request=request,
            call=spans[0].id,
            model=model,
            prompts=[prompt.ids for prompt in prompts],
            bytes_of=partial(token_bytes, chat),
            answered=partial(chat.answered, thinking=prompts[0].thinking),
        )
        if request.stream:
            return EventStream(self._sampler.stream(jobs, spans, dialect.stream_writer(context)))
        choices = await self._sampler.respond_to_all(jobs, spans)
        size = sum(len(choice.token_ids) for choice in choices) * BYTES_OF_TOKEN
        return await incoming.off_loop(lambda: JSONResponse(dialect.write_response(context, choices)), size=size)

    def _prepare(
        self, incoming: IncomingRequest, request: ChatRequest, model: str, *, trained: bool
    ) -> tuple[list[CallSpan], list[RenderedPrompt], list[SamplingJob]]:
        """The spans, prompts and jobs of the responses to ``request``."""
        spans = [CallSpan(incoming.address, request, model, i, trained=trained) for i in range(request.choices)]
        incoming.spans += spans
        # The span has the messages already: a long conversation is read and hashed once.
        kept = spans[0].content.kept(spans[0].references)
        chat, prompts = self._chats[model], self.render(incoming, request, model, kept)
        return (
            spans,
            prompts,
            [
                SamplingJob(incoming.session, incoming.address, request, model, chat, prompt, seeded(params, i))
                for prompt in prompts
                for params in (self._sampler.params(incoming.session, request, chat, prompt, trained=trained),)
                for i in range(request.n)
            ],
        )
