"""The protocol of a source of training signal, and what a signal may use.

The collector calls the signals of a run in the order of `lightning_core.credit.signal_names.SIGNALS`, each method once for all signals:

    pick_tasks → prepare → (rollouts) → extend → annotate → (credit) → streams → (rows, update) → fit
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import ClassVar, Protocol

import numpy as np

from lightning_core.chat.chat import Chat
from lightning_core.config import Config
from lightning_core.credit import Credit, Episode
from lightning_core.credit.signal_names import SIGNALS
from lightning_core.errors import CreditError
from lightning_core.records.store import Phase, Store
from lightning_core.rollouts.attempt import AgentPool, Group, Job, Rollout, Task
from lightning_core.trace import Floats
from lightning_core.transitions import Candidates, Row, Streams, Transition

Reject = Callable[[Rollout], "str | None"]
"""The reason a rollout is not used, or None. Recorded as its error."""
RunJobs = Callable[[Sequence[Job], Phase, Reject], "Awaitable[Sequence[tuple[Rollout, str | None]]]"]
"""Runs jobs under the current policy. Returns the last attempt at each, with the reason why it is not used, or None. Raises
`InfrastructureError` if their worker is lost."""


class TokenScorer(Protocol):
    """Scores tokens under some weights."""

    def logprobs(self, rows: Sequence[Row]) -> Mapping[str, Floats]:
        """The logprobs of the sampled tokens of ``rows``: float32 [T] by call id, as at sampling. It may leave out constrained calls."""
        ...

    def candidates(self, rows: Sequence[Row], count: int) -> Mapping[str, Candidates]:
        """The ``count`` most likely tokens at the sampled tokens of ``rows``, by call id."""
        ...


class Critic(Protocol):
    """Predicts returns, and learns to."""

    def values(self, transitions: Sequence[Transition]) -> Mapping[str, float]:
        """The expected return at each call's prompt, by call id."""
        ...

    def fit_values(self, targets: Mapping[str, float]) -> Mapping[str, float]:
        """Fit the values to ``targets``, the returns of calls it scored by call id, and return metrics."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """The resources that the signals of a run may use."""

    config: Config
    store: Store
    agents: AgentPool
    chats: Mapping[str, Chat]
    """The chat format of each model that is served here."""
    max_context: int
    """Maximum number of tokens of prompt and response together."""
    scorer: Callable[[str], TokenScorer] | None = None
    """The scorer of a model: ``policy``, ``base``, or the name of another one. None: the trainer scores no tokens."""
    critic: Critic | None = None
    vocabulary: int | None = None
    """Number of tokens that the policy has logits for; None: unknown."""


class Signal(Protocol):
    """A source of training signal. Derive from it: each method has a default that changes nothing."""

    phase: ClassVar[str | None] = None
    """The phase of the step shown during `annotate`, or None."""

    def notes(self) -> Sequence[str]:
        """What it decides about the run; printed at the start."""
        return ()

    def pick_tasks(self, tasks: Sequence[Task], step: int) -> Sequence[Task] | None:
        """The tasks of ``step``; None to leave the choice to the others."""
        return None

    def prepare(self, job: Job) -> Job:
        """``job``, an attempt at a training task, as it is to be run."""
        return job

    async def extend(self, group: Group, run: RunJobs) -> Group:
        """``group`` with more rollouts of its task."""
        return group

    def check(self, groups: Sequence[Group]) -> None:
        """Check finished groups. Raises `ConfigError`."""

    async def annotate(
        self, episodes: Sequence[Episode], tasks: Mapping[str, Task], step: int, *, required: bool
    ) -> Sequence[Episode]:
        """``episodes`` with more rewards or facts.

        ``tasks``: by id. ``step``: number of updates so far. ``required``: raise an error if it fails for all.
        """
        return episodes

    def streams(self, episodes: Sequence[Episode]) -> Streams:
        """Terms of the loss for single tokens."""
        return Streams()

    def fit(self, credit: Credit) -> Mapping[str, float]:
        """Update what the signal itself learns, after the policy. Returns metrics."""
        return {}

    def counts(self) -> Mapping[str, float]:
        """The counts since the last call, which can be added."""
        return {}


def open_signals(resources: Resources) -> Sequence[Signal]:
    """The signals that the configuration switches on. Raises the errors of their ``open_signal``, such as `ConfigError`."""
    opened = (import_module(f"lightning_core.signals.{name}.signal").open_signal(resources) for name in SIGNALS)
    return [signal for signal in opened if signal is not None]


def checked_streams(signal: Signal, episodes: Sequence[Episode]) -> Streams:
    """The streams of ``signal``. Raises `CreditError` for those that fit none of the trained calls of ``episodes``."""
    streams = signal.streams(episodes)
    lengths = {t.call: (len(t.prompt_ids), len(t.output_ids)) for e in episodes for t in e.transitions}
    wrong: str | None = None
    for call in (*streams.advantages, *streams.cross_entropy, *streams.candidates):
        if call not in lengths:
            wrong = f"{call!r}, which is no call of the step's trained agents"
    for call, values_T in streams.advantages.items():
        if call in lengths and (len(values_T) != lengths[call][1] or not np.isfinite(values_T).all()):
            wrong = f"{len(values_T)} advantages of call {call!r}; expected {lengths[call][1]} finite numbers, one for each token"
    for call, spans in streams.cross_entropy.items():
        whole = sum(lengths.get(call, ()))
        for span in spans:
            if call in lengths and not 0 <= span.start <= span.stop <= whole:
                wrong = f"tokens {span.start} to {span.stop} of call {call!r}, which has {whole} with its prompt"
    if wrong is not None:
        raise CreditError(f"{type(signal).__name__}.streams returned {wrong}")
    return streams


def merge_streams(streams: Sequence[Streams]) -> Streams:
    """``streams`` as one. Advantages of a token are added; of spans that overlap and of distributions for a call, the last one counts."""
    merged = Streams()
    for one in streams:
        advantages = {**merged.advantages}
        for call, values_T in one.advantages.items():
            advantages[call] = advantages[call] + values_T if call in advantages else values_T
        spans = {call: [*merged.cross_entropy.get(call, ()), *found] for call, found in one.cross_entropy.items()}
        merged = replace(
            merged,
            advantages=advantages,
            cross_entropy={**merged.cross_entropy, **spans},
            candidates={**merged.candidates, **one.candidates},
            counts={**merged.counts, **one.counts},
        )
    return merged
