"""Trace → transitions → rows: what is trained on, and where each number in it comes from.

A `Transition` is the paper's (input_t, output_t, r_t): one call of a trained agent (arXiv 2508.03680, eq. 6). Rows join the calls of
one agent whose contexts grow out of each other, in a forest: if (prompt ‖ response) of an earlier call is an exact prefix of
a later prompt, the later call continues that row, wherever it stands in time::

    calls in order:  A1  B1  A2  B2          A2's prompt starts with A1's prompt ‖ response, B2's with B1's
    rows:            A1 + A2,  B1 + B2

Where a context does not hold, a new row begins. Every sampled token is trained in exactly one row.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from lightning_core.trace import Call, Floats, TokenIds, Trace

_NO_IDS: TokenIds = np.empty(0, dtype=np.uint32)
_NO_LOGPROBS: Floats = np.empty(0, dtype=np.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Transition:
    """One call of a trained agent: what it saw and what it sampled."""

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
    """`sampling_digest` as it was when the call was sampled; None only where there is a ``refusal``."""
    finish_reason: str | None
    first_version: int | None = None
    """Version of its first token, where the weights changed while it was sampled."""
    refusal: str | None = None
    """Why it cannot be trained on; None for what can. Without token ids its arrays are empty, and what was said is in `Trace.calls`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A call of a trained agent that cannot be trained on, and why."""

    call: str
    agent: str
    kind: Literal["failed", "untrainable"]
    """``failed``: the call itself raised an error; ``untrainable``: it returned, but its tokens are not usable."""
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Where one call's sampled tokens stand in a row: ``row.token_ids[start:stop]``."""

    call: str
    start: int
    stop: int
    version: int
    constraint: str | None
    digest: str | None
    """`sampling_digest` of ``token_ids[:start]`` and the tokens from there to ``stop``, as they were when they were sampled."""
    first_version: int | None = None
    """See `Transition`."""

    @property
    def oldest(self) -> int:
        """The oldest version of weights that sampled any of it."""
        return self.version if self.first_version is None else self.first_version


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One training sequence of L tokens: a path from the root to a leaf in an agent's forest of contexts."""

    rollout: str
    agent: str
    policy: str
    token_ids: TokenIds
    """uint32 [L]: exactly what the model saw and sampled."""
    mask: NDArray[np.bool_]
    """bool [L]: True where the token was sampled in this row. Every sampled token is True in exactly one row."""
    logprobs: Floats
    """float32 [L]: logprob at sampling, at the sampling temperature; 0 where the mask is False."""
    temperatures: Floats
    """float32 [L]: temperature that the token was sampled at; 1 where the mask is False."""
    advantages: Floats | None
    """float32 [L], 0 where the mask is False; None until credit has been assigned."""
    segments: tuple[Segment, ...]
    """The calls whose tokens this row trains, in order."""


def trace_to_transitions(trace: Trace, *, agents: Collection[str], refused: bool = False) -> list[Transition]:
    """The calls of ``agents`` (exact names) that can be trained on, in order of arrival. `refused_calls` tells of the others.

    With ``refused`` those are there too, each with its ``refusal``, to be looked at and credited: a trace that somebody else's
    instrumentation recorded has no others.
    """
    found: list[Transition] = []
    for call in trace.calls:
        reason = _refusal_reason(call)
        if call.agent in agents and (refused or reason is None):
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
    """The calls of ``agents`` that cannot be trained on. Nothing is re-encoded from text to make up for missing ids."""
    found: list[Refusal] = []
    for call in trace.calls:
        reason = _refusal_reason(call) if call.agent in agents else None
        if reason is not None:
            kind = "untrainable" if call.error is None else "failed"
            found.append(Refusal(call=call.id, agent=call.agent or "", kind=kind, reason=reason))
    return found


def _refusal_reason(call: Call) -> str | None:
    if call.error is not None:
        return f"the call failed: {call.error}"
    if call.prompt_ids is None or call.output_ids is None:
        return f"no token ids: model {call.model!r} answered without telling which tokens it saw and sampled"
    if call.policy_version is None:
        return f"sampled by {call.model!r}, whose weights are not trained"
    if call.logprobs is None or len(call.logprobs) != len(call.output_ids):
        found = "none" if call.logprobs is None else str(len(call.logprobs))
        return f"expected {len(call.output_ids)} logprobs, found {found}"
    if call.digest is None:
        return "no digest: it was not recorded by a policy endpoint, or by one of an older version"
    if len(call.output_ids) == 0 or len(call.prompt_ids) == 0:
        return "an empty prompt or response"
    return None


def transitions_to_rows(transitions: Iterable[Transition], advantages: Mapping[str, float] | None = None) -> list[Row]:
    """Merge transitions into rows, in the order of their first calls.

    ``advantages`` maps call ids to the advantage of every token of that call. Raises KeyError if it lacks a call, and ValueError for
    a transition that is refused.
    """
    open_rows: dict[tuple[str, str, str], list[_OpenRow]] = {}
    order: list[_OpenRow] = []
    for t in sorted(transitions, key=lambda t: t.sequence):
        if t.refusal is not None:
            raise ValueError(f"call {t.call} of agent {t.agent!r} cannot be trained on: {t.refusal}")
        family = open_rows.setdefault((t.rollout, t.agent, t.policy), [])
        prompt = t.prompt_ids.tobytes()
        # The longest context that the prompt starts with; ids are four bytes each, so a byte prefix is a token prefix.
        parent = max((row for row in family if prompt.startswith(row.key)), key=lambda r: len(r.key), default=None)
        if parent is None:
            parent = _OpenRow()
            family.append(parent)
            order.append(parent)
        parent.extend(t)
    return [row.close(advantages) for row in order]


class _OpenRow:
    """A row that may still grow."""

    def __init__(self) -> None:
        self.key = b""
        self.calls: list[Transition] = []

    def extend(self, transition: Transition) -> None:
        self.calls.append(transition)
        self.key = transition.prompt_ids.tobytes() + transition.output_ids.tobytes()

    def close(self, advantages: Mapping[str, float] | None) -> Row:
        token_ids = np.frombuffer(self.key, dtype="<u4")
        length = len(token_ids)
        mask = np.zeros(length, dtype=np.bool_)
        logprobs = np.zeros(length, dtype=np.float32)
        temperatures = np.ones(length, dtype=np.float32)
        values = None if advantages is None else np.zeros(length, dtype=np.float32)
        segments: list[Segment] = []
        for t in self.calls:
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
        first = self.calls[0]
        return Row(
            rollout=first.rollout,
            agent=first.agent,
            policy=first.policy,
            token_ids=token_ids,
            mask=mask,
            logprobs=logprobs,
            temperatures=temperatures,
            advantages=values,
            segments=tuple(segments),
        )


def count_sampled(transitions: Sequence[Transition]) -> int:
    """Number of sampled tokens in ``transitions``; equals the sum of the masks of their rows."""
    return sum(len(t.output_ids) for t in transitions)
