"""The log of attempts that fail: each reason a few times, with the lines of the program that raised it."""

from __future__ import annotations

import logging

from lightning_core.errors import COUNTED, Repeats
from lightning_core.records.ledger import general_reason
from lightning_core.rollouts.containment import chain
from lightning_core.rollouts.executors.failures import CarriedError
from lightning_core.rollouts.outcome import Outcome

logger = logging.getLogger(__name__)

_MOST_REASONS = 10
"""Most different reasons whose lines are logged."""


class FailureLog:
    """Logs the first failure for each reason, then the 10th, the 100th and so on. Used on one thread."""

    def __init__(self) -> None:
        self._raised = Repeats()
        self._reasons: set[str] = set()
        self._is_full = False
        """Whether it was logged that further reasons are not."""
        self._retried = Repeats()
        self._early = Repeats()

    def raised(self, task: str, outcome: Outcome, error: Exception | None) -> None:
        """Log the lines of the agent or of the reward function that raised ``error``, which ended an attempt at ``task``."""
        if outcome.status == "max_calls" and (times := self._raised.count(outcome.status)) is not None:
            logger.warning("task %r: %s%s", task, outcome.error, times, extra=COUNTED)
        carried = None if error is None else next((e for e in chain(error) if isinstance(e, CarriedError)), None)
        # An infrastructure failure that the agent raised is logged as one.
        if carried is None or outcome.status != ("failed" if carried is error else "infrastructure"):
            return
        reason = general_reason(outcome.error or "")
        if len(self._reasons) >= _MOST_REASONS and reason not in self._reasons:
            if not self._is_full:
                self._is_full = True
                logger.warning(
                    "task %r failed for a new reason; the log has only the first %d. To list all failures: "
                    "lightning-rl trace RUN --status %s",
                    task,
                    _MOST_REASONS,
                    outcome.status,
                    extra=COUNTED,
                )
            return
        self._reasons.add(reason)
        if (times := self._raised.count(reason)) is not None:
            what = "the agent failed" if carried is error else "the reward function failed"
            logger.warning("task %r: %s%s:\n%s", task, what, times, carried.explained, extra=COUNTED)

    def retrying(self, task: str, attempt: int, error: str | None) -> None:
        """Log that ``attempt`` (from 1) at ``task`` failed and is repeated."""
        if (times := self._retried.count(general_reason(error or ""))) is not None:
            logger.warning("task %r: attempt %d failed (%s); retrying%s", task, attempt, error, times, extra=COUNTED)

    def returned_early(self, task: str) -> None:
        """Log that the agent returned, with a reward that counts, before one of its model requests was answered."""
        if (times := self._early.count("early")) is not None:
            logger.warning(
                "task %r: the agent returned before one of its model requests was answered, so its reward may depend on how fast models "
                "answer. Have it wait for the answer, or for longer, if the result needs it%s",
                *(task, times),
                extra=COUNTED,
            )
