"""Adds forks to the groups of a step."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from lightning_core.config import Config
from lightning_core.errors import COUNTED, InfrastructureError, Repeats
from lightning_core.records.ledger import general_reason
from lightning_core.rollouts.attempt import Group, Job, Rollout
from lightning_core.rollouts.selection import trained_agents
from lightning_core.rollouts.signal import Resources, RunJobs, Signal
from lightning_core.signals.forks.points import fork_jobs, reason_to_drop
from lightning_core.signals.forks.replayed_tools import check_tools, count_tools, kept_tools, not_kept
from lightning_core.signals.forks.section import Forks, forks_of
from lightning_core.signals.forks.tool_results import ToolResults

logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class ForksSignal(Signal):
    """The forks of a run."""

    settings: Forks
    config: Config
    _logged: Repeats = field(default_factory=Repeats)
    _is_checked: bool = False

    def prepare(self, job: Job) -> Job:
        """``job`` with the tools whose results its forks may take from the record."""
        return replace(job, tools=kept_tools(self.settings))

    async def extend(self, group: Group, run: RunJobs) -> Group:
        """``group`` with forks of its attempts."""
        for attempt in group.rollouts:
            for tool, reason in not_kept(attempt.trace):
                self._log("the tool %r runs again in forks%s: %s", attempt, reason, key=tool, named=(tool,))
        agents = trained_agents(self.config, (r.trace for r in group.rollouts))
        jobs = fork_jobs(group.rollouts, self.settings, agents)
        if not jobs:
            return group
        try:
            forks = await run(jobs, "fork", reason_to_drop)
        except InfrastructureError as error:
            logger.error("task %r: %d forks are left out: %s", group.task["id"], len(jobs), error)
            return replace(group, counts=_count((), dropped=len(jobs)))
        for fork, reason in forks:
            if reason is not None:
                self._log("a fork is dropped%s: %s", fork, reason, key=fork.status)
        used = [fork for fork, reason in forks if reason is None]
        sampled = sum(_sampled_tokens(fork) for fork, _ in forks)
        return replace(group, more=used, counts=_count(used, dropped=len(jobs) - len(used), sampled=sampled))

    def check(self, groups: Sequence[Group]) -> None:
        """Check the names of tools against those that ran in the first training step."""
        rollouts = [r for g in groups for r in g.rollouts]
        results = next((tools for r in rollouts if isinstance(tools := r.job.tools, ToolResults)), None)
        if results is not None and not self._is_checked:
            self._is_checked = True
            check_tools(results, [r.trace for r in rollouts])

    def _log(self, text: str, rollout: Rollout, reason: str, *, key: str, named: tuple[str, ...] = ()) -> None:
        """Log ``text`` with ``named`` and ``reason``: the first time, the 10th and so on for equal keys and reasons."""
        if (times := self._logged.count((text, key, general_reason(reason)))) is not None:
            logger.warning(f"task %r: {text}", rollout.job.task_id, *named, times, reason, extra=COUNTED)


def _count(forks: Sequence[Rollout], *, dropped: int, sampled: int = 0) -> dict[str, float]:
    """Forks, dropped ones, the tokens that both sampled after the calls that they repeat, and the tools of the former."""
    tools = [count_tools(fork.trace) for fork in forks]
    return {
        "forks": len(forks),
        "forks_dropped": dropped,
        "tokens_forked": sampled,
        **{name: sum(found[name] for found in tools) for name in ("fork_tools_recorded", "fork_tools_live")},
    }


def _sampled_tokens(fork: Rollout) -> int:
    """The number of tokens that ``fork`` sampled itself."""
    return sum(len(c.output_ids) for c in fork.trace.calls if c.replays is None and c.output_ids is not None)


def open_signal(resources: Resources) -> Signal | None:
    """The forks of ``rollouts.forks``, if they are set."""
    forks = forks_of(resources.config.rollouts)
    return None if forks is None else ForksSignal(settings=forks, config=resources.config)
