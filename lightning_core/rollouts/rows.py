"""Advantages → rows: the tokens of episodes that are trained on."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_core.config.algorithm import Algorithm
from lightning_core.credit import Credit, Episode
from lightning_core.transitions import Row, Streams, transitions_to_rows


def to_rows(algorithm: Algorithm, episodes: Sequence[Episode], credit: Credit, streams: Streams) -> list[Row]:
    """The rows of ``episodes``. ``credit`` and ``streams``: of their calls, and maybe of others.

    Each token of a call has the advantage ``reward_weight · A`` of the call, plus its own of ``streams``.
    """
    masked = masked_calls(algorithm, episodes)
    rows: list[Row] = []
    for episode in episodes:
        advantages = {t.call: algorithm.reward_weight * credit.advantages[t.call] for t in episode.transitions}
        rows += transitions_to_rows(episode.transitions, advantages, masked=masked, streams=streams)
    return rows


def masked_calls(algorithm: Algorithm, episodes: Sequence[Episode]) -> set[str]:
    """The calls that are context only: those of masked rollouts and, with ``algorithm.truncated: mask``, those cut at the limit."""
    cut = algorithm.truncated == "mask"
    calls = [(t, episode.masked) for episode in episodes for t in episode.transitions]
    return {t.call for t, masked in calls if masked or (cut and t.finish_reason == "length")}
