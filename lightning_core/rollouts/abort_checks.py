"""When the rollouts of a step or an evaluation stop the run."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from lightning_core.errors import InfrastructureError, RewardError, TrainingError
from lightning_core.records.store import LEFT_OUT
from lightning_core.rollouts.attempt import Rollout

logger = logging.getLogger(__name__)


class InvalidRewards:
    """Counts rollouts with an invalid reward, of which ``most`` are left out."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._found = 0

    def count(self, rollout: Rollout) -> None:
        """Raise `RewardError` if ``rollout`` is one too many."""
        if rollout.status != "invalid":
            return
        self._found += 1
        error = (rollout.error or "").removeprefix("RewardError: ")
        if self._found > self._most + 1:  # the run is ending
            return
        if self._found > self._most:
            raise RewardError(
                f"{error}. Correct the reward, or let the run leave out such rollouts: {self._found} so far, and rollouts.max_invalid is "
                f"{self._most}"
            )
        logger.warning("a rollout is left out (%d of rollouts.max_invalid = %d): %s", self._found, self._most, error)


def check_finished(rollouts: Sequence[Rollout], lost: Sequence[str]) -> None:
    """Raise `InfrastructureError` if every rollout was left out. ``lost``: the errors of jobs without a rollout."""
    if all(r.status in LEFT_OUT for r in rollouts):
        what = "were left out" if any(r.status == "invalid" for r in rollouts) else "had an infrastructure failure"
        raise InfrastructureError(
            f"all {len(rollouts) + len(lost)} rollouts {what}; the first: {_first(rollouts, lost)}"
        )


def check_rewarded(rollouts: Sequence[Rollout], lost: Sequence[str]) -> None:
    """Raise `TrainingError` if no rollout has a reward. ``lost``: as for `check_finished`."""
    if not any(r.has_reward for r in rollouts):
        raise TrainingError(
            f"all {len(rollouts) + len(lost)} rollouts failed; the first error: {_first(rollouts, lost)}. If the agent can fail at every "
            "task, return a reward instead of raising"
        )


def _first(rollouts: Sequence[Rollout], lost: Sequence[str]) -> str:
    return next((error for error in (*lost, *(r.error for r in rollouts)) if error), "no rollouts")
