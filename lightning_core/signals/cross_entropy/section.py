"""The configuration's section ``algorithm.ce``."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BeforeValidator, Field

from lightning_core.config.signal_sections import SignalSection, StreamKind
from lightning_core.config.source import KeyPath
from lightning_core.config.types import Names, Positive, Section

if TYPE_CHECKING:
    from lightning_core.config.sections import Sections

_KEY: KeyPath = ("algorithm", "ce")

CeTokens = Literal["tool", "user", "response"]


def _listed(value: object) -> object:
    return [value] if isinstance(value, str) else value


class CrossEntropy(Section):
    """A cross-entropy loss on tokens of the step's rollouts, in the same update. docs/sft.md describes it."""

    weight: Positive
    """Coefficient of the cross-entropy, which is in nats per token: the mean over rollouts of the mean over the chosen
    tokens of each."""
    tokens: Annotated[tuple[CeTokens, ...], BeforeValidator(_listed), Field(strict=False)] = ("tool",)
    """The tokens, one of these or a list. `tool`: results of tools (ECHO). `user`: messages of the user. For
    both: only messages after the first response. `response`: the responses of rollouts with a reward of `min_reward` or more."""
    min_reward: float | None = None
    """With `response`: the least reward of a rollout; null: `eval.solved`."""
    agents: Names | None = None
    """Agents the loss applies to, with `*` as wildcard; null: all trained agents."""


class CrossEntropyKeys(Section):
    """The keys of the cross-entropy in the section ``algorithm``."""

    ce: CrossEntropy | None = None
    """Cross-entropy on tool results, user messages or good responses; null: none."""


def cross_entropy_of(algorithm: Section) -> CrossEntropy | None:
    """The settings in the section ``algorithm``."""
    assert isinstance(algorithm, CrossEntropyKeys)
    return algorithm.ce


def _check(c: Sections) -> Iterator[tuple[KeyPath, str]]:
    ce = cross_entropy_of(c.algorithm)
    if ce is None:
        return
    if not ce.tokens or len(set(ce.tokens)) < len(ce.tokens):
        yield (
            (*_KEY, "tokens"),
            f"found {list(ce.tokens)!r}, expected one or more different sources: tool, user or response",
        )
    if ce.min_reward is not None and "response" not in ce.tokens:
        yield (*_KEY, "min_reward"), f"goes with tokens: response only, but algorithm.ce.tokens is {list(ce.tokens)!r}"
    if c.trainer.name == "verl":
        yield from _check_verl(c, ce)


def _check_verl(c: Sections, ce: CrossEntropy) -> Iterator[tuple[KeyPath, str]]:
    if "response" in ce.tokens:
        yield (
            (*_KEY, "tokens"),
            f"found {list(ce.tokens)!r}, expected tool, user or both: verl's actor has one loss per token, and responses have the "
            "policy's; use lightning-rl sft between runs, or trainer.name: torch",
        )
    if c.rollouts.temperature != 1:
        yield (
            ("rollouts", "temperature"),
            f"found {c.rollouts.temperature:g}, expected 1.0: with algorithm.ce verl's actor reads tool results and user messages at the "
            "temperature of the rollouts",
        )


def _agents(c: Sections) -> Iterator[tuple[KeyPath, Names | None]]:
    ce = cross_entropy_of(c.algorithm)
    if ce is not None:
        yield (*_KEY, "agents"), ce.agents


def _kinds(algorithm: Section) -> Collection[StreamKind]:
    return () if cross_entropy_of(algorithm) is None else ("cross_entropy",)


SECTION = SignalSection(
    section="algorithm", keys=CrossEntropyKeys, check=_check, agents=_agents, stream="ce", kinds=_kinds
)
