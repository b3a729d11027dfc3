"""The best constant answer to held-out tasks: the reward of an agent that does not read its task, which a useful one exceeds.

If the run has a reward function, it scores the most promising answers of the evaluations on every task, unless it made model calls in the
run, or returns another reward than was recorded, and so depends on more than the task and the answer. Otherwise the rewards are those
recorded for equal answers; tasks that an answer was never given to count with the lowest recorded reward, so the result is a lower bound.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import json
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Literal, NamedTuple

from lightning_core.errors import describe, plural
from lightning_core.records.statistics.held_out import EVALUATIONS
from lightning_core.records.statistics.intervals import paired_improvement
from lightning_core.records.statistics.summary import one_line, response_text
from lightning_core.records.store import COUNTED, Store
from lightning_core.trace import ANSWER, OUTPUT_MESSAGES, REWARD_FUNCTION, check_reward

logger = logging.getLogger(__name__)

_MOST_CALLS = 1000
_SECONDS = 10.0
_CHARACTERS = 80
_ROUNDING = 1e-6

Score = Callable[[Any, Any], Any]
"""A reward function, called with a task and an answer. It may be asynchronous."""
_Rewards = Mapping[str, Mapping[str, float]]
"""The reward of each answer, by answer and task id."""


class GivenAnswer(NamedTuple):
    """The final answer of a held-out rollout."""

    phase: str
    step: int
    task: str
    answer: str
    returned: bool
    """Whether ``answer`` is what the agent returned, as JSON; otherwise it is the last response of a trained agent."""
    reward: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DistinctAnswers:
    """The number of different final answers to the held-out tasks, and of rollouts with one, before and after training."""

    before: int
    rollouts_before: int
    after: int
    rollouts_after: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ConstantAnswer:
    """The best of the answers that were compared, given to every held-out task."""

    answer: str
    """Shortened."""
    reward: float
    """Its mean over the tasks; with ``recorded`` rewards a lower bound."""
    source: Literal["reward function", "recorded"]
    compared: int
    """Number of answers that were compared."""
    tasks: int
    """Number of tasks with a reward after training."""
    known: int
    """Number of these for which its reward is known."""
    lead: float
    """The reward after training minus ``reward``."""
    lead_ci95: tuple[float, float] | None

    @property
    def is_beaten(self) -> bool:
        """Whether the interval of the lead lies above 0."""
        return self.lead_ci95 is not None and self.lead_ci95[0] > 0


class AnswersOfRun(NamedTuple):
    """What the summary has about the answers of a run."""

    distinct: DistinctAnswers | None
    constant: ConstantAnswer | None
    problem: str | None
    """The reason that the reward function was not used, or that there is no constant answer."""


def given_answers(store: Store) -> list[GivenAnswer]:
    """The answers in the run's own evaluations, in the order of the store; rollouts without one are left out."""
    rows = store.select(
        f"""
        SELECT id, phase, step, task_id, coalesce(reward, 0) AS reward,
            (SELECT max(json_extract(attributes, ?)) FROM spans WHERE rollout = rollouts.id AND parent_id IS NULL) AS returned,
            (SELECT span_id FROM spans WHERE rollout = rollouts.id AND operation = 'chat' AND error IS NULL
                AND agent IN (SELECT DISTINCT agent FROM credit) ORDER BY start_ns DESC LIMIT 1) AS last
        FROM rollouts WHERE phase IN ({", ".join("?" for _ in EVALUATIONS)}) AND {COUNTED} ORDER BY ordinal
        """,
        f'$."{ANSWER}"',
        *EVALUATIONS,
    )
    given: list[GivenAnswer] = []
    for row in rows:
        answer = row["returned"]
        if answer is None and row["last"] is not None:
            (call,) = store.spans(row["id"], only=row["last"])
            response = call.attributes.get(OUTPUT_MESSAGES)
            answer = None if response is None else response_text(json.loads(response)[0])
        if answer is not None:
            own = row["phase"], row["step"], row["task_id"]
            given.append(GivenAnswer(*own, answer, row["returned"] is not None, row["reward"]))
    return given


def reward_problem(store: Store) -> str | None:
    """The reason not to call the reward function after the run: its requests would reach providers outside any rollout."""
    made = store.select("SELECT 1 FROM spans WHERE agent = ? AND operation IS NOT NULL LIMIT 1", REWARD_FUNCTION)
    return "the reward function makes model calls" if made else None


def compare_answers(
    given: Sequence[GivenAnswer],
    after: Mapping[str, Sequence[float]],
    tasks: Sequence[Mapping[str, Any]],
    score: Score | None,
    problem: str | None = None,
) -> AnswersOfRun:
    """The answers of a run whose evaluation after training has the rewards ``after``, by task id.

    ``score``: the reward function. ``problem``: the reason not to call it, if there is one.
    """
    ids = sorted(task for task, rewards in after.items() if rewards)
    found: _Rewards | None = None
    if score is None:
        problem = None
    elif problem is None:
        returned = [g for g in given if g.returned]
        by_id = {str(task["id"]): task for task in tasks}
        found, problem = _scored(score, [by_id[i] for i in ids if i in by_id], _by_answer(returned))
    source: Literal["reward function", "recorded"] = "recorded" if found is None else "reward function"
    if found is None:
        answers = _by_answer(given)
        found = {answer: rewards for answer, rewards in answers.items() if len(rewards.keys() & set(ids)) > 1}
    if not found:
        return AnswersOfRun(_distinct(given), None, problem or "no answer occurred for more than one task")
    lowest = min(g.reward for g in given)
    rewards = {answer: [known.get(task, lowest) for task in ids] for answer, known in found.items()}
    best = max(sorted(rewards), key=lambda answer: math.fsum(rewards[answer]))
    lead = paired_improvement(rewards[best], [fmean(after[task]) for task in ids])
    constant = ConstantAnswer(
        answer=one_line(best, _CHARACTERS),
        reward=fmean(rewards[best]),
        source=source,
        compared=len(rewards),
        tasks=len(ids),
        known=len(found[best].keys() & set(ids)),
        lead=lead.mean,
        lead_ci95=lead.interval,
    )
    return AnswersOfRun(_distinct(given), constant, problem)


def _distinct(given: Sequence[GivenAnswer]) -> DistinctAnswers | None:
    before, after = ([g for g in given if g.phase == phase] for phase in ("eval_before", "eval_after"))
    if not before or not after:
        return None
    last = max(g.step for g in after)
    after = [g for g in after if g.step == last]
    return DistinctAnswers(
        before=len({g.answer for g in before}),
        rollouts_before=len(before),
        after=len({g.answer for g in after}),
        rollouts_after=len(after),
    )


def _by_answer(given: Sequence[GivenAnswer]) -> _Rewards:
    """The mean recorded reward of each answer to each task that it was given to."""
    found: dict[str, dict[str, list[float]]] = {}
    for g in given:
        found.setdefault(g.answer, {}).setdefault(g.task, []).append(g.reward)
    return {answer: {task: fmean(rewards) for task, rewards in tasks.items()} for answer, tasks in found.items()}


def _scored(score: Score, tasks: Sequence[Mapping[str, Any]], answers: _Rewards) -> tuple[_Rewards | None, str | None]:
    """The rewards of the most promising of ``answers`` on all ``tasks``, or None and the reason.

    At most `_MOST_CALLS` calls in `_SECONDS`, on a thread: the function may not return.
    """
    if not tasks or not answers:
        return None, "the reward function scores objects that were not recorded"
    order = sorted(answers, key=lambda answer: (-math.fsum(answers[answer].values()), -len(answers[answer]), answer))
    found: dict[str, dict[str, float]] = {}
    problems: list[str] = []
    until = time.monotonic() + _SECONDS
    order = order[: max(1, _MOST_CALLS // len(tasks))]
    logger.info(
        "the reward function scores %s on %s, in at most %g s",
        plural(len(order), "answer"),
        plural(len(tasks), "held-out task"),
        _SECONDS,
    )

    def compare(runner: asyncio.Runner) -> None:
        for answer in order:
            rewards = dict(_rewards_of(score, tasks, answer, until, runner))
            if len(rewards) < len(tasks):
                return
            if any(abs(rewards.get(t, r) - r) > _ROUNDING * max(1, abs(r)) for t, r in answers[answer].items()):
                problems.append("the reward function depends on more than the task and the answer")
                return
            found[answer] = rewards

    def work() -> None:
        try:
            with asyncio.Runner() as runner:
                compare(runner)
        except BaseException as error:  # noqa: BLE001 - code of the user, such as SystemExit
            problems.append(f"the reward function raised {describe(error)}")

    thread = threading.Thread(target=work, name="lightning-constant-answer", daemon=True)
    thread.start()
    thread.join(_SECONDS + 1)
    if problems:
        return None, problems[0]
    if not (compared := dict(found)):
        return None, f"the reward function needs more than {_SECONDS:g} s for {len(tasks)} tasks"
    return compared, None


def _rewards_of(
    score: Score, tasks: Sequence[Mapping[str, Any]], answer: str, until: float, runner: asyncio.Runner
) -> Iterator[tuple[str, float]]:
    for task in tasks:
        if time.monotonic() > until:
            return
        reward = score(copy.deepcopy(task), json.loads(answer))
        yield str(task["id"]), check_reward(runner.run(reward) if inspect.iscoroutine(reward) else reward)
