"""Requests about a model call that sample nothing: counting the tokens of a prompt, and compaction.

They are answered by the model that would answer the call, and recorded as events. Nothing is sampled, so nothing is trained.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from starlette.responses import JSONResponse, Response

from lightning_core.chat.json_text import show_json
from lightning_core.dialects import anthropic_messages as messages
from lightning_core.dialects import gemini
from lightning_core.dialects import openai_responses as responses
from lightning_core.dialects.dialect import Dialect
from lightning_core.endpoint.forwarding.forward import Forwarder
from lightning_core.endpoint.forwarding.upstream import Remote
from lightning_core.endpoint.record import AuxiliarySpan
from lightning_core.endpoint.request import IncomingRequest
from lightning_core.endpoint.respond import Responder
from lightning_core.errors import PolicyRequestError, UpstreamRefusal
from lightning_core.trace import COUNT

COMPACT = "/responses/compact"
_COMPACT = "compact"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCount:
    """The token count of a wire format."""

    dialect: Dialect
    path: str
    to_request: Callable[[Mapping[str, Any]], Mapping[str, Any]]
    """The model call whose prompt is counted."""
    to_response: Callable[[int], Mapping[str, Any]]


def _generate_content(body: Mapping[str, Any]) -> Mapping[str, Any]:
    inner = body.get("generateContentRequest", body.get("generate_content_request"))
    if inner is None:
        return body
    if not isinstance(inner, Mapping):
        raise PolicyRequestError(f"generateContentRequest is {show_json(inner)}; expected an object", param="contents")
    return {**inner, **{name: body[name] for name in gemini.FROM_URL if name in body}}


GEMINI = TokenCount(
    dialect=gemini, path=gemini.PATH, to_request=_generate_content, to_response=lambda tokens: {"totalTokens": tokens}
)
COUNTS = (
    TokenCount(
        dialect=responses,
        path="/responses/input_tokens",
        to_request=lambda body: body,
        to_response=lambda tokens: {"object": "response.input_tokens", "input_tokens": tokens},
    ),
    TokenCount(
        dialect=messages,
        path="/messages/count_tokens",
        to_request=lambda body: {"max_tokens": 1, **body},
        to_response=lambda tokens: {"input_tokens": tokens},
    ),
)
"""The formats with the model in the body. `GEMINI` has it in the URL."""


async def count_tokens(
    responder: Responder, forwarder: Forwarder, count: TokenCount, incoming: IncomingRequest
) -> Response:
    """The number of tokens of a prompt, for the model that would answer it."""
    body: Any = count.to_request(incoming.body) if isinstance(incoming.body, Mapping) else incoming.body
    call = replace(incoming, body=body)
    model, request, _ = await responder.read(count.dialect, call, count.path)
    incoming.address = call.address
    if isinstance(model, Remote):
        sent = incoming.body
        if request.upstream_url is not None:
            model = replace(model, url=gemini.url_for_model(model.url, model=request.model, method="countTokens"))
            if request.prompt is not None:  # only a whole model call has a system prompt
                inner = {name: value for name, value in call.body.items() if name not in gemini.FROM_URL}
                sent = {"generateContentRequest": {**inner, "model": f"models/{request.model}"}}
            sent = {name: value for name, value in sent.items() if name not in gemini.FROM_URL}
            return await _forward(forwarder, incoming, COUNT, request.model, model, sent)
        prompts = incoming.session.routing.prompts
        sent, _ = prompts.insert(incoming.address.agent, count.dialect.PATH, sent)
        return await _forward(forwarder, incoming, COUNT, request.model, model, {**sent, "model": request.model})
    span = AuxiliarySpan(incoming.address, COUNT, request.model, model)
    incoming.spans.append(span)
    prompts = await call.off_loop(lambda: responder.render(call, request, model))
    tokens = sum(len(prompt.ids) for prompt in prompts)
    span.counted(model, tokens)
    span.end()
    return JSONResponse(count.to_response(tokens))


async def compact(responder: Responder, forwarder: Forwarder, incoming: IncomingRequest) -> Response:
    """Forward a request for compaction; models here have no compacted items."""
    # Without the prompt of the agent, which its later calls get again.
    body: Any = incoming.body
    model, request, _ = await responder.read(responses, incoming, COMPACT)
    if isinstance(model, Remote):
        sent = {**body, "model": request.model}
        return await _forward(forwarder, incoming, _COMPACT, request.model, model, sent)
    raise PolicyRequestError(
        f"{model!r} cannot compact a conversation, because a compacted item is text that only its provider can read. Send the whole "
        "conversation to /v1/responses, or previous_response_id; to shorten it, drop or summarize items in the agent",
        status=404,
    )


async def _forward(
    forwarder: Forwarder, incoming: IncomingRequest, operation: str, model: str, remote: Remote, body: Mapping[str, Any]
) -> Response:
    """The response of ``remote``, unchanged. Its HTTP errors, such as an unknown path, are not infrastructure failures."""
    span = AuxiliarySpan(incoming.address, operation, model, model)
    incoming.spans.append(span)
    try:
        data, response = await forwarder.complete(incoming, remote, body)
    except UpstreamRefusal as error:
        if error.status >= 500:
            raise
        span.abandon(error)
        return Response(error.body, error.status, error.headers)
    usage = response.get("usage")
    known = usage if isinstance(usage, Mapping) else response
    span.counted(response.get("model"), known.get("input_tokens", known.get("totalTokens")), known.get("output_tokens"))
    span.end()
    return Response(data, media_type="application/json")
