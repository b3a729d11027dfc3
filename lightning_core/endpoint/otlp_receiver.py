"""``POST /v1/traces``: receives OTLP/HTTP from other processes of an agent.

The API key names the rollout of the spans. They are kept until the rollout closes and all its calls are known, and then joined to its trace
(``otel/joining.py``). Later spans are refused, because the trace is complete. Responses follow OTLP.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from importlib import import_module

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from lightning_core.capture import find_rollout
from lightning_core.capture.address import Address
from lightning_core.capture.spans import deliver
from lightning_core.chat.json_text import kind_of
from lightning_core.endpoint.refusals import credentials
from lightning_core.endpoint.sessions import Sessions
from lightning_core.endpoint.transport.large_work import UNKNOWN
from lightning_core.endpoint.transport.limits import Limits
from lightning_core.endpoint.transport.receive import plain_body, read_body, read_json
from lightning_core.errors import MissingExtra, PolicyRequestError
from lightning_core.otel import join_spans, spans_from_otlp, spans_from_protobuf
from lightning_core.trace import OPERATION, SpanRecord

logger = logging.getLogger(__name__)

PATH = "/v1/traces"

MAX_BYTES = 64 << 20
"""Most bytes of one request, uncompressed; the default maximum of OTLP exporters."""
MAX_SPANS = 20_000
"""Most spans of one rollout."""

_PROTOBUF = "application/x-protobuf"
_JSON = "application/json"
_INVALID, _UNAUTHENTICATED = 3, 16  # codes of google.rpc.Status
_UNKNOWN = "unknown API key: expected the key of a live rollout; send spans before the rollout ends"


class OtlpReceiver:
    """Receives spans while their rollout is open. For one rollout, not thread-safe."""

    def __init__(self, sessions: Sessions, limits: Limits) -> None:
        self._sessions = sessions
        self._limits = limits
        self._waiting: dict[str, list[SpanRecord]] = {}

    async def receive(self, request: Request) -> Response:
        """Answer a request with spans of the rollout of its key."""
        session = self._sessions.find(credentials(request))
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if session is None:
            return _failure(kind, 401, _UNAUTHENTICATED, _UNKNOWN)
        rollout = session.root.rollout
        try:
            body = await read_body(request, most_bytes=MAX_BYTES, seconds=self._limits.body_seconds)
            if kind not in _READERS:
                return _failure(kind, 415, _INVALID, f"expected {_PROTOBUF} or {_JSON}, found {kind!r}")
            encoding = request.headers.get("content-encoding", "")
            size = max(len(body), UNKNOWN if encoding else 0)
            spans, refused = await session.large_work.run(rollout, size, partial(_read, kind, body, encoding))
        except PolicyRequestError as error:
            return _failure(kind, error.status, _INVALID, str(error))
        except MissingExtra as error:
            return _failure(kind, 415, _INVALID, f"{error}; or send {_JSON}")
        except ValueError as error:
            return _failure(kind, 400, _INVALID, str(error))
        if session.closed:
            return _failure(kind, 401, _UNAUTHENTICATED, _UNKNOWN)
        waiting = self._waiting.setdefault(rollout, [])
        for span in spans:
            if span.attributes.get(OPERATION) == "reward":
                refused.append(f"span {span.span_id} is a reward; record rewards in the process that runs the rollout")
            elif len(waiting) >= MAX_SPANS:
                refused.append(f"the rollout has {MAX_SPANS} spans from other processes, which is the limit")
            else:
                waiting.append(span)
        if refused:
            logger.warning("%d spans of rollout %s refused; the first: %s", len(refused), rollout, refused[0])
        return _success(kind, refused)

    def take(self, root: Address) -> list[SpanRecord]:
        """The received spans of the rollout, which makes no more calls."""
        return self._waiting.pop(root.rollout, [])


def join_received(root: Address, foreign: Sequence[SpanRecord]) -> None:
    """Join the received spans of a rollout to its trace."""
    run = find_rollout(root.rollout)
    if not foreign or run is None:
        return
    try:
        for span in join_spans(root, run.spans, foreign):
            deliver(span)
    except Exception as error:
        logger.exception("spans from other processes could not be joined to rollout %s", root.rollout)
        run.count("otlp.join", detail=repr(error))


def _read(kind: str, body: bytes, encoding: str) -> tuple[list[SpanRecord], list[str]]:
    """The spans in ``body``, and why others are refused."""
    refused: list[str] = []
    return _READERS[kind](plain_body(body, encoding, most_bytes=MAX_BYTES), refused), refused


def _from_json(body: bytes, refused: list[str]) -> list[SpanRecord]:
    document = read_json(body)
    if not isinstance(document, Mapping):
        raise ValueError(f"expected an object with 'resourceSpans', found {kind_of(document)}")
    return spans_from_otlp(document, refused)


_READERS = {_PROTOBUF: spans_from_protobuf, _JSON: _from_json}


def _success(kind: str, refused: list[str]) -> Response:
    if kind == _JSON:
        partial = {"rejectedSpans": str(len(refused)), "errorMessage": "; ".join(refused[:3])}
        return JSONResponse({"partialSuccess": partial} if refused else {})
    service = import_module("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
    answer = service.ExportTraceServiceResponse()
    if refused:
        answer.partial_success.rejected_spans = len(refused)
        answer.partial_success.error_message = "; ".join(refused[:3])
    return Response(answer.SerializeToString(), media_type=_PROTOBUF)


def _failure(kind: str, status: int, code: int, message: str) -> Response:
    """A ``google.rpc.Status``, in the format of the request."""
    logger.warning("spans refused with status %d: %s", status, message)
    if kind == _PROTOBUF:
        try:
            answer = import_module("google.rpc.status_pb2").Status(code=code, message=message)
            return Response(answer.SerializeToString(), status_code=status, media_type=_PROTOBUF)
        except ModuleNotFoundError:
            pass
    return JSONResponse({"code": code, "message": message}, status_code=status)
