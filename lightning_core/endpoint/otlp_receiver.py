"""``POST /v1/traces``: OTLP/HTTP from an agent's other processes, in protobuf or JSON, plain or gzip.

A rollout's key says which rollout spans belong to. They wait here until it closes, when all its calls are known, and join its trace then
(``otel/joining.py``). Later they are refused: the trace is complete, and trained on. An answer is OTLP's own.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from lightning_core.capture import find_run
from lightning_core.capture.spans import deliver
from lightning_core.endpoint.limits import Limits
from lightning_core.endpoint.receive import read_body, read_json
from lightning_core.errors import MissingExtra, PolicyRequestError
from lightning_core.otel import join_spans, spans_from_otlp, spans_from_protobuf
from lightning_core.trace import OPERATION, Address, SpanRecord

logger = logging.getLogger(__name__)

PATH = "/v1/traces"

MAX_BYTES = 64 << 20
"""Of one request, uncompressed; OTLP exporters send no more by default."""
MAX_SPANS = 20_000
"""Of one rollout."""

_PROTOBUF = "application/x-protobuf"
_JSON = "application/json"
_INVALID, _UNAUTHENTICATED = 3, 16  # codes of google.rpc.Status


class OtlpReceiver:
    """Takes spans in while their rollout is open. All methods are called from one thread at a time for a rollout."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._waiting: dict[str, list[SpanRecord]] = {}

    async def receive(self, request: Request, root: Address | None) -> Response:
        """Answer a request with spans of the rollout ``root``; None where its key opens no rollout."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if root is None:
            text = "unknown API key: spans carry the key of their rollout, and come before it has ended"
            return _failure(kind, 401, _UNAUTHENTICATED, text)
        try:
            body = await read_body(request, most_bytes=MAX_BYTES, seconds=self._limits.body_seconds)
            body = _plain(body, request.headers.get("content-encoding", ""))
            refused: list[str] = []
            if kind == _PROTOBUF:
                spans = spans_from_protobuf(body, refused)
            elif kind == _JSON:
                spans = spans_from_otlp(_document(body), refused)
            else:
                return _failure(kind, 415, _INVALID, f"expected {_PROTOBUF} or {_JSON}, found {kind!r}")
        except PolicyRequestError as error:
            return _failure(kind, error.status, _INVALID, str(error))
        except MissingExtra as error:
            return _failure(kind, 415, _INVALID, f"{error}; or send {_JSON}")
        except ValueError as error:
            return _failure(kind, 400, _INVALID, str(error))
        waiting = self._waiting.setdefault(root.rollout, [])
        for span in spans:
            if span.attributes.get(OPERATION) == "reward":
                refused.append(f"span {span.span_id} is a reward; rewards are given where the rollout runs")
            elif len(waiting) >= MAX_SPANS:
                refused.append(
                    f"the rollout has {MAX_SPANS} spans from other processes, which is the most there can be"
                )
            else:
                waiting.append(span)
        if refused:
            logger.warning("%d spans of rollout %s refused; the first: %s", len(refused), root.rollout, refused[0])
        return _success(kind, refused)

    def close(self, root: Address) -> None:
        """The rollout's calls are all made: join what has come to its trace."""
        theirs = self._waiting.pop(root.rollout, None)
        run = find_run(root.rollout)
        if not theirs or run is None:
            return
        try:
            for span in join_spans(root, run.spans, theirs):
                deliver(span)
        except Exception as error:
            logger.exception("spans from other processes could not be joined to rollout %s", root.rollout)
            run.count("otlp.join", detail=repr(error))


def _plain(body: bytes, encoding: str) -> bytes:
    if encoding in ("", "identity"):
        plain = body
    elif encoding == "gzip":
        inflate = zlib.decompressobj(wbits=31)
        try:
            plain = inflate.decompress(body, MAX_BYTES + 1)
        except zlib.error as error:
            raise ValueError(f"the body is not gzip: {error}") from None
    else:
        raise ValueError(f"expected no content encoding or gzip, found {encoding!r}")
    if len(plain) > MAX_BYTES:
        raise ValueError(f"a request may hold {MAX_BYTES} bytes, found more; send smaller batches")
    return plain


def _document(body: bytes) -> Mapping[str, Any]:
    document = read_json(body)
    if not isinstance(document, Mapping):
        raise ValueError(f"expected an object with 'resourceSpans', found a JSON {type(document).__name__}")
    return document


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
    """A ``google.rpc.Status``, in the form that the request had."""
    logger.warning("spans refused with status %d: %s", status, message)
    if kind == _PROTOBUF:
        try:
            answer = import_module("google.rpc.status_pb2").Status(code=code, message=message)
            return Response(answer.SerializeToString(), status_code=status, media_type=_PROTOBUF)
        except ModuleNotFoundError:
            pass
    return JSONResponse({"code": code, "message": message}, status_code=status)
