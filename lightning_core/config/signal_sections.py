"""The declarations of signals: their keys in the configuration, and the checks of these."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

from lightning_core.config.signal_keys import declarations
from lightning_core.config.source import KeyPath
from lightning_core.config.types import Names, Section
from lightning_core.credit.registry import RewardRule
from lightning_core.credit.reward_terms import RewardTerm

if TYPE_CHECKING:
    from lightning_core.config.sections import Sections
    from lightning_core.credit import Episode

StreamKind = Literal["advantages", "cross_entropy", "candidates"]


def _none(*_: object) -> Iterator[Any]:
    return iter(())


def _accept(*_: object) -> None:
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class SignalSection:
    """The declaration of a signal in its `section.py`, as ``SECTION``."""

    section: str = ""
    """The section that gets the keys: ``algorithm``, ``credit``, ``rollouts`` or ``tasks``."""
    keys: type[Section] | None = None
    """The keys, as fields with their docstrings. An instance of the section is also one of this class."""
    check: Callable[[Sections], Iterator[tuple[KeyPath, str]]] = _none
    """Yields settings that do not fit together, each with its key."""
    check_run: Callable[[Sections, Sequence[Mapping[str, Any]]], None] = _accept
    """Called with the training tasks before a run's folder is created. Imports functions. Raises `ConfigError`."""
    check_rules: Callable[[Sections, Mapping[str, RewardRule | None]], Iterator[tuple[KeyPath, str]]] = _none
    """Yields reward rules that do not fit the signal, or need it where it is not set. By policy; None: whether the rule needs it is
    unknown."""
    agents: Callable[[Sections], Iterator[tuple[KeyPath, Names | None]]] = _none
    """Yields the lists that choose some of the trained agents, each with its key."""
    models: Callable[[Sections], Iterator[tuple[KeyPath, str]]] = _none
    """Yields the names of the models that the signal needs, each with its key."""
    derive: Callable[[Sections, Sequence[Episode]], Sequence[Episode]] = lambda c, episodes: episodes
    """The stored ``episodes`` with the rewards that the signal computes from them, which the store does not have. For credit that is
    computed again; during training, `Signal.annotate` adds them. Raises `ConfigError`."""
    functions: Callable[[Section], Iterator[str]] = _none
    """Yields the functions that a section ``credit`` names for the signal, as ``module:callable``."""
    rewards: Callable[[Any], Collection[str]] = lambda credit: ()
    """The names of the rewards that the signal adds to the store, for a section ``credit``. The task did not give them."""
    unrecorded: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Values of keys in recorded configurations that lack them: a run from before the key did not use its default. By the key with dots,
    below the section."""
    terms: Callable[[Any], Sequence[RewardTerm]] = lambda credit: ()
    """The rewards that are compared on their own, for a section ``credit``."""
    stream: str | None = None
    """The key under ``algorithm`` that trains tokens without rewards, if the signal has one."""
    kinds: Callable[[Section], Collection[StreamKind]] = lambda algorithm: ()
    """The kinds of `transitions.Streams` that it has with a section ``algorithm``."""
    means: Mapping[str, tuple[str, str]] = field(default_factory=dict[str, tuple[str, str]])
    """Metrics that are means: by name, the count with the sum and the count that divides it. The sums are not metrics."""
    hidden: tuple[str, ...] = ()
    """Counts that are not metrics either."""


def signal_sections() -> Mapping[str, SignalSection]:
    """The declarations of all signals, by name."""
    return declarations()


def chosen_lists(c: Sections) -> Iterator[tuple[KeyPath, Names | None]]:
    """The lists of all signals that choose some of the trained agents; see `SignalSection.agents`."""
    for own in signal_sections().values():
        yield from own.agents(c)


def requested_models(c: Sections) -> Iterator[tuple[KeyPath, str]]:
    """The models that signals need; see `SignalSection.models`."""
    for own in signal_sections().values():
        yield from own.models(c)


def with_derived(c: Sections, episodes: Sequence[Episode]) -> Sequence[Episode]:
    """The stored ``episodes`` with what signals compute from them; see `SignalSection.derive`."""
    for own in signal_sections().values():
        episodes = own.derive(c, episodes)
    return episodes


def signal_rewards(credit: Section) -> frozenset[str]:
    """The names of the rewards that signals add to the store, for a section ``credit``."""
    return frozenset(name for own in signal_sections().values() for name in own.rewards(credit))


def stream_kinds(algorithm: Section) -> set[StreamKind]:
    """The kinds of token streams that a section ``algorithm`` trains on."""
    return {kind for own in signal_sections().values() for kind in own.kinds(algorithm)}


@cache
def hidden_counts() -> frozenset[str]:
    """The counts of signals that are not metrics themselves."""
    sections = signal_sections().values()
    return frozenset(
        (*(total for own in sections for total, _ in own.means.values()), *(k for own in sections for k in own.hidden))
    )


def key_of_rule(c: Sections, policy: str) -> KeyPath:
    """The key of the reward rule of ``policy``."""
    return ("policies", policy, "credit", "rewards") if c.policies else ("credit", "rewards")
