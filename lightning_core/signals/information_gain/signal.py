"""Scores the answers of tasks at the prompts of calls, and records the scores."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from lightning_core.config.build_rules import policy_rules
from lightning_core.credit import Episode
from lightning_core.records.store import Store
from lightning_core.rollouts.attempt import Task
from lightning_core.rollouts.counts import add_counts
from lightning_core.rollouts.signal import Resources, Signal
from lightning_core.signals.information_gain.answer_scores import AnswerScorer
from lightning_core.signals.information_gain.gains import ANSWER_LOGPROBS
from lightning_core.signals.information_gain.section import NEED, answer_function, settings_of
from lightning_core.trace import POLICY


@dataclass(kw_only=True)
class InformationGainSignal(Signal):
    """The answers of a run."""

    scorer: AnswerScorer
    policies: Collection[str]
    """The policies whose reward rule uses the scores."""
    store: Store
    _counts: dict[str, float] = field(default_factory=dict[str, float])

    async def annotate(
        self, episodes: Sequence[Episode], tasks: Mapping[str, Task], step: int, *, required: bool
    ) -> Sequence[Episode]:
        """``episodes`` with the logprobs of their tasks' answers among the arrays of calls."""
        scored = await asyncio.to_thread(self.scorer.score, episodes, tasks, self.policies)
        await asyncio.to_thread(self.store.add_arrays, ANSWER_LOGPROBS, scored.arrays())
        self._counts = add_counts(self._counts, scored.counts)
        return scored.episodes

    def counts(self) -> Mapping[str, float]:
        """The tokens and calls that were scored."""
        counted, self._counts = self._counts, {}
        return counted


def open_signal(resources: Resources) -> Signal | None:
    """The answers of ``credit.information_gain``, if it is set and the trainer scores tokens."""
    settings = settings_of(resources.config.credit)
    if settings is None or resources.scorer is None:
        return None
    rules = policy_rules(resources.config)
    return InformationGainSignal(
        scorer=AnswerScorer(
            settings=settings,
            function=answer_function(settings),
            logprobs=resources.scorer(POLICY).logprobs,
            chats=resources.chats,
            max_context=resources.max_context,
        ),
        policies={name for name, own in rules.items() if NEED in own.reward_rule.needs},
        store=resources.store,
    )
