"""Rollouts with candidate prompts, within a budget: the same tasks and seeds for each candidate."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning_core.capture.selectors import find_selector
from lightning_core.config import Config
from lightning_core.config.prompts import PromptSection, make_prompts
from lightning_core.errors import ConfigError
from lightning_core.records.statistics.intervals import MIN_TASKS, compare
from lightning_core.records.store import LEFT_OUT
from lightning_core.rollouts.abort_checks import check_finished
from lightning_core.rollouts.attempt import Group, Rollout, Task
from lightning_core.rollouts.collect import Collector
from lightning_core.rollouts.selection import trained_agents
from lightning_core.trainers.open_run import EmbeddedRun

AgentSections = Mapping[str, PromptSection]
"""Prompts by agent, as under ``prompts`` in a configuration."""


_BY_PROMPT = ("overflow", "refused")
"""The statuses of rollouts that a training run leaves out, but that a prompt may have caused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSplit:
    """The training tasks of a search: `collected` for rollouts to learn from, `validation` to compare candidates."""

    collected: Sequence[Task]
    validation: Sequence[Task]


def split_tasks(tasks: Sequence[Task], *, seed: int, validation: int) -> TaskSplit:
    """``tasks`` in an order that depends on ``seed``, with at most ``validation`` of them, and at most half, to compare candidates.

    Raises `ConfigError` if there are too few for an interval.
    """
    ordered = random.Random(f"{seed}:prompts").sample(list(tasks), len(tasks))
    number = min(validation, len(tasks) // 2)
    if number < MIN_TASKS:
        raise ConfigError(
            f"found {len(tasks)} training tasks and a budget for {validation} validation tasks; expected at least {2 * MIN_TASKS} tasks, "
            f"half of them to compare prompts, since an interval needs {MIN_TASKS}. Add tasks to tasks.train, or raise --budget"
        )
    return TaskSplit(collected=ordered[number:], validation=ordered[:number])


@dataclass(kw_only=True)
class PromptSearch:
    """Runs the agent with candidate prompts. Rollouts are recorded in the store of ``run``, a step for each evaluation."""

    config: Config
    run: EmbeddedRun
    budget: int
    """Most rollouts of training tasks."""
    on_phase: Callable[[str, int], None] = lambda name, total: None
    on_rollout: Callable[[Rollout], None] = lambda rollout: None
    spent: int = 0
    """The number of rollouts of training tasks so far."""
    left_out: int = 0
    """The number of rollouts that ended for a reason outside the agent, or with an invalid reward."""
    refused: int = 0
    """The number of rollouts with a refused request, such as a prompt that filled the context; they count as 0."""
    steps: int = 0
    """The number of evaluations so far."""
    _known: dict[tuple[str, str], Rollout] = field(default_factory=dict[tuple[str, str], Rollout])
    """The first rollout of a task with the same prompts, which has the same seed."""

    @property
    def left(self) -> int:
        """The rollouts of training tasks that the budget still has."""
        return max(0, self.budget - self.spent)

    def evaluate(self, sections: AgentSections, tasks: Sequence[Task]) -> list[Rollout]:
        """One rollout of each of the training ``tasks`` with the prompts ``sections``; of each of these once.

        Tasks that the budget has no rollout for are not in the result, nor those without an outcome.
        """
        labels = _key(sections)
        new = [task for task in tasks if (labels, str(task["id"])) not in self._known][: self.left]
        self.spent += len(new)
        for rollout in self.roll_out(sections, new) if new else ():
            self._known[labels, rollout.job.task_id] = rollout
        return [known for task in tasks if (known := self._known.get((labels, str(task["id"])))) is not None]

    def collect(self, sections: AgentSections, tasks: Sequence[Task], *, attempts: int) -> list[Rollout]:
        """``attempts`` rollouts of each of ``tasks`` that the budget has them for, at the temperature of training."""
        tasks = tasks[: self.left // attempts]
        self.spent += attempts * len(tasks)
        temperature = self.config.rollouts.temperature
        return self.roll_out(sections, tasks, samples=attempts, temperature=temperature) if tasks else []

    def roll_out(
        self, sections: AgentSections, tasks: Sequence[Task], *, samples: int = 1, temperature: float | None = None
    ) -> list[Rollout]:
        """``samples`` rollouts of each of ``tasks``. Raises `InfrastructureError` if all were left out."""
        own = {"samples": samples} if temperature is None else {"samples": samples, "temperature": temperature}
        candidate = self.config.model_copy(
            update={"prompts": dict(sections), "eval": self.config.eval.model_copy(update=own)}
        )
        collector = Collector(candidate, self.run.agents, self.run.store, on_rollout=self.on_rollout)
        self.on_phase("eval_manual", samples * len(tasks))
        groups: list[Group] = self.run.background.call(_roll_out, collector, tasks, self.steps)
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        if self.steps == 0:
            collector.check(groups, measured=True)  # names, once
        if not all(r.status in _BY_PROMPT for r in rollouts) or any(group.lost for group in groups):
            check_finished(rollouts, [group.error or "" for group in groups for _ in range(group.lost)])
        self.steps += 1
        self.refused += sum(r.status in _BY_PROMPT for r in rollouts)
        self.left_out += sum(group.lost for group in groups)
        self.left_out += sum(r.status in LEFT_OUT and r.status not in _BY_PROMPT for r in rollouts)
        return rollouts

    def agents(self, rollouts: Sequence[Rollout]) -> dict[str, str]:
        """The trained agents with calls in ``rollouts``: their names, and the selectors that name them in the configuration."""
        traces = [rollout.trace for rollout in rollouts]
        spoke = {call.agent for trace in traces for call in trace.calls}
        selectors = (*self.config.prompts, *self.config.agents.trained_names)
        return {
            name: find_selector(selectors, name) or name
            for name in sorted(trained_agents(self.config, traces))
            if name in spoke
        }


async def _roll_out(collector: Collector, tasks: Sequence[Task], step: int) -> list[Group]:
    try:
        async with asyncio.TaskGroup() as running:
            groups = [running.create_task(collector.roll_out(task, "eval_manual", step)) for task in tasks]
    except BaseExceptionGroup as raised:
        raise raised.exceptions[0] from None
    return [group.result() for group in groups]


def rewards_of(rollouts: Sequence[Rollout]) -> dict[str, list[float]]:
    """The rewards of ``rollouts`` by task, without those that were left out. One with a refused request counts as 0.

    A long prompt can fill the context.
    """
    rewards: dict[str, list[float]] = {}
    for rollout in rollouts:
        if rollout.status in _BY_PROMPT:
            rewards.setdefault(rollout.job.task_id, []).append(0.0)
        elif rollout.status not in LEFT_OUT:
            rewards.setdefault(rollout.job.task_id, []).append(rollout.reward)
    return rewards


def is_better(after: Sequence[Rollout], before: Sequence[Rollout]) -> bool:
    """Whether the mean reward of ``after`` is higher than that of ``before``, on the tasks that both have a reward of."""
    first, last = rewards_of(before), rewards_of(after)
    return bool(first.keys() & last.keys()) and compare(first, last).improvement > 0


def changed(section: PromptSection | None, **fields: Any) -> PromptSection:
    """``section``, or an empty one, with other ``fields``."""
    before = {} if section is None else section.model_dump()
    return PromptSection.model_validate({**before, **fields})


def _key(sections: AgentSections) -> str:
    return " ".join(sorted(prompt.label for prompt in make_prompts(sections).by_agent.values()))
