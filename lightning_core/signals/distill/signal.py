"""A teacher's scores of the sampled tokens, as token streams."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_core.config.algorithm import Algorithm
from lightning_core.config.prompts import make_prompts
from lightning_core.credit import Episode
from lightning_core.errors import ConfigError
from lightning_core.rollouts.rows import masked_calls
from lightning_core.rollouts.signal import Resources, Signal, TokenScorer
from lightning_core.signals.distill.section import Distill, distill_of, prompt_function
from lightning_core.signals.distill.server_scorer import open_scorer
from lightning_core.signals.distill.teacher import Teacher
from lightning_core.trace import POLICY
from lightning_core.transitions import Streams


@dataclass(frozen=True, kw_only=True)
class DistillSignal(Signal):
    """The teacher of a run."""

    teacher: Teacher
    algorithm: Algorithm

    def streams(self, episodes: Sequence[Episode]) -> Streams:
        """The teacher's terms for the calls of ``episodes``. Raises the errors of `Teacher.streams`."""
        return self.teacher.streams(episodes, masked=masked_calls(self.algorithm, episodes))


def open_signal(resources: Resources) -> Signal | None:
    """The teacher of ``algorithm.distill``, if it is set. Raises `ConfigError` for a model that cannot be the teacher."""
    config = resources.config
    distill = distill_of(config.algorithm)
    if distill is None:
        return None
    teacher = Teacher(
        settings=distill,
        scorer=_open_scorer(resources, distill),
        chat=resources.chats[POLICY],
        max_context=resources.max_context,
        prompt=prompt_function(distill),
        prompts=make_prompts(distill.prompts),
    )
    return DistillSignal(teacher=teacher, algorithm=config.algorithm)


def _open_scorer(resources: Resources, distill: Distill) -> TokenScorer:
    if distill.server is not None:
        return open_scorer(distill, resources.chats[POLICY].tokenizer, vocabulary=resources.vocabulary)
    assert resources.scorer is not None, "the configuration requires a server with this trainer"
    try:
        return resources.scorer(distill.teacher)
    except ConfigError as error:
        raise ConfigError(f"algorithm.distill.teacher: {error}") from error
