"""``POST /v1/lightning/records``: what child processes of an agent record, added to the trace of their rollout.

The sender is `propagation.children.sender`, which signs each request: a program that only has the key of a rollout cannot give itself
a reward. Calls are not accepted, because the endpoint records them itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from lightning_core import trace as tr
from lightning_core.capture import ActiveRollout, find_rollout
from lightning_core.capture.signatures import SIGNATURE, is_record_signed
from lightning_core.capture.spans import deliver, export
from lightning_core.dialects import openai_chat as chat_completions
from lightning_core.endpoint.otlp_receiver import MAX_SPANS
from lightning_core.endpoint.refusals import error_response
from lightning_core.endpoint.sessions import UNKNOWN_KEY, Session, Sessions
from lightning_core.endpoint.transport.limits import Limits
from lightning_core.endpoint.transport.receive import read_body, read_json
from lightning_core.errors import PolicyRequestError
from lightning_core.propagation.children.sender import PATH as RELATIVE_PATH
from lightning_core.trace import SpanRecord

PATH = f"/v1{RELATIVE_PATH}"

_CALLS = ("chat", "embeddings", tr.COUNT, tr.ELSEWHERE)
"""Operations of spans that the endpoint and the rollout's own process write."""
_OPTIONAL_TEXTS = (tr.AGENT, tr.TOOL, tr.NODE, tr.REWARD_CALL, tr.REWARD_AGENT, tr.REWARD_NAME)
_OWN = frozenset({tr.TASK_ID, tr.TASK, tr.DECLARED_AGENTS, tr.REFUSED})
"""Attributes of the root span and of calls."""

_ENDED = "the rollout has ended"

_Id = Annotated[str, Field(pattern="^[0-9a-f]{16}$")]
_Text = Annotated[str, Field(max_length=100_000)]
_Times = Annotated[int, Field(ge=1, lt=1 << 63)]
_Time = Annotated[int, Field(ge=0, lt=1 << 63)]


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")


class ChildSpan(_Strict):
    """A finished span of a child process; see `trace.SpanRecord`."""

    name: _Text
    trace_id: str
    span_id: _Id
    parent_id: _Id
    start_ns: _Time
    end_ns: _Time
    attributes: dict[str, Any]
    error: _Text | None = None

    @model_validator(mode="after")
    def _check_attributes(self) -> ChildSpan:
        a = self.attributes
        operation = a.get(tr.OPERATION, "")
        if not isinstance(operation, str) or operation in _CALLS:
            raise ValueError(f"a child process records no spans of operation {operation!r:.80}")
        if extra := sorted(_OWN & a.keys()):
            raise ValueError(f"a child process records no spans with {extra!r}")
        if wrong := [name for name in _OPTIONAL_TEXTS if not isinstance(a.get(name, ""), str)]:
            raise ValueError(f"expected texts in {wrong!r}")
        if operation == "reward":
            value = a.get(tr.REWARD_VALUE)
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise ValueError(f"expected a finite number as the reward, found {value!r:.80}")
        return self


class ChildRecord(_Strict):
    """One record: exactly one of its fields is set."""

    span: ChildSpan | None = None
    count: tuple[_Text, _Text | None, _Times] | None = None
    """The kind of record that is missing, the detail, and the number of times."""
    infrastructure: tuple[_Text, bool, _Times] | None = None
    """The failure, whether another attempt cannot avoid it, and how often."""
    declared: Annotated[list[_Text], Field(max_length=1000)] | None = None
    elsewhere: tuple[_Text | None, _Text, _Text, _Times] | None = None
    """The agent, the host, the reason, and the number of requests."""
    origin: tuple[_Text, dict[str, str]] | None = None
    """See `ActiveRollout.add_origin`."""

    # After: once Python code has seen the data, strict validation no longer accepts JSON's arrays as tuples.
    @model_validator(mode="after")
    def _check_fields(self) -> ChildRecord:
        if len(self.model_fields_set) != 1 or any(getattr(self, name) is None for name in self.model_fields_set):
            raise ValueError(f"expected one of {sorted(ChildRecord.model_fields)!r}")
        return self


class ChildRecords:
    """Receives records while their rollout is open."""

    def __init__(self, sessions: Sessions, limits: Limits) -> None:
        self._sessions = sessions
        self._limits = limits

    async def receive(self, request: Request) -> Response:
        """Add the records of the body, one on each line, to the rollout of the key.

        The response, ``{"refused": [[index, reason], …]}``, lists those that are refused; the others are added.
        """
        try:
            session = self._sessions.find(request.headers)
            run = None if session is None else find_rollout(session.root.rollout)
            if session is None or run is None:
                raise PolicyRequestError(UNKNOWN_KEY, status=401)
            limits = self._limits
            data = await read_body(request, most_bytes=limits.body_bytes, seconds=limits.body_seconds)
            read = partial(_read_all, run, data, request.headers.get(SIGNATURE, ""))
            records = await session.large_work.run(run.rollout, len(data), read)
            return JSONResponse({"refused": _add_all(session, run, records)})
        except PolicyRequestError as error:
            return error_response(chat_completions, error)


def _read_all(run: ActiveRollout, data: bytes, signature: str) -> list[ChildRecord | SpanRecord | PolicyRequestError]:
    """The records in ``data``, one on each line; of those that are refused, why. Changes nothing: it may run on another thread."""
    if not is_record_signed(run.secret, run.rollout, data, signature):
        raise PolicyRequestError(
            "the body has no valid signature: records are accepted from Python processes that Lightning started only. Other "
            "programs can send spans to /v1/traces",
            status=403,
        )
    return [_read(line) for line in data.split(b"\n")]


def _read(line: bytes) -> ChildRecord | SpanRecord | PolicyRequestError:
    try:
        record = _parse(line)
    except PolicyRequestError as error:
        return error
    return record if record.span is None else SpanRecord(**record.span.model_dump())


def _add_all(
    session: Session, run: ActiveRollout, records: Sequence[ChildRecord | SpanRecord | PolicyRequestError]
) -> list[tuple[int, str]]:
    """Add ``records``, on the event loop; return the indices of those that are refused, and why."""
    if session.closed:
        raise PolicyRequestError(UNKNOWN_KEY, status=401)
    session.touch()
    refused: list[tuple[int, str]] = []
    for index, record in enumerate(records):
        try:
            _add(session, run, record)
        except PolicyRequestError as error:
            refused.append((index, str(error)))
    return refused


def _parse(data: bytes) -> ChildRecord:
    read_json(data)  # refuses what pydantic's parser accepts: infinities and lone surrogates
    try:
        return ChildRecord.model_validate_json(data)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise PolicyRequestError(f"not a record of a child process: {where}: {first['msg']}") from None


def _add(session: Session, run: ActiveRollout, record: ChildRecord | SpanRecord | PolicyRequestError) -> None:
    if isinstance(record, PolicyRequestError):
        raise record
    if session.closed:  # by another thread
        raise PolicyRequestError(_ENDED)
    if isinstance(record, SpanRecord):
        _add_span(session, run, record)
    elif record.count is not None:
        what, detail, times = record.count
        run.count(what, detail=detail, times=times)
    elif record.infrastructure is not None:
        failure, permanent, times = record.infrastructure
        run.count_infrastructure_failure(failure, times=times, permanent=permanent)
    elif record.declared is not None:
        run.declare(record.declared)
    elif record.elsewhere is not None:
        agent, host, why, times = record.elsewhere
        run.note_elsewhere(agent, host, why, times=times)
    elif record.origin is not None:
        run.add_origin(*record.origin)


def _add_span(session: Session, run: ActiveRollout, span: SpanRecord) -> None:
    if span.trace_id != run.rollout or span.span_id == session.root.span:
        raise PolicyRequestError(f"span {span.span_id!r} is the root span, or belongs to another rollout")
    if session.child_spans >= MAX_SPANS:
        raise PolicyRequestError(f"the rollout has {MAX_SPANS} spans of child processes, which is the limit")
    if not deliver(span):
        raise PolicyRequestError(_ENDED)
    session.child_spans += 1
    export(span)
