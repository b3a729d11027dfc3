"""One rollout as plain frozen data, built from its spans. No I/O, no framework, no torch.

A rollout is one OpenTelemetry trace. `spans_to_trace` reads its spans into

- `Call`: one response of a model, with token ids and logprobs if it was sampled here;
- `Event`: any other span: an agent, a graph node, a tool;
- `Reward`: a scalar reward, attached to the episode, an agent or a call.

Attribute names follow OpenTelemetry's GenAI conventions, with ``lightning.`` for the rest; why they are defined here: decision 0012.
"""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from operator import attrgetter
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from lightning_core.errors import RewardError, as_number, html_table, show
from lightning_core.unread.fields import leave_unread, own_state, restore, set_state, shared_state

TokenIds = NDArray[np.uint32]
Floats = NDArray[np.float32]

POLICY = "policy"
"""The model name of the trained weights, in a run with one policy."""
BASE = "base"
"""The model name of the initial weights."""

OPERATION = "gen_ai.operation.name"
AGENT = "gen_ai.agent.name"
PROVIDER = "gen_ai.provider.name"
REQUEST_MODEL = "gen_ai.request.model"
RESPONSE_MODEL = "gen_ai.response.model"
RESPONSE_ID = "gen_ai.response.id"
SYSTEM_INSTRUCTIONS = "gen_ai.system_instructions"
INPUT_MESSAGES = "gen_ai.input.messages"
OUTPUT_MESSAGES = "gen_ai.output.messages"
FINISH_REASONS = "gen_ai.response.finish_reasons"
TEMPERATURE = "gen_ai.request.temperature"
TOP_P = "gen_ai.request.top_p"
MAX_TOKENS = "gen_ai.request.max_tokens"
INPUT_TOKENS = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
CACHED_TOKENS = "gen_ai.usage.cache_read.input_tokens"  # of the input tokens
EMBEDDING_DIMENSIONS = "gen_ai.embeddings.dimension.count"
EMBEDDING_FORMATS = "gen_ai.request.encoding_formats"
TOOL = "gen_ai.tool.name"
TOOL_DEFINITIONS = "gen_ai.tool.definitions"
TOOL_CALL_ID = "gen_ai.tool.call.id"
TOOL_ARGUMENTS = "gen_ai.tool.call.arguments"
TOOL_RESULT = "gen_ai.tool.call.result"

NODE = "lightning.node"
TASK = "lightning.task"
TASK_ID = "lightning.task.id"
SEED = "lightning.seed"  # of the job that the rollout is an attempt at
ANSWER = "lightning.answer"  # what the agent returned, as JSON, if a reward function scores it
SEQUENCE = "lightning.sequence"
PROMPT_IDS = "lightning.prompt_token_ids"
OUTPUT_IDS = "lightning.output_token_ids"
LOGPROBS = "lightning.output_logprobs"
LOGPROBS_AFTER = "lightning.output_logprobs_after"
"""Measured after the update that trained on the call (``trainer.measure_change``)."""
VERSION = "lightning.policy_version"
FIRST_VERSION = "lightning.policy_version.first"
DIGEST = "lightning.digest"
CONSTRAINT = "lightning.constraint"
CONTEXT = "lightning.context"
CONTEXT_REASON = "lightning.context.reason"
DECLARED_AGENTS = "lightning.agents"
TRAINED = "lightning.trained"
REPLAYS = "lightning.replays"
FORKS = "lightning.forks"
HOST = "server.address"
CREDENTIALS = "lightning.credentials"
REASON = "lightning.reason"
REQUESTS = "lightning.requests"
ELSEWHERE = "elsewhere"
"""Operation of an event that counts requests that did not go through the endpoint."""
COUNT = "count_tokens"
REWARD_FUNCTION = "reward function"  # the agent of its calls, which are never trained on
EXECUTION = "lightning.execution"  # id of a run of a node; a run that repeats it has the same
INTERRUPTED = "lightning.interrupted"
"""Whether a run of a node was interrupted: if it runs again, it starts from its beginning."""
REFUSED = "lightning.refused"
DROPPED = "lightning.dropped"
PROMPT = "lightning.prompt"  # the prompt that the endpoint added, with its digest
REWARD_VALUE = "lightning.reward.value"
REWARD_NAME = "lightning.reward.name"
REWARD_CALL = "lightning.reward.call"
REWARD_AGENT = "lightning.reward.agent"

_SAMPLED = (PROMPT_IDS, OUTPUT_IDS, LOGPROBS)
_LARGEST = float(np.finfo(np.float32).max)  # advantages are float32


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanRecord:
    """A finished span as plain data. Attribute values are JSON values or ``bytes``."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str | None
    start_ns: int
    end_ns: int
    attributes: Mapping[str, Any]
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One response of one model. A request for n choices makes n calls.

    Messages, response, tools and ids may be given unread (`leave_unread`): they repeat those of other calls.
    """

    id: str
    rollout: str
    parent: str | None
    agent: str | None
    sequence: int
    """Order of arrival at the process that answered; a logical clock, independent of wall time."""
    model: str
    """The model that answered."""
    policy_version: int | None
    """Version of the policy's weights that sampled the last token; None for other models."""
    first_version: int | None = None
    """Version that sampled the first token, if the weights changed during sampling."""
    messages: tuple[Mapping[str, Any], ...]
    response: Mapping[str, Any] | None
    tools: Sequence[Any] | None = None
    """The request's tool definitions."""
    prompt_ids: TokenIds | None
    """uint32 [P]; None if an upstream server answered without token ids."""
    output_ids: TokenIds | None
    """uint32 [T], including the stop token if the model sampled it."""
    logprobs: Floats | None
    """float32 [T], under the distribution that was sampled from."""
    arrays: Mapping[str, Floats] = field(default_factory=dict[str, Any])
    """float32, by the name of the attribute: measured at the call after it was sampled, such as `LOGPROBS_AFTER`."""
    temperature: float
    constraint: str | None
    """``SamplingParams.constraint``; ``logprobs`` are then normalized over the allowed tokens."""
    digest: str | None
    """`sampling_digest` of the above, computed at sampling; None for models not trained."""
    finish_reason: str | None
    max_tokens: int | None = None
    """The response's limit: the smallest of the request's, the configured one and the room in the context."""
    context: str | None
    """The relation of the prompt to earlier calls: new, clean, realigned or forked (``chat/chat.py``)."""
    context_reason: str | None
    error: str | None
    refused: str | None = None
    """The reason the endpoint refused the request, or None. Unreadable messages are missing."""
    dropped: tuple[str, ...] = ()
    """Fields of the request that had no effect, each with the reason: ``top_k: …``."""
    start_ns: int
    end_ns: int
    trained: bool = False
    """Whether the agent is one to train. A provider's model may have answered in the policy's place (``eval.model``)."""
    replays: str | None = None
    """The call of another rollout whose recorded response answered this one; it is trained on there."""
    forks: str | None = None
    """The call of another rollout with the same history, in whose place this one was sampled."""
    target: tuple[str, str] | None = None
    """The host that the call was forwarded to and whose key was sent; None if it was answered here."""

    def __getstate__(self) -> list[Any]:
        return own_state(self)

    def __setstate__(self, state: list[Any]) -> None:
        set_state(self, state)


leave_unread(
    Call,
    {
        "messages": lambda text: tuple(json.loads(text)),
        "response": lambda text: json.loads(text)[0],
        **dict.fromkeys(("tools", "prompt_ids", "output_ids"), json.loads),
    },
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """A span that is not a model call: an agent, a graph node, a tool call."""

    id: str
    parent: str | None
    kind: Literal["rollout", "agent", "node", "tool", "elsewhere", "count", "other"]
    name: str
    agent: str | None
    attributes: Mapping[str, Any]
    error: str | None
    start_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """A finite scalar reward; the episode's if neither ``call`` nor ``agent`` is set."""

    value: float
    call: str | None = None
    agent: str | None = None
    name: str | None = None

    @property
    def is_episode(self) -> bool:
        return self.call is None and self.agent is None


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """One rollout: calls in order of arrival, events and rewards in order of start."""

    rollout: str
    task_id: str
    task: Any
    calls: tuple[Call, ...]
    events: tuple[Event, ...]
    rewards: tuple[Reward, ...]
    error: str | None = None
    """The exception that ended the rollout, or None."""
    counters: Mapping[str, int] = field(default_factory=dict[str, int])
    """Number of recording failures, by kind (see ``capture.record``)."""

    @property
    def reward(self) -> float | None:
        """The episode's return: the sum of its episode rewards, or None without any."""
        values = [r.value for r in self.rewards if r.is_episode]
        return math.fsum(values) if values else None

    @property
    def agents(self) -> tuple[str, ...]:
        """Names of the agents that made a call, in order of first appearance."""
        return tuple(dict.fromkeys(c.agent for c in self.calls if c.agent is not None))

    def __reduce__(self) -> tuple[Any, ...]:
        # A call alone is pickled with what it refers to; in a trace, this is there once.
        calls = [shared_state(call) for call in self.calls]
        values = {f.name: getattr(self, f.name) for f in fields(self)} | {"calls": calls}
        return _restore, (values,)

    def _repr_html_(self) -> str:
        lengths = [0 if c.output_ids is None else len(c.output_ids) for c in self.calls]
        texts = [c.error or (c.response or {}).get("content") for c in self.calls]
        rows = [(c.agent, c.model, *cells) for c, *cells in zip(self.calls, lengths, texts, strict=True)]
        caption = f"task {self.task_id}: reward {self.reward}, {self.error or 'no error'}"
        return html_table(caption, ("agent", "model", "tokens", "response"), rows)


def _restore(values: Mapping[str, Any]) -> Trace:
    calls: Any = tuple(restore(Call, state) for state in values["calls"])
    return Trace(**{**values, "calls": calls})


def check_reward(value: object) -> float:
    """``value`` as a float; True is 1.0. Raises `RewardError` unless it is a finite number that float32 can represent.

    ``value``: a number of any type that converts to float, such as a Decimal or a tensor of one element.
    """
    if (number := as_number(value)) is not None and abs(number) <= _LARGEST:  # False for NaN
        return number
    kind = getattr(value, "type_name", type(value).__name__)
    raise RewardError(f"a reward must be a finite number of at most {_LARGEST:.1e}, found {show(value)} of type {kind}")


def spans_to_trace(spans: Iterable[SpanRecord], *, counters: Mapping[str, int] | None = None) -> Trace:
    """The trace of one rollout from its finished spans, in any order.

    The last span of an id replaces earlier ones. Raises ValueError without a root span, or if
    the spans belong to several rollouts.
    """
    ordered = sorted({span.span_id: span for span in spans}.values(), key=attrgetter("start_ns", "span_id"))
    rollouts = {span.trace_id for span in ordered}
    if len(rollouts) != 1:
        raise ValueError(f"expected the spans of one rollout, found the trace ids {sorted(rollouts)[:3]!r}")
    kinds = [(span, _own(span).get(OPERATION)) for span in ordered]
    roots = [span for span in ordered if TASK_ID in _own(span)]
    if len(roots) != 1:
        raise ValueError(f"expected one root span with {TASK_ID!r}, found {len(roots)} among {len(ordered)} spans")
    root = roots[0]
    return Trace(
        rollout=root.trace_id,
        task_id=str(root.attributes[TASK_ID]),
        task=json.loads(root.attributes.get(TASK, "null")),
        calls=tuple(sorted((span_to_call(s) for s, kind in kinds if kind == "chat"), key=attrgetter("sequence"))),
        events=tuple(_event(s) for s, kind in kinds if kind not in ("chat", "reward")),
        rewards=tuple(_reward(s) for s, kind in kinds if kind == "reward"),
        error=root.error,
        counters=dict(counters or {}),
    )


def span_to_call(span: SpanRecord) -> Call:
    """The call that a span with the operation ``chat`` records."""
    a = _own(span)
    get = getattr(span.attributes, "unread", a.get)
    measured = [name for name, value in a.items() if type(value) is bytes and name.startswith("lightning.")]
    return Call(
        id=span.span_id,
        rollout=span.trace_id,
        parent=span.parent_id,
        agent=a.get(AGENT),
        sequence=int(a.get(SEQUENCE, 0)),
        model=str(a.get(RESPONSE_MODEL) or a.get(REQUEST_MODEL) or ""),
        policy_version=a.get(VERSION),
        first_version=a.get(FIRST_VERSION),
        messages=get(INPUT_MESSAGES, ()),
        response=get(OUTPUT_MESSAGES),
        tools=get(TOOL_DEFINITIONS),
        prompt_ids=_unpack(get(PROMPT_IDS), "<u4"),
        output_ids=_unpack(get(OUTPUT_IDS), "<u4"),
        logprobs=_unpack(a.get(LOGPROBS), "<f4"),
        arrays={name: np.frombuffer(a[name], "<f4") for name in measured if name not in _SAMPLED},
        temperature=float(a.get(TEMPERATURE, 1.0)),
        constraint=a.get(CONSTRAINT),
        digest=a.get(DIGEST),
        finish_reason=next(iter(a.get(FINISH_REASONS, ())), None),
        max_tokens=limit if isinstance(limit := a.get(MAX_TOKENS), int) else None,
        context=a.get(CONTEXT),
        context_reason=a.get(CONTEXT_REASON),
        error=span.error,
        refused=a.get(REFUSED),
        dropped=tuple(a.get(DROPPED, ())),
        start_ns=span.start_ns,
        end_ns=span.end_ns,
        trained=bool(a.get(TRAINED)),
        replays=a.get(REPLAYS),
        forks=a.get(FORKS),
        target=(str(a[HOST]), str(a.get(CREDENTIALS, ""))) if HOST in a else None,
    )


def _own(span: SpanRecord) -> Mapping[str, Any]:
    """The attributes of ``span`` but those that it shares with other calls: its ids, messages and tools."""
    return getattr(span.attributes, "own", span.attributes)


_EVENTS: Mapping[str, tuple[Literal["agent", "count", "tool", "elsewhere"], str | None]] = {
    "invoke_agent": ("agent", AGENT),
    "execute_tool": ("tool", TOOL),
    COUNT: ("count", None),
    ELSEWHERE: ("elsewhere", HOST),
}
"""The kind of an event and the attribute with its name, by operation."""


def _event(span: SpanRecord) -> Event:
    a = span.attributes
    other = ("node", NODE) if NODE in a else ("other", None)
    kind, key = ("rollout", None) if TASK_ID in a else _EVENTS.get(str(a.get(OPERATION)), other)
    return Event(
        id=span.span_id,
        parent=span.parent_id,
        kind=kind,
        name=a.get(key or "", span.name),
        agent=a.get(AGENT),
        attributes=a,
        error=span.error,
        start_ns=span.start_ns,
        end_ns=span.end_ns,
    )


def _reward(span: SpanRecord) -> Reward:
    a = span.attributes
    return Reward(
        value=float(a[REWARD_VALUE]), call=a.get(REWARD_CALL), agent=a.get(REWARD_AGENT), name=a.get(REWARD_NAME)
    )


def pack(values: Iterable[int] | Iterable[float], dtype: Literal["<u4", "<f4"]) -> bytes:
    """Token ids or logprobs packed as little-endian bytes, four per value."""
    # Of Python's numbers, an array of Python's is made four times as fast as one of numpy's.
    found = values if hasattr(values, "__array__") else array("I" if dtype == "<u4" else "f", values)
    return np.asarray(found, dtype=dtype).tobytes()


def _unpack(data: Any, dtype: Literal["<u4", "<f4"]) -> Any:
    return data if data is None or isinstance(data, partial) else np.frombuffer(data, dtype=dtype)
