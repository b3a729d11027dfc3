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
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from lightning_core.logs.html import row_table
from lightning_core.trace import Call, Floats, TokenIds, Trace

Ranges = Mapping[str, Sequence[tuple[int, int]]]
"""Tokens of (prompt ‖ response) by call id: (first, one past the last)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """A teacher's K most likely tokens at each of the T sampled tokens of a call."""

    token_ids_TK: TokenIds
    """uint32 [T, K]"""
    logprobs_TK: Floats
    """float32 [T, K], as at sampling; minus infinity where fewer than K tokens were allowed."""


_NO_IDS: TokenIds = np.empty(0, dtype=np.uint32)
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
    """Why it cannot be trained on, or None. Without token ids its arrays are empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A call of a trained agent that cannot be trained on, and why."""

    call: str
    agent: str
    kind: Literal["failed", "refused", "untrainable"]
    """``failed``: it raised an error; ``refused``: by the endpoint; ``untrainable``: its tokens are missing or unusable."""
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
    candidates: Candidates | None = field(default=None, compare=False, repr=False)
    """Those of the teacher whose distribution the call learns (``algorithm.distill``); None: it learns none."""

    @property
    def oldest(self) -> int:
        """The oldest policy version that sampled any of its tokens."""
        return self.version if self.first_version is None else self.first_version


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
    ce: NDArray[np.bool_] | None = None
    """bool [L]: True for tokens with a cross-entropy loss (``algorithm.ce``), sampled ones or not; None: none."""

    @property
    def in_loss(self) -> NDArray[np.bool_]:
        """bool [L]: the tokens whose logprobs the loss uses."""
        return self.mask if self.ce is None else self.mask | self.ce

    @property
    def has_gradient(self) -> bool:
        """Whether a token has an advantage or a cross-entropy loss, or learns from a teacher."""
        credited = self.advantages is not None and bool(self.advantages.any())
        return credited or self.ce is not None or any(segment.candidates is not None for segment in self.segments)

    _repr_html_ = row_table


def trace_to_transitions(trace: Trace, *, agents: Collection[str], refused: bool = False) -> list[Transition]:
    """The trainable calls of ``agents`` (exact names), in order of arrival, without those answered from a record.

    See `refused_calls` for the rest. With ``refused`` they are included, each with its
    ``refusal``, so that they can be inspected and credited: traces recorded by another
    instrumentation contain no other calls.
    """
    found: list[Transition] = []
    for call in trace.calls:
        reason = _refusal_reason(call)
        if call.agent in agents and call.replays is None and (refused or reason is None):
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
                    prompt_ids=_NO_IDS if call.prompt_ids is None else call.prompt_ids,
                    output_ids=_NO_IDS if call.output_ids is None else call.output_ids,
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
    for call in trace.calls:
        reason = _refusal_reason(call) if call.agent in agents else None
        if reason is not None:
            kind = "refused" if call.refused else "untrainable" if call.error is None else "failed"
            found.append(Refusal(call=call.id, agent=call.agent or "", kind=kind, reason=reason))
    return found


def _refusal_reason(call: Call) -> str | None:
    if call.error is not None:
        return f"the request was refused: {call.refused}" if call.refused else f"the call failed: {call.error}"
    if call.prompt_ids is None or call.output_ids is None:
        return f"no token ids: model {call.model!r} did not return the ids of its prompt and output"
    if call.policy_version is None:
        return f"sampled by {call.model!r}, which is not a trained policy"
    if call.logprobs is None or len(call.logprobs) != len(call.output_ids):
        found = "none" if call.logprobs is None else str(len(call.logprobs))
        return f"expected {len(call.output_ids)} logprobs, found {found}"
    if call.digest is None:
        return "no digest: not recorded by a policy endpoint, or recorded by an older version"
    if len(call.output_ids) == 0 or len(call.prompt_ids) == 0:
        return "the prompt or the response is empty"
    return None


def transitions_to_rows(
    transitions: Iterable[Transition],
    advantages: Mapping[str, float | Floats] | None = None,
    *,
    masked: Collection[str] = (),
    ce: Ranges | None = None,
) -> list[Row]:
    """Merge transitions into rows, in the order of their first calls.

    ``advantages`` maps call ids to the advantage of all tokens of the call, or to float32 [T]. ``masked``: calls that are
    not trained on, but remain context of later calls. ``ce``: tokens with a cross-entropy loss; a row has those
    up to its last trained call. Raises KeyError for a missing call, and
    ValueError for a transition with a refusal.
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
    closed = (row.close(advantages, masked, ce) for row in order)
    return [row for row in closed if row is not None]


class _OpenRow:
    """A row under construction."""

    def __init__(self) -> None:
        self.key = b""
        self.calls: list[Transition] = []

    def extend(self, transition: Transition) -> None:
        self.calls.append(transition)
        self.key = transition.prompt_ids.tobytes() + transition.output_ids.tobytes()

    def close(
        self, advantages: Mapping[str, float | Floats] | None, masked: Collection[str], ce: Ranges | None
    ) -> Row | None:
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
                values[start:stop] = advantages[t.call]
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
        chosen = np.zeros(length, dtype=np.bool_)
        for start, stop in (tokens for t in self.calls for tokens in (ce or {}).get(t.call, ()) if tokens[1] <= length):
            chosen[start:stop] = True
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
            ce=chosen if chosen.any() else None,
        )
