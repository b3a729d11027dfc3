"""Advantages → rows: what the calls of an episode are trained on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lightning_core.config.algorithm import Algorithm
from lightning_core.credit import Credit, Episode
from lightning_core.rollouts.distill import Lessons, token_advantages
from lightning_core.transitions import Ranges, Row, transitions_to_rows


def episode_rows(
    algorithm: Algorithm, episode: Episode, credit: Credit, lessons: Lessons | None = None, ce: Ranges | None = None
) -> list[Row]:
    """The rows of one episode. ``lessons``: the teacher's. ``ce``: the tokens of ``algorithm.ce``."""
    lessons = lessons or Lessons()
    weight = 0.0 if algorithm.distill is None else algorithm.distill.weight
    own = token_advantages(credit.advantages, lessons.differences, reward_weight=algorithm.reward_weight, weight=weight)
    rows = transitions_to_rows(episode.transitions, own, masked=masked_calls(algorithm, [episode]), ce=ce)
    return [_with_candidates(row, lessons) for row in rows] if lessons.candidates else rows


def masked_calls(algorithm: Algorithm, episodes: Sequence[Episode]) -> set[str]:
    """With ``algorithm.truncated: mask`` responses cut at the limit are context only."""
    if algorithm.truncated != "mask":
        return set()
    return {t.call for episode in episodes for t in episode.transitions if t.finish_reason == "length"}


def _with_candidates(row: Row, lessons: Lessons) -> Row:
    segments = (replace(segment, candidates=lessons.candidates.get(segment.call)) for segment in row.segments)
    return replace(row, segments=tuple(segments))
