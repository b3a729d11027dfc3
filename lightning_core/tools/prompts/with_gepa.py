"""System prompts by GEPA (arXiv 2507.19457): a model reads rollouts with their feedback and proposes another prompt.

The search is that of the package ``gepa``; here are its adapter to rollouts, and the feedback.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from lightning_core.errors import MissingExtra, shorten
from lightning_core.records.statistics.solved import is_solved
from lightning_core.records.store import LEFT_OUT
from lightning_core.rollouts.attempt import Rollout, Task
from lightning_core.tools.prompts.bootstrap import conversations_of
from lightning_core.tools.prompts.reflection import ReflectionModel
from lightning_core.tools.prompts.search import AgentSections, PromptSearch, TaskSplit, changed, is_better
from lightning_core.trace import REWARD_FUNCTION, Trace

logger = logging.getLogger(__name__)

_MINIBATCH = 3
"""Rollouts that one proposal is made from, as in GEPA."""
_MOST_SHOWN = 2000
"""Characters of a text in the feedback."""
_SYSTEM_ROLES = ("system", "developer")


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnPrompt:
    """The system prompt of an agent as it is now, from which the search starts."""

    text: str
    replaces: bool
    """Whether proposals replace it; they are appended if the agent writes a different one for each task."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GepaResult:
    """The best system prompts, and what was tried."""

    sections: AgentSections
    """The prompts with the best texts; the original ones if none has a higher mean reward."""
    candidates: int
    """Number of combinations of system prompts that were evaluated on all validation tasks, with the original one."""


class RolloutAdapter:
    """A ``GEPAAdapter`` of the package ``gepa``: a candidate has a system prompt for each agent."""

    propose_new_texts = None

    def __init__(
        self, search: PromptSearch, sections: AgentSections, own: Mapping[str, OwnPrompt], names: Mapping[str, str]
    ) -> None:
        """``sections``: the prompts so far. ``own``: by selector. ``names``: the agents, with their selectors."""
        self._search = search
        self._sections = sections
        self._own = own
        self._names = names
        self._batch: Any = import_module("gepa.core.adapter").EvaluationBatch

    def sections(self, candidate: Mapping[str, str]) -> AgentSections:
        """The prompts of ``candidate``."""
        found = dict(self._sections)
        for selector, text in candidate.items():
            own = self._own[selector]
            if not text.strip() or text == own.text:
                continue
            texts = {"replace": text, "extend": None} if own.replaces else {"replace": None, "extend": text}
            found[selector] = changed(found.get(selector), **texts)
        return found

    def evaluate(self, batch: Sequence[Task], candidate: Mapping[str, str], capture_traces: bool = False) -> Any:
        """The rewards of one rollout of each task of ``batch``. One that was left out counts as 0."""
        rollouts = {r.job.task_id: r for r in self._search.evaluate(self.sections(candidate), batch)}
        found = [rollouts.get(str(task["id"])) for task in batch]
        scores = [0.0 if r is None or r.status in LEFT_OUT else r.reward for r in found]
        return self._batch(outputs=scores, scores=scores, trajectories=found if capture_traces else None)

    def make_reflective_dataset(
        self, candidate: Mapping[str, str], eval_batch: Any, components_to_update: Sequence[str]
    ) -> Mapping[str, Sequence[Mapping[str, Any]]]:
        """What the reflection model reads of each rollout, for each of the agents ``components_to_update``."""
        del candidate
        rollouts: list[Rollout] = [rollout for rollout in eval_batch.trajectories if rollout is not None]
        return {
            selector: [
                record
                for rollout in rollouts
                for agent, own in self._names.items()
                if own == selector
                for record in self._records(rollout, agent)
            ]
            or [{"Inputs": "", "Generated Outputs": "", "Feedback": "The agent made no model call in these rollouts."}]
            for selector in components_to_update
        }

    def _records(self, rollout: Rollout, agent: str) -> list[Mapping[str, Any]]:
        feedback = feedback_of(rollout, agent, solved=self._search.config.eval.solved)
        told = conversations_of(rollout.trace, agent)[:1]
        if not told:
            return [{"Inputs": "", "Generated Outputs": "The agent gave no complete response.", "Feedback": feedback}]
        first, *rest = told[0]
        shown = "\n".join(f"{message['role']}: {message['content']}{_calls(message)}" for message in rest)
        return [
            {
                "Inputs": shorten(first["content"], _MOST_SHOWN),
                "Generated Outputs": shorten(shown, _MOST_SHOWN),
                "Feedback": feedback,
            }
        ]


def feedback_of(rollout: Rollout, agent: str, *, solved: float) -> str:
    """The reward of ``rollout``, errors, texts of the reward function's model calls, and the task."""
    trace = rollout.trace
    lines = [f"Reward {rollout.reward:g}. A solved task has at least {solved:g}."]
    if is_solved(rollout.reward, solved):
        lines = [f"Reward {rollout.reward:g}: the task is solved."]
    lines += [f"Reward {r.name or 'without a name'} of {agent}: {r.value:g}" for r in trace.rewards if r.agent == agent]
    if rollout.error:
        lines.append(f"The rollout failed: {rollout.error}")
    lines += [f"The tool {e.name} failed: {e.error}" for e in trace.events if e.kind == "tool" and e.error]
    lines += [f"A request was refused: {c.refused}" for c in trace.calls if c.agent == agent and c.refused]
    lines += [f"The judge wrote: {text}" for text in _judge_texts(trace)]
    lines.append(
        f"The task, with what the agent may not see: {json.dumps(trace.task, ensure_ascii=False, default=str)}"
    )
    return "\n".join(shorten(line, _MOST_SHOWN) for line in lines)


def _judge_texts(trace: Trace) -> list[str]:
    texts = ((c.response or {}).get("content") for c in trace.calls if c.agent == REWARD_FUNCTION)
    return [text for text in texts if isinstance(text, str) and text]


def _calls(message: Mapping[str, Any]) -> str:
    return "".join(
        f" [{call['function']['name']}({call['function']['arguments']})]" for call in message.get("tool_calls", ())
    )


def own_prompts(rollouts: Sequence[Rollout], names: Mapping[str, str], sections: AgentSections) -> dict[str, OwnPrompt]:
    """The system prompt of each agent in ``rollouts``, by selector. ``names``: the agents, with their selectors."""
    seen: dict[str, set[str]] = {selector: set() for selector in names.values()}
    for rollout in rollouts:
        for call in rollout.trace.calls:
            selector = names.get(call.agent or "")
            if selector is not None and call.refused is None:
                seen[selector].add(_system(call.messages))
    found: dict[str, OwnPrompt] = {}
    for selector, texts in seen.items():
        if len(texts) == 1 and "" not in texts:
            found[selector] = OwnPrompt(text=next(iter(texts)), replaces=True)
        else:
            section = sections.get(selector)
            text = "" if section is None else section.replace or section.extend or ""
            found[selector] = OwnPrompt(text=text, replaces=section is not None and section.replace is not None)
    return found


def _system(messages: Sequence[Mapping[str, Any]]) -> str:
    texts: list[str] = []
    for message in messages:
        if message.get("role") not in _SYSTEM_ROLES:
            break
        content = message.get("content")
        parts = content if isinstance(content, list) else [{"text": content}]
        texts.append("".join(str(part.get("text") or "") for part in parts))
    return "\n\n".join(texts)


class _Log:
    """GEPA's log."""

    def log(self, message: str) -> None:
        logger.debug("gepa: %s", message)


def check_gepa() -> None:
    """Raise `MissingExtra` unless the package ``gepa`` is installed."""
    try:
        import_module("gepa")
    except ModuleNotFoundError as error:
        raise MissingExtra(error.name or "gepa", "gepa", "lightning-rl prompts --gepa") from None


def find_with_gepa(
    search: PromptSearch, sections: AgentSections, split: TaskSplit, *, reflection: ReflectionModel, budget: int
) -> GepaResult:
    """The system prompts with the highest mean reward on the validation tasks, within ``budget`` rollouts.

    Raises `MissingExtra` without the package ``gepa``, and `InfrastructureError` if the reflection model does not answer.
    """
    check_gepa()
    before = search.evaluate(sections, split.validation)
    names = search.agents(before)
    own = own_prompts(before, names, sections)
    adapter = RolloutAdapter(search, sections, own, names)
    last = search.spent + budget
    an_iteration = 2 * _MINIBATCH + len(split.validation)

    def is_spent(state: Any) -> bool:
        del state
        return min(search.budget, last) - search.spent < an_iteration

    found: Any = import_module("gepa").optimize(
        seed_candidate={selector: prompt.text for selector, prompt in own.items()},
        trainset=list(split.collected),
        valset=list(split.validation),
        adapter=adapter,
        reflection_lm=reflection,
        reflection_minibatch_size=_MINIBATCH,
        perfect_score=search.config.eval.solved,
        # Rollouts that are known already count for GEPA, but not for the budget.
        max_metric_calls=4 * budget,
        stop_callbacks=[is_spent],
        logger=_Log(),
        seed=search.config.run.seed,
        track_best_outputs=False,
    )
    best = adapter.sections(found.candidates[found.best_idx])
    better = is_better(search.evaluate(best, split.validation), before)
    return GepaResult(sections=best if better else sections, candidates=len(found.candidates))
