"""What trains calls besides their advantages: a teacher (``algorithm.distill``) and a cross-entropy (``algorithm.ce``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from lightning_core.config.algorithm import Algorithm
from lightning_core.credit import Episode
from lightning_core.rollouts.ce import Targets, TokenSources
from lightning_core.rollouts.distill import Lessons, Teacher


@dataclass(frozen=True, slots=True, kw_only=True)
class Supervision:
    """What the calls of some episodes learn besides their rewards."""

    lessons: Lessons = field(default_factory=Lessons)
    """What the teacher says of their calls."""
    targets: Targets = field(default_factory=Targets)
    """The tokens with a cross-entropy loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisionSources:
    """The teacher and the token sources of a run; None: it has none."""

    teacher: Teacher | None = None
    tokens: TokenSources | None = None

    def supervision(self, algorithm: Algorithm, episodes: Sequence[Episode]) -> Supervision:
        """That of ``episodes``. Asks the teacher, whose errors are those of `Teacher.lessons`."""
        masked = masked_calls(algorithm, episodes)
        return Supervision(
            lessons=Lessons() if self.teacher is None else self.teacher.lessons(episodes, masked=masked),
            targets=Targets() if self.tokens is None else self.tokens.targets(episodes),
        )


def masked_calls(algorithm: Algorithm, episodes: Sequence[Episode]) -> set[str]:
    """With ``algorithm.truncated: mask`` responses cut at the limit are context only."""
    if algorithm.truncated != "mask":
        return set()
    return {t.call for episode in episodes for t in episode.transitions if t.finish_reason == "length"}
