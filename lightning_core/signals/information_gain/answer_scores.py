"""Scores the answers of tasks under the policy (``credit.information_gain``).

At the prompt of each trained call, ``prefix`` and the task's answer take the place of the response. The logprobs of the answer's tokens
become the call's array `ANSWER_LOGPROBS` (IGPO, arXiv 2510.14967). Nothing is sampled. All calls of a step are scored in one pass, in
which prompts that continue each other are computed once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np

from lightning_core.chat.chat import Chat
from lightning_core.config.imports import user_code
from lightning_core.credit import Episode
from lightning_core.errors import ConfigError, show
from lightning_core.model.forest import common_prefix
from lightning_core.rollouts.attempt import Task
from lightning_core.signals.information_gain.gains import ANSWER_LOGPROBS
from lightning_core.signals.information_gain.section import InformationGain
from lightning_core.trace import Floats, pack
from lightning_core.transitions import Row, Segment, Transition

logger = logging.getLogger(__name__)

Logprobs = Callable[[Sequence[Row]], Mapping[str, Floats]]
"""The policy's logprobs of the masked tokens of rows: float32 [T] by call id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredEpisodes:
    """Episodes whose calls have the logprobs of the answer."""

    episodes: Sequence[Episode]
    counts: Mapping[str, float] = field(default_factory=dict[str, float])

    def arrays(self) -> dict[tuple[str, str], bytes]:
        """The logprobs by rollout and call, as recorded."""
        calls = (call for e in self.episodes for call in e.trace.calls)
        return {(c.rollout, c.id): pack(c.arrays[ANSWER_LOGPROBS], "<f4") for c in calls if ANSWER_LOGPROBS in c.arrays}


@dataclass(kw_only=True)
class AnswerScorer:
    """Scores the answers of a run's tasks."""

    settings: InformationGain
    logprobs: Logprobs
    chats: Mapping[str, Chat]
    """The chat format of each policy."""
    max_context: int
    function: Callable[[Task], Any] | None = None
    """The function that ``settings.answer`` names."""
    _said: bool = False
    """Whether tasks without an answer were logged."""

    def score(
        self, episodes: Sequence[Episode], tasks: Mapping[str, Task], policies: Collection[str]
    ) -> ScoredEpisodes:
        """``episodes`` with the logprobs of their tasks' answers at the calls of ``policies``.

        ``tasks``: by id. A call whose prompt leaves no room for the answer is not scored, and counted. Raises `ConfigError` if the
        answer of a task is not a text.
        """
        answers = {identity: find_answer(task, self.settings.answer, self.function) for identity, task in tasks.items()}
        self._log_missing(answers)
        chosen = [t for e in episodes for t in e.transitions if t.policy in policies]
        known = [(t, answer) for t in chosen if (answer := answers[t.task_id]) is not None]
        rows = [row for t, answer in known if (row := self._row(t, answer)) is not None]
        found = self.logprobs(rows) if rows else {}
        counts = {
            "tokens_scored": count_tokens(rows),
            "calls_scored": len(found),
            "calls_unscored": len(known) - len(found),
            "answer_logprob_sum": sum(float(logprobs_A.mean()) for logprobs_A in found.values()),
            "rollouts_without_answer": sum(answers[e.task_id] is None for e in episodes),
        }
        return ScoredEpisodes(episodes=[with_answers(e, found) for e in episodes], counts=counts)

    def _log_missing(self, answers: Mapping[str, str | None]) -> None:
        missing = [identity for identity, answer in answers.items() if answer is None]
        if missing and not self._said:
            self._said = True
            logger.warning(
                "%d of %d tasks have no answer (credit.information_gain.answer: %s), such as %r: their calls have credit from rewards "
                "only. The metric rollouts_without_answer counts them from now on",
                *(len(missing), len(answers), self.settings.answer, missing[0]),
            )

    def _row(self, transition: Transition, answer: str) -> Row | None:
        """The prompt of ``transition``, the prefix and ``answer``; None if they do not fit."""
        said, first = self.chats[transition.policy].forced(self.settings.prefix, answer)
        start, stop = len(transition.prompt_ids) + first, len(transition.prompt_ids) + len(said)
        if stop > self.max_context:
            return None
        mask = np.zeros(stop, dtype=np.bool_)
        mask[start:] = True
        return Row(
            # A separate row: no call continues it.
            rollout=f"{transition.rollout}-{transition.call}",
            agent=transition.agent,
            policy=transition.policy,
            token_ids=np.concatenate([transition.prompt_ids, np.array(said, dtype="<u4")]),
            mask=mask,
            logprobs=np.zeros(stop, dtype=np.float32),
            temperatures=np.ones(stop, dtype=np.float32),
            advantages=None,
            segments=(
                Segment(
                    call=transition.call,
                    start=start,
                    stop=stop,
                    version=transition.version,
                    constraint=None,
                    digest=None,
                ),
            ),
        )


def find_answer(task: Task, name: str, function: Callable[[Task], Any] | None) -> str | None:
    """The answer of ``task``; None if it has none, or an empty one. ``function``: what ``name`` names, unless it is a key.

    Raises `ConfigError` if the answer is not a text, or the function fails.
    """
    answer: object
    if function is None:
        answer = task.get(name)
    else:
        with user_code(f"credit.information_gain.answer: {name!r} failed"):
            answer = function(task)
    if isinstance(answer, int | float) and not isinstance(answer, bool):
        answer = str(answer)
    if answer is not None and not isinstance(answer, str):
        place = f"task {task['id']!r} has" if function is None else f"{name!r} returned"
        raise ConfigError(
            f"credit.information_gain.answer: {place} {show(answer)}; expected text, or None for a task without an answer. Of several "
            "right answers, return one"
        )
    return answer or None


def count_tokens(rows: Sequence[Row]) -> int:
    """The tokens of ``rows``, with beginnings that rows of a policy share counted once."""
    total = 0
    for policy in {row.policy for row in rows}:
        ordered = sorted((row.token_ids for row in rows if row.policy == policy), key=lambda ids: ids.tobytes())
        total += sum(map(len, ordered)) - sum(common_prefix(a, b) for a, b in pairwise(ordered))
    return total


def with_answers(episode: Episode, scores: Mapping[str, Floats]) -> Episode:
    """``episode`` with the logprobs of the answer at its calls."""
    calls = tuple(
        replace(c, arrays={**c.arrays, ANSWER_LOGPROBS: scores[c.id]}) if c.id in scores else c
        for c in episode.trace.calls
    )
    return replace(episode, trace=replace(episode.trace, calls=calls))
