"""Recorded responses of one or several models, found by the messages of a request."""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

from lightning_core import trace as tr
from lightning_core.chat.messages import Message
from lightning_core.errors import ConfigError, plural
from lightning_core.tools.runs.sources import path_and_phase, read_recorded
from lightning_core.trace import SpanRecord, span_to_call

_COMPARED = ("role", "content", "name", "tool_call_id")
_MOST_LISTED = 5


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
    uses: int = 0
    """How often it has answered a request."""


class ResponsePool:
    """The responses by model and messages. Each answers as many requests as it must, and the least used one is next.

    Two models have a name in common if one was requested and the other answered. Tools and settings of requests are not compared.
    """

    def __init__(self, calls: Iterable[SpanRecord]) -> None:
        """``calls``: spans of answered calls, in the order in which they answer equal requests."""
        self._by_request: dict[tuple[str, str], deque[RecordedResponse]] = {}
        self.models: Counter[str] = Counter()
        """Number of responses by each name of a model."""
        self.streams_of_0_tokens = 0
        """Number of streamed answers that reported 0 tokens because none are recorded: their format has no stream without counts."""
        self._responses: list[RecordedResponse] = []
        for span in calls:
            response = _read_response(span)
            self._responses.append(response)
            key = _key(span_to_call(span).messages)
            for name in {str(span.attributes.get(tr.REQUEST_MODEL) or ""), response.model} - {""}:
                self.models[name] += 1
                self._by_request.setdefault((name, key), deque()).append(response)

    def __len__(self) -> int:
        return len(self._responses)

    @property
    def longest_seconds(self) -> float:
        """The longest time of a response."""
        return max((response.seconds for response in self._responses), default=0.0)

    def describe_use(self) -> list[str]:
        """Lines about the answers so far: how many there were, which were given again, and whose tokens are not known."""
        uses = [response.uses for response in self._responses if response.uses]
        lines = [f"answered from {plural(len(uses), 'recorded response')}, of {len(self)}"]
        if again := sum(uses) - len(uses):
            lines.append(
                f"{plural(again, 'answer')} repeated an earlier one, since equal requests were recorded less often: rollouts with repeated "
                "answers are not independent"
            )
        if self.streams_of_0_tokens:
            lines.append(
                f"{plural(self.streams_of_0_tokens, 'streamed answer')} counted as 0 tokens, since the record has no counts: the sums lack "
                "theirs"
            )
        return lines

    def take(self, model: str, requests: Sequence[Sequence[Message]]) -> list[RecordedResponse] | None:
        """A response of ``model`` to each of ``requests``, which are lists of messages; None if one has none."""
        found = [self._by_request.get((model, _key(messages))) for messages in requests]
        if None in found:
            return None
        return [_next(responses) for responses in found if responses is not None]


def read_responses(sources: Sequence[str], *, model: str) -> ResponsePool:
    """The answered calls in ``sources``: files of traces, folders of such files, and runs' folders, also as ``FOLDER:PHASE``.

    Calls of the reward function and responses that were themselves recorded ones are left out. Raises `ConfigError` for a source that
    cannot be read, and if none is of ``model``.
    """
    left_out: Counter[str] = Counter()
    traces: dict[str, Sequence[SpanRecord]] = {}
    for source in sources:
        path, phase = path_and_phase(source)
        for read in read_recorded(path, phase, _take_all, left_out):
            traces.setdefault(read.trace.rollout, read.spans)
    found = ResponsePool(span for spans in traces.values() for span in _answered(spans))
    if not len(found):
        listed = ", ".join(map(repr, sources))
        raise ConfigError(f"no answered model calls are recorded in {listed} ({plural(len(traces), 'trace')})")
    _check_model(found, model, sources)
    return found


def _check_model(recorded: ResponsePool, model: str, sources: Sequence[str]) -> None:
    if recorded.models[model]:
        return
    listed = ", ".join(f"{name} ({number})" for name, number in recorded.models.most_common(_MOST_LISTED))
    more = len(recorded.models) - _MOST_LISTED
    raise ConfigError(
        f"no response of {model!r} is recorded in {', '.join(map(repr, sources))}; the models there are {listed}"
        f"{f' and {more} more' if more > 0 else ''}: choose one with --model"
    )


def _take_all(reward: float | None, failed: bool) -> None:
    del reward, failed


def _answered(spans: Sequence[SpanRecord]) -> Iterator[SpanRecord]:
    answered = [
        span
        for span in spans
        if span.attributes.get(tr.OPERATION) == "chat"
        and span.error is None
        and tr.REPLAYS not in span.attributes
        and span.attributes.get(tr.AGENT) != tr.REWARD_FUNCTION
        and span.attributes.get(tr.OUTPUT_MESSAGES)
    ]
    yield from sorted(answered, key=lambda span: (span.start_ns, int(span.attributes.get(tr.SEQUENCE, 0))))


def _read_response(span: SpanRecord) -> RecordedResponse:
    call, counts = span_to_call(span), span.attributes
    read, written, cached = (
        value if isinstance(value := counts.get(name), int) else None
        for name in (tr.INPUT_TOKENS, tr.OUTPUT_TOKENS, tr.CACHED_TOKENS)
    )
    return RecordedResponse(
        model=call.model,
        message=cast("Message", dict(call.response or {})),
        finish_reason=call.finish_reason,
        input_tokens=read,
        output_tokens=written,
        cached_tokens=cached or 0,
        seconds=max(span.end_ns - span.start_ns, 0) / 1e9,
    )


def _next(responses: deque[RecordedResponse]) -> RecordedResponse:
    """The first of the least used ones."""
    least = min(responses, key=lambda response: response.uses)
    least.uses += 1
    return least


def _key(messages: Sequence[Mapping[str, Any]]) -> str:
    """``messages`` in a form that is the same for all ways to write them: known fields, without empty ones, and with read arguments."""
    return json.dumps([_plain_message(message) for message in messages], sort_keys=True, ensure_ascii=False)


def _plain_message(message: Mapping[str, Any]) -> dict[str, Any]:
    calls = [_plain_call(call) for call in message.get("tool_calls") or ()]
    fields = {"tool_calls": calls, **{name: _plain_content(message.get(name)) for name in _COMPARED}}
    return {name: value for name, value in fields.items() if value not in (None, "", [])}


def _plain_call(call: Mapping[str, Any]) -> list[Any]:
    function: Mapping[str, Any] = call.get("function") or call.get("custom") or {}
    arguments = function.get("arguments", function.get("input"))
    if isinstance(arguments, str):
        with suppress(ValueError):  # a model may write anything
            arguments = json.loads(arguments)
    return [call.get("id"), function.get("name"), arguments]


def _plain_content(content: Any) -> Any:
    """A content of text parts alone as one text."""
    if not isinstance(content, (list, tuple)):
        return content
    parts = cast("Sequence[Any]", content)
    texts = [part["text"] for part in parts if isinstance(part, dict) and "text" in part]
    return "".join(map(str, texts)) if len(texts) == len(parts) else list(parts)
