"""Custom rules: plain functions, named as module:callable."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from annotated_types import Ge, Gt

from lightning_core import Episode
from lightning_core.credit import Value

if TYPE_CHECKING:
    from torch import Tensor


def per_call(episode: Episode, *, penalty: Annotated[float, Ge(0)] = 0.0) -> list[float]:
    """The return minus a penalty for each call."""
    calls = len(episode.transitions)
    return [episode.reward - penalty * calls] * calls


def with_gamma(episode: Episode, gamma: float) -> list[float]:
    """The return times γ."""
    return [episode.reward * gamma] * len(episode.transitions)


def shifted(groups: list[list[Value]], *, by: float) -> dict[str, float]:
    """v + by."""
    return {v.call: v.value + by for group in groups for v in group}


def centred(groups: list[list[Value]]) -> dict[str, float]:
    """v minus the mean of the group's calls."""
    return {v.call: v.value - sum(w.value for w in group) / len(group) for group in groups for v in group}


def first_turn(episode: Episode) -> list[str]:
    """Whether it is the first call of its agent."""
    return [str(turn == 0) for turn in episode.turns]


def sapo(
    logprobs_E: Tensor, log_ratio_E: Tensor, advantages_E: Tensor, *, temperature: Annotated[float, Gt(0)] = 1.0
) -> Tensor:
    """−4/τ sigmoid(τ (r − 1)) A."""
    return -4 / temperature * (temperature * (log_ratio_E.exp() - 1)).sigmoid() * advantages_E


def halved(logprobs_E: Tensor, log_ratio_E: Tensor, advantages_E: Tensor) -> Tensor:
    """Half of REINFORCE's."""
    return -0.5 * advantages_E * logprobs_E


def mean_loss(logprobs_E: Tensor, log_ratio_E: Tensor, advantages_E: Tensor) -> Tensor:
    """A scalar instead of one loss per token."""
    return -(logprobs_E * advantages_E).mean()
