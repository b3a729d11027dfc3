"""How requests end that have no response: refused, with an error in the format of their client, or as failures of their rollout."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from lightning_core.capture import find_rollout
from lightning_core.capture.address import Address
from lightning_core.chat.json_text import show_json
from lightning_core.dialects.dialect import Dialect
from lightning_core.endpoint.record import RefusedSpan
from lightning_core.endpoint.sessions import UNKNOWN_KEY, RequestKey, Session, Sessions
from lightning_core.errors import (
    COUNTED,
    HostedToolError,
    OverloadError,
    PolicyRequestError,
    UpstreamRefusal,
    UpstreamStreamError,
    describe,
)
from lightning_core.propagation.providers import GOOGLE_KEY

logger = logging.getLogger(__name__)

_CAUSE_CHARACTERS = 100
"""Failures that begin with the same text have one cause."""

_NAME_IT = (
    "give the calls a name: mark the function that makes them with @trainable('NAME'), or add a rule under agents.named"
)
"""The first step for calls without a name, which the configuration cannot select."""

_NEVER_RECOVERED = b"another key"
"""The digest in the key of failures that no later request can be a retry of: the same client fails again."""

_PARAM_CHARACTERS = 2000
"""Most characters of the path of a field, which may be as long as the body."""


def credentials(request: Request) -> Mapping[str, str]:
    """The headers of ``request``. A key in its query, as Google's clients may send it, is in ``x-goog-api-key``."""
    key = request.query_params.get("key") if request.scope["query_string"] else None
    return request.headers if key is None else {GOOGLE_KEY: key, **request.headers}


def record_refusal(
    session: Session, address: Address, operation: str, path: str, body: Any, error: PolicyRequestError | OverloadError
) -> None:
    """Record a request that is refused before it opens a span. A closed rollout has no more spans."""
    if not session.closed:
        RefusedSpan(address, operation, path, body, error)


def advise_base(agent: str | None) -> str:
    """The advice to answer the calls of ``agent``, which is not trained, with the base model of the run."""
    if agent is None:
        how = f"{_NAME_IT}. Then set the model of NAME to 'base' under agents.frozen, or train NAME"
    else:
        how = "set the agent's model to 'base' under agents.frozen, or train the agent"
    return f"To answer these calls with the base model of the run, {how}."


def unserved_model(
    dialect: Dialect, session: Session, agent: str | None, requested: str, models: Sequence[str], *, forwards: bool
) -> PolicyRequestError:
    """The refusal of a request for a model that no known server has.

    ``models``: those served here. ``forwards``: whether requests are forwarded to the agents' providers.
    """
    served = f"the models are {list(models)!r}"
    is_missing = not requested and "model" in dialect.FIELDS.supported
    text = f"model {show_json(requested)} is not served here; {served}"
    if is_missing:
        text = f"model is missing; expected the name of a model: {served}"
    if forwards and requested and requested == session.routing.stand_in:
        text = f"eval.model is {requested!r}, but the request names no provider that has it; set policy.upstream to the provider's server"
    elif forwards and agent is None:
        text = f"an agent without a name is not trained, and {text}. Set policy.upstream, or {_NAME_IT}. Then train NAME, or set its model "
        text += "under agents.frozen"
    elif forwards:
        text = f"agent {agent!r} is not trained, and {text}. Train the agent, set its model under agents.frozen, or set policy.upstream"
    return PolicyRequestError(text, status=400 if is_missing else 404, param="model")


def refuse_unknown_key(request: Request, sessions: Sessions, operation: str) -> PolicyRequestError:
    """The refusal of a request without a valid key. It is a failure of the live rollout that its other headers name, if they do."""
    named = Address.from_headers(request.headers)
    session = None if named is None else sessions.of_rollout(named.rollout)
    if session is None:
        if (times := sessions.logged.count(UNKNOWN_KEY)) is not None:
            logger.warning(
                "a request to %s was refused%s: %s. It may be of a rollout that has ended, or of a client that sends its own key",
                request.url.path,
                times,
                UNKNOWN_KEY,
                extra=COUNTED,
            )
        return PolicyRequestError(UNKNOWN_KEY, status=401)
    error = PolicyRequestError(
        f"{UNKNOWN_KEY}. The request is of a live rollout, but has another key: a hook, an adapter or a proxy of the agent's client sets "
        "its own Authorization header, or a worker kept the key of an earlier rollout",
        status=401,
    )
    address = address_of(request.headers, session)
    record_refusal(session, address, operation, request.url.path, None, error)
    count_failure(session, (address.agent, request.url.path, _NEVER_RECOVERED), error)
    return error


def address_of(headers: Mapping[str, str], session: Session) -> Address:
    """The address in the headers, limited to the rollout of the key."""
    address = Address.from_headers(headers)
    if address is not None and address.rollout == session.root.rollout:
        return address
    # A separate process knows its key and perhaps its agent, but not its span; its traceparent may belong to other tracing.
    root = session.root.to_headers()
    address = Address.from_headers({**root, **headers, "traceparent": root["traceparent"]})
    assert address is not None
    return address


def error_response(dialect: Dialect, error: PolicyRequestError) -> Response:
    """``error`` as clients of ``dialect`` expect it."""
    message, param = str(error), None if error.param is None else error.param[:_PARAM_CHARACTERS]
    headers: dict[str, str] = {}
    if error.status == 429:
        headers["retry-after"] = "1"
    if error.status == 408:
        headers["connection"] = "close"  # the rest of the body may still arrive
    return JSONResponse(dialect.error_body(message, status=error.status, param=param), error.status, headers)


def count_failure(session: Session, key: RequestKey, error: Exception) -> None:
    """Count an infrastructure failure of the rollout of ``session``."""
    detail = describe(error)
    if (times := session.logged.count((key[0], detail[:_CAUSE_CHARACTERS]))) is not None:
        agent = "an agent without a name" if key[0] is None else f"agent {key[0]!r}"
        logger.warning("a model call of %s failed%s: %s", agent, times, detail, extra=COUNTED)
    run = find_rollout(session.root.rollout)
    if run is not None:
        permanent = isinstance(error, HostedToolError) or (isinstance(error, UpstreamRefusal) and error.is_permanent)
        run.count_infrastructure_failure(detail, kind=status_of(error), permanent=permanent)
        session.failed.setdefault(key, []).append(detail)
        session.failures += 1


def status_of(error: Exception) -> str | None:
    """The status of a rollout that ends because of ``error``, if it has its own; see `outcome`."""
    if isinstance(error, UpstreamStreamError):
        return "stream_error"
    return {401: "unauthorized", 408: "late"}.get(error.status) if isinstance(error, PolicyRequestError) else None
