"""One step's batch: rollouts with credit, where groups that taught nothing have been replaced.

A group whose every advantage is 0 has no gradient: its attempts all earned the same. With ``rollouts.refill`` other tasks are tried in
the place of such groups, up to that many a step (dynamic sampling, DAPO, arXiv 2503.14476); those that are still there when
the budget is spent stay in the batch, and count where the loss takes means.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from lightning_core.credit import Credit, CreditRules, Episode
from lightning_core.rollouts.entries import pick_tasks
from lightning_core.rollouts.runner import Rollout, Task
from lightning_core.session import Circle


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What one update is made from."""

    rollouts: Sequence[Rollout]
    """All that were made, those of replaced groups too."""
    episodes: Sequence[Episode]
    """What is trained on."""
    credit: Credit
    rewards: Sequence[float]
    """The agents' own returns in all rollouts that came about, those of replaced groups too: how good the policy is."""
    refilled: int
    """Groups that were replaced."""


def sample_batch(circle: Circle, tasks: Sequence[Task], rules: Mapping[str, CreditRules]) -> Batch:
    """A group of attempts at each of the step's tasks, under the policies as they are, and each call's credit by its policy's rules."""
    config, step = circle.config.rollouts, circle.trainer.steps
    chosen = pick_tasks(tasks, circle.config, step)
    rollouts = circle.roll_out(chosen, copies=config.group_size, phase="train")
    episodes = circle.episodes(rollouts)
    rewards = [e.reward for e in episodes]
    episodes = circle.judge(episodes)
    credit = circle.credit(episodes, rules)

    spare = spare_tasks(tasks, chosen, seed=f"{circle.config.run.seed}:{step}")
    refilled = 0
    while refilled < config.refill:
        flat = without_signal(episodes, credit)
        others = list(islice(spare, min(len(flat), config.refill - refilled)))
        if not others:
            break
        refilled += len(others)
        more = circle.roll_out(others, copies=config.group_size, phase="train")
        fresh = circle.episodes(more)
        rollouts = [*rollouts, *more]
        rewards += [e.reward for e in fresh]
        replaced = set(flat[: len(others)])
        episodes = [*(e for e in episodes if e.task_id not in replaced), *circle.judge(fresh)]
        credit = circle.credit(episodes, rules)
    return Batch(rollouts=rollouts, episodes=episodes, credit=credit, rewards=rewards, refilled=refilled)


def without_signal(episodes: Sequence[Episode], credit: Credit) -> list[str]:
    """The tasks all of whose advantages are 0."""
    signal: dict[str, bool] = {}
    for e in episodes:
        found = any(credit.advantages[t.call] for t in e.transitions)
        signal[e.task_id] = signal.get(e.task_id, False) or found
    return [task for task, found in signal.items() if not found]


def spare_tasks(tasks: Sequence[Task], chosen: Sequence[Task], *, seed: str) -> Iterator[Task]:
    """The tasks that are not in ``chosen``, in an order that ``seed`` decides."""
    taken = {t["id"] for t in chosen}
    others = [t for t in tasks if t["id"] not in taken]
    yield from random.Random(f"{seed}:spare").sample(others, len(others))
