"""Advantages → rows: what the calls of an episode are trained on."""

from __future__ import annotations

from dataclasses import replace

from lightning_core.config.algorithm import Algorithm
from lightning_core.credit import Credit, Episode
from lightning_core.rollouts.distill import Lessons, token_advantages
from lightning_core.rollouts.supervision import Supervision, masked_calls
from lightning_core.transitions import Row, transitions_to_rows


def episode_rows(algorithm: Algorithm, episode: Episode, credit: Credit, supervision: Supervision) -> list[Row]:
    """The rows of one episode. ``credit`` and ``supervision``: of its calls, and maybe of others."""
    lessons, ce = supervision.lessons, supervision.targets.tokens
    advantages = {t.call: credit.advantages[t.call] for t in episode.transitions}
    differences = {call: lessons.differences[call] for call in advantages if call in lessons.differences}
    weight = 0.0 if algorithm.distill is None else algorithm.distill.weight
    own = token_advantages(advantages, differences, reward_weight=algorithm.reward_weight, weight=weight)
    rows = transitions_to_rows(episode.transitions, own, masked=masked_calls(algorithm, [episode]), ce=ce)
    return [_with_candidates(row, lessons) for row in rows] if lessons.candidates else rows


def _with_candidates(row: Row, lessons: Lessons) -> Row:
    segments = (replace(segment, candidates=lessons.candidates.get(segment.call)) for segment in row.segments)
    return replace(row, segments=tuple(segments))
