"""Measures what an update changed: the logprobs of some of the responses that it was trained on (``trainer.measure_change``)."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from lightning_core.errors import describe
from lightning_core.records.store import Store
from lightning_core.trace import LOGPROBS_AFTER, POLICY, pack
from lightning_core.trainers import Learner
from lightning_core.transitions import Row

logger = logging.getLogger(__name__)


class LogprobChange:
    """Records new logprobs, which the viewer shows."""

    def __init__(self, learner: Learner, store: Store, *, rollouts: int) -> None:
        """``rollouts``: at most so many of a step are measured."""
        self._learner = learner
        self._store = store
        self._rollouts = rollouts

    def measure(self, rows: Sequence[Row], step: int) -> None:
        """Record the logprobs after update ``step`` of what rollouts of ``rows`` with a gradient sampled.

        After an error, which is logged, nothing more is measured; the update is done.
        """
        trained = [row for row in rows if row.has_gradient]
        chosen = list(dict.fromkeys(row.rollout for row in trained))[: self._rollouts]
        rows = [row for row in trained if row.rollout in chosen]
        if not rows:
            return
        rollout_of = {segment.call: row.rollout for row in rows for segment in row.segments}
        try:
            after = self._learner.scorer(POLICY).logprobs(rows)
        except Exception as error:
            self._rollouts = 0
            logger.warning(
                "trainer.measure_change: not measured from step %d on: %s. Set it to 0, or to fewer rollouts",
                *(step, describe(error)),
                exc_info=logger.isEnabledFor(logging.DEBUG),
            )
            return
        arrays = {(rollout_of[call], call): pack(found, "<f4") for call, found in after.items()}
        self._store.add_arrays(LOGPROBS_AFTER, arrays)
