"""Recorded responses of one or several models, found by the conversation in a request."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from heapq import heappush, heapreplace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from lightning_core import trace as tr
from lightning_core.chat.history.message_key import call_key, other_parts, plain_text
from lightning_core.chat.messages import Message
from lightning_core.errors import ConfigError, RecordError, plural
from lightning_core.propagation.providers import is_listed
from lightning_core.records.report import read_summary
from lightning_core.tools.runs.sources import is_run, list_counts, path_and_phase, read_recorded
from lightning_core.trace import SpanRecord, span_to_call

_MOST_LISTED = 5
_REFUSED = re.compile(
    r"(?:HTTP|UpstreamRefusal: \S+ returned status) (?P<status>400|413|422)\b:? ?(?P<body>.*)", re.DOTALL
)
"""The error of a call, as a recording and as a run have it."""


@dataclass(slots=True, eq=False)
class RecordedResponse:
    """The response of a model to a request, as it was recorded."""

    model: str
    """The model that answered, by the server's name for it."""
    message: Message
    finish_reason: str | None
    input_tokens: int | None
    """None if the server did not report it."""
    output_tokens: int | None
    cached_tokens: int
    seconds: float
    """From the request to the end of the response."""
    trace: str
    """The id of its trace."""
    refusal: tuple[int, str] | None = None
    """The HTTP status and the message of the error with which the provider refused the request; None for a response."""
    uses: int = 0
    """How often it has answered a request."""


class _EqualRequests:
    """The responses to equal requests, of which the least used one is next, in the order in which they were added."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, RecordedResponse]] = []
        self._by_trace: dict[str, list[RecordedResponse]] = {}

    def add(self, response: RecordedResponse) -> None:
        heappush(self._heap, (response.uses, len(self._heap), response))
        self._by_trace.setdefault(response.trace, []).append(response)

    def next(self, rollout: _AskingRollout) -> RecordedResponse:
        """The next one of the trace of ``rollout`` that it has not got, else the next one of all."""
        own = self._by_trace.get(rollout.trace or "", ())
        response = next((one for one in own if one not in rollout.given), None) or self._least_used()
        response.uses += 1
        rollout.trace = rollout.trace or response.trace
        rollout.given.add(response)
        return response

    def _least_used(self) -> RecordedResponse:
        uses, number, response = self._heap[0]
        while uses != response.uses:  # it was used since
            heapreplace(self._heap, (response.uses, number, response))
            uses, number, response = self._heap[0]
        return response


@dataclass(slots=True)
class _AskingRollout:
    """A rollout that gets recorded responses."""

    trace: str | None = None
    """The trace of the first of them."""
    given: set[RecordedResponse] = field(default_factory=set[RecordedResponse])


class ResponsePool:
    """The responses by model and conversation, with refusals of requests, which agents may handle. Those to equal requests take turns.

    A rollout that got a response of a trace gets the others of the same trace before those of other traces. A model has the name that was
    requested and the one that the server returned. Tools and settings of requests are not compared.
    """

    def __init__(self) -> None:
        self.models: Counter[str] = Counter()
        """Number of responses by each name of a model."""
        self.hosts: set[str] = set()
        """The hosts that answered."""
        self.uncounted = 0
        """Number of answers that reported 0 tokens because none are recorded, in a format that has no response without counts."""
        self.left_out: Counter[str] = Counter()
        """Number of rollouts that were not read, by reason."""
        self.longest_seconds = 0.0
        """The longest time of a response."""
        self._by_request: dict[tuple[str, bytes], _EqualRequests] = {}
        self._rollouts: dict[str, _AskingRollout] = {}
        self._responses: list[RecordedResponse] = []
        self._spans: set[tuple[str, str]] = set()

    def __len__(self) -> int:
        return len(self._responses)

    def add(self, spans: Iterable[SpanRecord]) -> None:
        """Add the answered calls of a trace among ``spans``. A span that was added before is left out."""
        answered = [span for span in spans if _is_answered(span) and (span.trace_id, span.span_id) not in self._spans]
        for span in sorted(answered, key=lambda span: (span.start_ns, int(span.attributes.get(tr.SEQUENCE, 0)))):
            self._spans.add((span.trace_id, span.span_id))
            self._add(span)

    def _add(self, span: SpanRecord) -> None:
        call = span_to_call(span)
        read, written, cached = (
            value if isinstance(value := span.attributes.get(name), int) else None
            for name in (tr.INPUT_TOKENS, tr.OUTPUT_TOKENS, tr.CACHED_TOKENS)
        )
        response = RecordedResponse(
            trace=span.trace_id,
            refusal=_read_refusal(span.error),
            model=call.model,
            message=call.response or {},
            finish_reason=call.finish_reason,
            input_tokens=read,
            output_tokens=written,
            cached_tokens=cached or 0,
            seconds=max(span.end_ns - span.start_ns, 0) / 1e9,
        )
        self._responses.append(response)
        self.longest_seconds = max(self.longest_seconds, response.seconds)
        if call.target is not None:
            self.hosts.add(call.target[0])
        key = conversation_key(call.messages)
        for name in {str(span.attributes.get(tr.REQUEST_MODEL) or ""), response.model} - {""}:
            self.models[name] += 1
            self._by_request.setdefault((name, key), _EqualRequests()).add(response)

    def take(self, model: str, conversations: Sequence[bytes], rollout: str | None) -> list[RecordedResponse] | None:
        """A response of ``model`` to each of ``conversations``, by their `conversation_key`; None if one has none.

        ``rollout``: the id of the rollout that asks; None if it is not known.
        """
        asking = _AskingRollout() if rollout is None else self._rollouts.setdefault(rollout, _AskingRollout())
        keys = [(model, key) for key in conversations]
        return (
            [self._by_request[key].next(asking) for key in keys]
            if all(map(self._by_request.__contains__, keys))
            else None
        )

    def describe_use(self) -> list[str]:
        """Lines about the answers so far: how many there were, which were repeated, and whose tokens are not known."""
        uses = [response.uses for response in self._responses if response.uses]
        lines = [f"answered from {plural(len(uses), 'recorded response')}, of {len(self)}"]
        if self.left_out:
            lines.append(f"not read: {list_counts(self.left_out)}")
        if repeated := sum(uses) - len(uses):
            lines.append(
                f"{plural(repeated, 'answer')} repeated an earlier one, since equal requests were recorded less often: rollouts with "
                "repeated answers are not independent"
            )
        if untimed := sum(r.uses for r in self._responses if not r.seconds):
            lines.append(
                f"{plural(untimed, 'answer')} without a recorded time: the time of these calls is not that of the provider"
            )
        if self.uncounted:
            lines.append(
                f"{plural(self.uncounted, 'answer')} counted as 0 tokens, since none are recorded: the sums lack theirs"
            )
        return lines


def read_responses(sources: Sequence[str], *, model: str, ignore_hosts: Sequence[str] = ()) -> ResponsePool:
    """The answered calls in ``sources``: files of traces, folders of such files, and runs' folders, also as ``FOLDER:PHASE``.

    ``ignore_hosts``: see the configuration. Raises `ConfigError` for a source that cannot be read, if none is of ``model``, if one was
    itself answered by recorded responses, and if requests to a recorded host would go there.
    """
    found = ResponsePool()
    traces = 0
    for source in sources:
        path, phase = path_and_phase(source)
        _check_original(path)
        for read in read_recorded(path, phase, _take_all, found.left_out):
            found.add(read.spans)
            traces += 1
    listed = ", ".join(map(repr, sources))
    if not len(found):
        raise ConfigError(f"no answered model calls are recorded in {listed} ({plural(traces, 'trace')})")
    if not found.models[model]:
        models = ", ".join(f"{name} ({number})" for name, number in found.models.most_common(_MOST_LISTED))
        more = len(found.models) - _MOST_LISTED
        raise ConfigError(
            f"no response of {model!r} is recorded in {listed}; the models there are {models}{f' and {more} more' if more > 0 else ''}: "
            "choose one with --model"
        )
    if asked := sorted(host for host in found.hosts if is_listed(urlsplit(f"//{host}"), ignore_hosts)):
        raise ConfigError(
            f"rollouts.ignore_hosts lists {', '.join(asked)}, which answered in {listed}: requests to it would go there, not to the "
            "record. Remove it from the list"
        )
    return found


def conversation_key(messages: Sequence[Mapping[str, Any]]) -> bytes:
    """A digest of ``messages`` that is the same for all ways in which clients write them.

    Ids of tool calls count by the position of the call: some servers give none, and clients make their own. Successive messages of the
    assistant count as one: the Responses API divides them in requests in another way than in responses.
    """
    positions: dict[str, int] = {}
    number = 0
    turns: list[dict[str, Any]] = []
    for message in messages:
        calls: list[Any] = []
        for call in message.get("tool_calls") or ():
            positions[str(call.get("id"))] = number
            number += 1
            calls.append(call_key(call))
        answered = message.get("tool_call_id")
        turn = {
            "role": message.get("role"),
            "name": message.get("name"),
            "text": plain_text(message),
            "parts": other_parts(message),
            "calls": calls,
            "answers": None if answered is None else positions.get(str(answered), -1),
        }
        if turns and turn["role"] == turns[-1]["role"] == "assistant":
            turns[-1] |= {name: turns[-1][name] + turn[name] for name in ("text", "parts", "calls")}
        else:
            turns.append(turn)
    return blake2b(
        json.dumps(turns, sort_keys=True, default=repr).encode(errors="backslashreplace"), digest_size=16
    ).digest()


def _is_answered(span: SpanRecord) -> bool:
    """Whether the provider answered the call, or refused the request."""
    attributes = span.attributes
    if attributes.get(tr.OPERATION) != "chat" or tr.REPLAYS in attributes:
        return False
    return bool(attributes.get(tr.OUTPUT_MESSAGES)) if span.error is None else _read_refusal(span.error) is not None


def _read_refusal(error: str | None) -> tuple[int, str] | None:
    """The status and the message of an error by the request itself. Others pass, and agents repeat the request."""
    match = None if error is None else _REFUSED.match(error)
    if match is None:
        return None
    text = match["body"]
    with suppress(ValueError, TypeError, KeyError):
        text = json.loads(text)["error"]["message"]
    return int(match["status"]), str(text)


def _check_original(path: Path) -> None:
    """Raise `ConfigError` for a run that was itself answered by recorded responses, which may repeat each other."""
    summary = path / "summary.json"
    if not is_run(path) or not summary.is_file():
        return
    try:
        evaluation = read_summary(summary).evaluation
    except RecordError as error:
        raise ConfigError(str(error)) from None
    if evaluation is not None and evaluation.recorded_in:
        raise ConfigError(
            f"the run {str(path)!r} was answered by recorded responses: pass their source, {', '.join(evaluation.recorded_in)}"
        )


def _take_all(reward: float | None, failed: bool) -> None:
    del reward, failed
