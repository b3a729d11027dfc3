"""Trace → transitions → rows: the training data, and where each number in it comes from.

A `Transition` is one call of a trained agent: (input_t, output_t, r_t) of arXiv 2508.03680,
eq. 6. A `Row` joins calls of one agent whose contexts extend each other: if (prompt ‖ response)
of an earlier call is an exact prefix of a later prompt, the later call continues that row, even
if other calls come in between::

    calls in order:  A1  B1  A2  B2          A2's prompt starts with A1's prompt ‖ response, B2's with B1's
    rows:            A1 + A2,  B1 + B2

Any other call starts a new row. Every sampled token is trained in exactly one row.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_core.errors import html_table
from lightning_core.trace import EXECUTION, INTERRUPTED, Call, Event, Floats, TokenIds, Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """The K most likely tokens of another distribution at each of the T sampled tokens of a call."""

    token_ids_TK: TokenIds
    """uint32 [T, K]"""
    logprobs_TK: Floats
    """float32 [T, K], as at sampling; minus infinity where fewer than K tokens were allowed."""
    weight: float = 1.0
    """Coefficient of the forward KL divergence from that distribution."""


class WeightedSpan(NamedTuple):
    """Tokens ``[start:stop]`` of (prompt ‖ response) of a call, with a coefficient."""

    start: int
    stop: int
    weight: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Streams:
    """Weighted terms of the loss for single tokens, by call id, in addition to the advantages of calls."""

    advantages: Mapping[str, Floats] = field(default_factory=dict[str, Floats])
    """float32 [T]: added to the call's advantage at each of its sampled tokens."""
    cross_entropy: Mapping[str, Sequence[WeightedSpan]] = field(default_factory=dict[str, Sequence[WeightedSpan]])
    """Tokens with a cross-entropy loss. A later span replaces an earlier one."""
    candidates: Mapping[str, Candidates] = field(default_factory=dict[str, Candidates])
    """Distributions with a forward KL divergence."""
    counts: Mapping[str, float] = field(default_factory=dict[str, float])
    """Counts of the step, which can be added."""


_NO_IDS: TokenIds = np.empty(0, dtype=np.uint32)
_DISCARDED = "the response was dropped: the node was interrupted, and ran again from its beginning"
_NO_LOGPROBS: Floats = np.empty(0, dtype=np.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Transition:
    """One call of a trained agent: its prompt and its sampled tokens."""

    call: str
    rollout: str
    task_id: str
    agent: str
    policy: str
    version: int
    sequence: int
    prompt_ids: TokenIds
    """uint32 [P]"""
    output_ids: TokenIds
    """uint32 [T], T > 0"""
    logprobs: Floats
    """float32 [T], at ``temperature``"""
    temperature: float
    constraint: str | None
    digest: str | None
    """`sampling_digest`, computed at sampling; None only with a ``refusal``."""
    finish_reason: str | None
    first_version: int | None = None
    """Version that sampled its first token, if the weights changed during sampling."""
    refusal: str | None = None
    """The reason it cannot be trained on, or None. Without token ids its arrays are empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A call of a trained agent that cannot be trained on, and why."""

    call: str
    agent: str
    kind: Literal["failed", "refused", "discarded", "untrainable"]
    """``failed``: it raised an error; ``refused``: by the endpoint; ``discarded``: see `discarded_calls`; ``untrainable``: its tokens
    are missing or unusable."""
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """The sampled tokens of one call in a row: ``row.token_ids[start:stop]``."""

    call: str
    start: int
    stop: int
    version: int
    constraint: str | None
    digest: str | None
    """`sampling_digest`, computed at sampling, of prompt ``[:start]`` and output ``[start:stop]``."""
    first_version: int | None = None
    """See `Transition`."""

    @property
    def oldest(self) -> int:
        """The oldest policy version that sampled any of its tokens."""
        return self.version if self.first_version is None else self.first_version


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowStreams:
    """The `Streams` of a row besides its advantages."""

    cross_entropy: Floats | None = None
    """float32 [L]: the coefficient of each token's cross-entropy, sampled or not; 0: not in the loss. None: none is."""
    candidates: Mapping[str, Candidates] = field(default_factory=dict[str, Candidates])
    """Candidate tokens of the calls of the row's segments, by call id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One training sequence of L tokens: calls of one agent, each extending the one before."""

    rollout: str
    agent: str
    policy: str
    token_ids: TokenIds
    """uint32 [L]: exactly the tokens of prompts and responses."""
    mask: NDArray[np.bool_]
    """bool [L]: True for tokens sampled in this row."""
    logprobs: Floats
    """float32 [L]: logprob at sampling, at ``temperatures``; 0 where the mask is False."""
    temperatures: Floats
    """float32 [L]: sampling temperature; 1 where the mask is False."""
    advantages: Floats | None
    """float32 [L]: 0 where the mask is False; None before credit is assigned."""
    segments: tuple[Segment, ...]
    """The calls trained in this row, in order."""
    streams: RowStreams = field(default=RowStreams(), compare=False, repr=False)

    @property
    def cross_entropy_mask(self) -> NDArray[np.bool_]:
        """bool [L]: the tokens with a cross-entropy loss."""
        weights = self.streams.cross_entropy
        return np.zeros(len(self.mask), dtype=np.bool_) if weights is None else weights != 0

    @property
    def in_loss(self) -> NDArray[np.bool_]:
        """bool [L]: the tokens whose logprobs the loss uses."""
        return self.mask if self.streams.cross_entropy is None else self.mask | self.cross_entropy_mask

    @property
    def has_gradient(self) -> bool:
        """Whether a token has an advantage or another term of the loss."""
        credited = self.advantages is not None and bool(self.advantages.any())
        return credited or self.streams.cross_entropy is not None or bool(self.streams.candidates)

    def _repr_html_(self) -> str:
        rows = [
            (s.call, s.start, s.stop, None if self.advantages is None else float(self.advantages[s.start]))
            for s in self.segments
        ]
        caption = f"row of agent {self.agent}: {len(self.token_ids)} tokens, {int(self.mask.sum())} trained on"
        return html_table(caption, ("call", "from", "to", "advantage"), rows)


def trace_to_transitions(trace: Trace, *, agents: Collection[str], refused: bool = False) -> list[Transition]:
    """The trainable calls of ``agents`` (exact names), in order of arrival, without those answered from a record.

    See `refused_calls` for the rest. With ``refused`` they are included, each with its
    ``refusal``, so they can be inspected and credited: traces recorded by another
    instrumentation contain no other calls.
    """
    found: list[Transition] = []
    discarded = discarded_calls(trace)
    for call in trace.calls:
        if call.agent not in agents or call.replays is not None:
            continue
        prompt_ids, output_ids = call.prompt_ids, call.output_ids  # each read puts them together
        reason = _refusal_reason(call, prompt_ids, output_ids) or (_DISCARDED if call.id in discarded else None)
        if refused or reason is None:
            found.append(
                Transition(
                    call=call.id,
                    rollout=trace.rollout,
                    task_id=trace.task_id,
                    agent=call.agent or "",
                    policy=call.model,
                    version=call.policy_version or 0,
                    first_version=call.first_version,
                    sequence=call.sequence,
                    prompt_ids=_NO_IDS if prompt_ids is None else prompt_ids,
                    output_ids=_NO_IDS if output_ids is None else output_ids,
                    logprobs=_NO_LOGPROBS if call.logprobs is None else call.logprobs,
                    temperature=call.temperature,
                    constraint=call.constraint,
                    digest=call.digest,
                    finish_reason=call.finish_reason,
                    refusal=reason,
                )
            )
    return found


def refused_calls(trace: Trace, *, agents: Collection[str]) -> list[Refusal]:
    """The calls of ``agents`` that cannot be trained on; ids are never re-encoded from text."""
    found: list[Refusal] = []
    discarded = discarded_calls(trace)
    for call in trace.calls:
        if call.agent not in agents:
            continue
        reason = _refusal_reason(call, call.prompt_ids, call.output_ids)
        if reason is not None:
            kind = "refused" if call.refused else "untrainable" if call.error is None else "failed"
            found.append(Refusal(call=call.id, agent=call.agent or "", kind=kind, reason=reason))
        elif call.id in discarded:
            found.append(Refusal(call=call.id, agent=call.agent or "", kind="discarded", reason=_DISCARDED))
    return found


def discarded_calls(trace: Trace) -> frozenset[str]:
    """The calls whose responses the agent dropped: their node was interrupted, and later ran again from its beginning."""
    runs = [event for event in trace.events if EXECUTION in event.attributes]
    last = {event.attributes[EXECUTION]: event.id for event in runs}
    repeated = {e.id for e in runs if INTERRUPTED in e.attributes and last[e.attributes[EXECUTION]] != e.id}
    if not repeated:
        return frozenset()
    spans: dict[str, Call | Event] = {span.id: span for span in (*trace.events, *trace.calls)}
    innermost = {event.id for event in runs}

    def run_of(call: Call) -> str | None:
        """The innermost run of a node around ``call``: what completed inside an interrupted one is not repeated."""
        parent = call.parent
        while parent is not None and parent not in innermost:
            parent = spans[parent].parent if parent in spans else None
        return parent

    return frozenset(call.id for call in trace.calls if run_of(call) in repeated)


def _refusal_reason(call: Call, prompt_ids: TokenIds | None, output_ids: TokenIds | None) -> str | None:
    if call.error is not None:
        return f"the request was refused: {call.refused}" if call.refused else f"the call failed: {call.error}"
    if prompt_ids is None or output_ids is None:
        return f"no token ids: model {call.model!r} did not return the ids of its prompt and output"
    if call.policy_version is None:
        return f"sampled by {call.model!r}, which is not a trained policy"
    if call.logprobs is None or len(call.logprobs) != len(output_ids):
        found = "none" if call.logprobs is None else str(len(call.logprobs))
        return f"expected {len(output_ids)} logprobs, found {found}"
    if call.digest is None:
        return "no digest: not recorded by a policy endpoint, or recorded by an older version"
    if len(output_ids) == 0 or len(prompt_ids) == 0:
        return "the prompt or the response is empty"
    return None


def transitions_to_rows(
    transitions: Iterable[Transition],
    advantages: Mapping[str, float] | None = None,
    *,
    masked: Collection[str] = (),
    streams: Streams | None = None,
) -> list[Row]:
    """Merge transitions into rows, in the order of their first calls.

    ``advantages`` maps call ids to the advantage of all tokens of the call. ``masked``: calls that are not trained on, but remain
    context of later calls. ``streams``: terms of single tokens; a row has those up to its last trained call. Raises KeyError for a
    missing call, and ValueError for a transition with a refusal.
    """
    open_rows: dict[tuple[str, str, str], list[_OpenRow]] = {}
    order: list[_OpenRow] = []
    for t in sorted(transitions, key=lambda t: t.sequence):
        if t.refusal is not None:
            raise ValueError(f"call {t.call} of agent {t.agent!r} cannot be trained on: {t.refusal}")
        family = open_rows.setdefault((t.rollout, t.agent, t.policy), [])
        prompt = t.prompt_ids.tobytes()
        # The longest context that is a prefix of the prompt. Ids are four bytes: byte prefixes are token prefixes.
        parent = max((row for row in family if prompt.startswith(row.key)), key=lambda r: len(r.key), default=None)
        if parent is None:
            parent = _OpenRow()
            family.append(parent)
            order.append(parent)
        parent.extend(t)
    closed = (row.close(advantages, masked, streams or Streams()) for row in order)
    return [row for row in closed if row is not None]


class _OpenRow:
    """A row under construction."""

    def __init__(self) -> None:
        self.key = b""
        self.calls: list[Transition] = []

    def extend(self, transition: Transition) -> None:
        self.calls.append(transition)
        self.key = transition.prompt_ids.tobytes() + transition.output_ids.tobytes()

    def close(self, advantages: Mapping[str, float] | None, masked: Collection[str], streams: Streams) -> Row | None:
        """The row up to its last trained call; None if all calls are ``masked``."""
        trained = [t for t in self.calls if t.call not in masked]
        if not trained:
            return None
        length = len(trained[-1].prompt_ids) + len(trained[-1].output_ids)
        token_ids = np.frombuffer(self.key, dtype="<u4", count=length)
        mask = np.zeros(length, dtype=np.bool_)
        logprobs = np.zeros(length, dtype=np.float32)
        temperatures = np.ones(length, dtype=np.float32)
        values = None if advantages is None else np.zeros(length, dtype=np.float32)
        segments: list[Segment] = []
        for t in trained:
            start = len(t.prompt_ids)
            stop = start + len(t.output_ids)
            mask[start:stop] = True
            logprobs[start:stop] = t.logprobs
            temperatures[start:stop] = t.temperature
            if values is not None and advantages is not None:
                own = streams.advantages.get(t.call)
                values[start:stop] = advantages[t.call] if own is None else advantages[t.call] + own
            segments.append(
                Segment(
                    call=t.call,
                    start=start,
                    stop=stop,
                    version=t.version,
                    constraint=t.constraint,
                    digest=t.digest,
                    first_version=t.first_version,
                )
            )
        weights = np.zeros(length, dtype=np.float32)
        for span in (span for t in self.calls for span in streams.cross_entropy.get(t.call, ()) if span.stop <= length):
            weights[span.start : span.stop] = span.weight
        return Row(
            rollout=trained[0].rollout,
            agent=trained[0].agent,
            policy=trained[0].policy,
            token_ids=token_ids,
            mask=mask,
            logprobs=logprobs,
            temperatures=temperatures,
            advantages=values,
            segments=tuple(segments),
            streams=RowStreams(
                cross_entropy=weights if weights.any() else None,
                candidates={t.call: streams.candidates[t.call] for t in trained if t.call in streams.candidates},
            ),
        )
