"""Demonstrations from an agent's own solved rollouts."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_core.chat.messages import check_message
from lightning_core.errors import PolicyRequestError
from lightning_core.prompts.demonstrations import Conversation, check_demonstrations
from lightning_core.records.statistics.solved import is_solved
from lightning_core.rollouts.attempt import Rollout
from lightning_core.tools.interchange.conversations import is_same
from lightning_core.tools.prompts.search import AgentSections, PromptSearch, TaskSplit, changed, is_better
from lightning_core.trace import Call, Trace

_SYSTEM_ROLES = ("system", "developer")
_WORD = re.compile(r"\w+")


@dataclass(frozen=True, slots=True, kw_only=True)
class SolvedRollout:
    """The conversations of one solved rollout."""

    task_id: str
    conversations: Mapping[str, Conversation]
    """The first complete conversation of each agent, by its selector."""

    @property
    def characters(self) -> int:
        """The length of the conversations."""
        return sum(len(str(message)) for messages in self.conversations.values() for message in messages)

    @property
    def words(self) -> frozenset[str]:
        """The words of the first messages, which tell tasks apart."""
        firsts = (messages[0]["content"] for messages in self.conversations.values())
        return frozenset(word for text in firsts for word in _WORD.findall(text.lower()))


@dataclass(frozen=True, slots=True, kw_only=True)
class DemonstrationResult:
    """The best set of demonstrations, and what was tried."""

    sections: AgentSections
    """The prompts with the best set; the original ones if no set has a higher mean reward."""
    solved: int
    """Number of training tasks with a solved rollout."""
    sets: int
    """Number of sets that were compared."""


def find_demonstrations(
    search: PromptSearch, sections: AgentSections, split: TaskSplit, *, number: int, sets: int
) -> DemonstrationResult:
    """The set of ``number`` demonstrations, of ``sets``, with the highest mean reward on the validation tasks.

    ``sections``: the prompts to add them to. What the sets do not need of the budget is used to collect solved rollouts.
    """
    before = search.evaluate(sections, split.validation)
    bare = {
        agent: changed(section, demonstrations=[])
        for agent, section in sections.items()
        if section.extend is not None or section.replace is not None
    }
    room = search.left - sets * len(split.validation)
    tasks = split.collected[: max(1, room)]
    collected = search.collect(bare, tasks, attempts=max(1, min(2, room // len(tasks))))
    pool = solved_rollouts(search, collected)
    best, reached, compared = sections, before, 0
    for chosen in choose_sets(pool, number=number, sets=sets, seed=search.config.run.seed):
        if search.left < len(split.validation):
            break
        candidate = with_demonstrations(bare, chosen)
        found = search.evaluate(candidate, split.validation)
        compared += 1
        if is_better(found, reached):
            best, reached = candidate, found
    return DemonstrationResult(sections=best, solved=len(pool), sets=compared)


def solved_rollouts(search: PromptSearch, rollouts: Sequence[Rollout]) -> list[SolvedRollout]:
    """The shortest solved one of ``rollouts`` for each task, shortest first, if its conversations can be shown as they are."""
    agents = search.agents(rollouts)
    found: dict[str, SolvedRollout] = {}
    for rollout in rollouts:
        if rollout.status != "ok" or not is_solved(rollout.reward, search.config.eval.solved):
            continue
        conversations: dict[str, Conversation] = {}
        for agent, selector in agents.items():
            told = next(iter(conversations_of(rollout.trace, agent)), None)
            if told is not None:
                conversations.setdefault(selector, told)
        one = SolvedRollout(task_id=rollout.job.task_id, conversations=conversations)
        known = found.get(one.task_id)
        if conversations and (known is None or one.characters < known.characters):
            found[one.task_id] = one
    return sorted(found.values(), key=lambda one: (one.characters, one.task_id))


def conversations_of(trace: Trace, agent: str) -> list[Conversation]:
    """The complete conversations of ``agent`` in ``trace``, without system prompts, oldest first."""
    calls = [call for call in trace.calls if call.agent == agent and call.response is not None]
    last = [call for i, call in enumerate(calls) if not any(_continues(call, later) for later in calls[i + 1 :])]
    return [messages for call in last if (messages := _conversation(call)) is not None]


def _continues(call: Call, later: Call) -> bool:
    before, after = call.messages, later.messages
    return len(after) > len(before) and all(map(is_same, before, after))


def _conversation(call: Call) -> Conversation | None:
    """The messages of ``call`` and its response; None if they are not a whole conversation of texts and tool calls."""
    if call.finish_reason == "length":
        return None
    start = next((i for i, m in enumerate(call.messages) if m.get("role") not in _SYSTEM_ROLES), len(call.messages))
    try:
        response = {"role": "assistant", **(call.response or {})}
        messages = [check_message(message, i) for i, message in enumerate((*call.messages[start:], response))]
        kept = [{k: v for k, v in message.items() if k not in ("name", "reasoning_content")} for message in messages]
        return check_demonstrations([kept])[0]
    except (PolicyRequestError, ValueError):
        return None


def choose_sets(pool: Sequence[SolvedRollout], *, number: int, sets: int, seed: int) -> list[Sequence[SolvedRollout]]:
    """Up to ``sets`` different sets of ``number`` solved rollouts: the shortest, the most diverse of the short ones, and samples.

    ``pool``: the shortest first.
    """
    if not pool:
        return []
    generator = random.Random(f"{seed}:demonstrations")
    short = pool[: max(2 * number, (len(pool) + 1) // 2)]
    found: dict[frozenset[str], Sequence[SolvedRollout]] = {}
    proposals = [pool[:number], _diverse(pool[: 3 * number], number)]
    proposals += [generator.sample(list(short), min(number, len(short))) for _ in range(4 * sets)]
    for proposal in proposals:
        found.setdefault(frozenset(one.task_id for one in proposal), proposal)
    return list(found.values())[:sets]


def _diverse(pool: Sequence[SolvedRollout], number: int) -> list[SolvedRollout]:
    """The shortest, then always the one whose first messages have the fewest words in common with the chosen ones."""
    chosen = list(pool[:1])
    while len(chosen) < min(number, len(pool)):
        others = [one for one in pool if one not in chosen]
        chosen.append(max(others, key=lambda one: min(_distance(one, other) for other in chosen)))
    return chosen


def _distance(one: SolvedRollout, other: SolvedRollout) -> float:
    either = one.words | other.words
    return 1 - len(one.words & other.words) / len(either) if either else 0.0


def with_demonstrations(sections: AgentSections, chosen: Sequence[SolvedRollout]) -> AgentSections:
    """``sections`` with the conversations of ``chosen`` as demonstrations of their agents."""
    by_agent: dict[str, list[Conversation]] = {}
    for one in chosen:
        for agent, conversation in one.conversations.items():
            by_agent.setdefault(agent, []).append(conversation)
    more = {agent: changed(sections.get(agent), demonstrations=found) for agent, found in by_agent.items()}
    return {**sections, **more}
