"""Checks whether the rollouts of a step or an evaluation stop the run."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Sequence

from lightning_core.config import Config
from lightning_core.errors import ConfigError, InfrastructureError, RewardError, TimeLimitError, TrainingError
from lightning_core.records.store import LEFT_OUT
from lightning_core.rollouts.attempt import Group, Rollout
from lightning_core.rollouts.selection import check_agents

logger = logging.getLogger(__name__)

_REMEDIES = {
    "invalid": "Correct the reward",
    "overflow": "Shorten what tools return, raise policy.max_context if it is below the model's own limit, end the conversation with a "
    "reward, or set rollouts.on_refused",
    "refused": "Correct the part of the request that the error names",
    "unauthorized": "Let the client send the key that it was given; a hook, an adapter or a proxy of the client may set another one",
    "late": "Lower rollouts.concurrency, or check why requests do not arrive in time",
    "stream_error": "Check the provider that reported the error",
}
"""For the statuses whose errors do not say what to do, or say it to the agent."""
_OWN_TIME = "Raise rollouts.timeout_seconds, or make the agent and its tools faster"
"""The time without model calls and waits, which neither the provider nor the number of rollouts changes much."""
_WAITED = "Lower rollouts.concurrency, check the provider, or raise the limit or the time-out that the error names"


class AbortChecks:
    """Stops a run whose rollouts cannot be trained on."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._names_checked = False
        self._invalid = 0
        """Number of rollouts with an invalid reward."""

    def count(self, rollout: Rollout) -> None:
        """Raise `RewardError` if ``rollout`` has an invalid reward and is one more than ``rollouts.max_invalid``."""
        if rollout.status != "invalid":
            return
        self._invalid += 1
        most, error = self._config.rollouts.max_invalid, (rollout.error or "").removeprefix("RewardError: ")
        if self._invalid > most + 1:  # the run is ending
            return
        if self._invalid > most:
            raise RewardError(
                f"{error}. Correct the reward, or let the run leave out such rollouts: {self._invalid} so far, and rollouts.max_invalid is "
                f"{most}"
            )
        logger.warning("a rollout is left out (%d of rollouts.max_invalid = %d): %s", self._invalid, most, error)

    def check(self, groups: Sequence[Group], *, whole: bool = True, measured: bool = False) -> None:
        """Raise an error if no rollout finished or, if ``whole``, none has a reward; at first also for unknown agents
        (``measured``: see `check_agents`)."""
        if not groups:
            raise ConfigError("found no tasks to run, expected at least one; check the list of tasks")
        rollouts = [r for g in groups for r in g.rollouts]
        lost = [g.error or "" for g in groups for _ in range(g.lost)]
        check_finished(rollouts, lost)
        if not self._names_checked:
            check_agents(self._config, rollouts, measured=measured)
            self._names_checked = True
        if whole:
            check_rewarded(rollouts, lost)


def check_finished(rollouts: Sequence[Rollout], lost: Sequence[str]) -> None:
    """Raise `InfrastructureError` if every rollout was left out. ``lost``: the errors of jobs without a rollout."""
    if not all(r.status in LEFT_OUT for r in rollouts):
        return
    statuses = Counter[str](r.status for r in rollouts)
    statuses["infrastructure"] += len(lost)
    what, advice = "had an infrastructure failure", ""
    if +statuses != Counter(infrastructure=statuses.total()):
        counts = ", ".join(f"{number} {status}" for status, number in statuses.most_common() if number)
        what = f"were left out ({counts})"
        advice = "".join(f". {remedy}" for remedy in remedies(rollouts))
    raise InfrastructureError(f"all {statuses.total()} rollouts {what}; the first: {_first(rollouts, lost)}{advice}")


def remedies(rollouts: Sequence[Rollout]) -> Iterator[str]:
    """What to do about ``rollouts`` that were left out, the most frequent reason first; without infrastructure failures, whose errors
    say it."""
    for status, _ in Counter[str](r.status for r in rollouts).most_common():
        if status == "timeout":
            at_limit = [_is_own_time(r) for r in rollouts if r.status == status]
            yield from ([_OWN_TIME] if any(at_limit) else []) + ([] if all(at_limit) else [_WAITED])
        elif status in _REMEDIES:
            yield _REMEDIES[status]


def _is_own_time(rollout: Rollout) -> bool:
    """Whether ``rollout`` was stopped after ``rollouts.timeout_seconds``."""
    return (rollout.error or "").startswith(TimeLimitError.__name__)


def _is_cut(rollout: Rollout) -> bool:
    """Whether a response in ``rollout`` that was sampled here ended at the limit of its tokens."""
    return any(c.finish_reason == "length" and c.target is None for c in rollout.trace.calls)


def check_rewarded(rollouts: Sequence[Rollout], lost: Sequence[str]) -> None:
    """Raise `TrainingError` if no rollout has a reward. ``lost``: as for `check_finished`."""
    if any(r.has_reward for r in rollouts):
        return
    if any(r.status == "max_calls" for r in rollouts):
        advice = "Raise rollouts.max_calls, or give rewards with reward() before the agent is done"
    elif any(map(_is_own_time, rollouts)):
        advice = (
            "Raise rollouts.timeout_seconds, or set rollouts.max_calls if the agent ends only when the model says so"
        )
    else:
        advice = "If the agent can fail at every task, return a reward instead of raising"
        if cut := sum(map(_is_cut, rollouts)):
            advice += (
                f". {cut} of them had a response that ended at the token limit: if that is the cause, raise rollouts.max_tokens, and the "
                "request's own limit if it has one"
            )
    raise TrainingError(
        f"all {len(rollouts) + len(lost)} rollouts failed; the first error: {_first(rollouts, lost)}. {advice}"
    )


def _first(rollouts: Sequence[Rollout], lost: Sequence[str]) -> str:
    return next((error for error in (*lost, *(r.error for r in rollouts)) if error), "no rollouts")
