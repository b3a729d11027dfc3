"""The configuration's section ``credit.judge``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Discriminator, Field, Tag

from lightning_core.capture.selectors import is_pattern
from lightning_core.config.signal_sections import SignalSection
from lightning_core.config.source import KeyPath
from lightning_core.config.types import Names, Positive, Section
from lightning_core.credit import RewardTerm
from lightning_core.credit.registry import RewardRule

if TYPE_CHECKING:
    from lightning_core.config.sections import Sections

JUDGE = "judge"
"""The name of the rewards that hold a judge's scores, and the prefix of its criteria's rewards."""
_KEY: KeyPath = ("credit", "judge")


class Criterion(Section):
    """One criterion of a judge. Its score is compared on its own within the group, before the advantages are added."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_]*$")]
    """Name of the criterion. Its score is recorded as the reward `judge_NAME`."""
    text: str
    """The behavior of a good rollout."""
    weight: float = 1.0
    """Coefficient of the advantages from this criterion, times `credit.judge.weight`. 0: the score is only recorded."""
    agents: Names | None = None
    """Agents whose calls get advantages from the criterion; null: all trained agents."""

    @property
    def reward(self) -> str:
        """The name of the rewards that hold its scores."""
        return f"{JUDGE}_{self.name}"


def _rubric_kind(data: object) -> str:
    return "[criteria]" if isinstance(data, list | tuple) else "[text]"


Rubric = Annotated[
    Annotated[str, Tag("[text]")] | Annotated[tuple[Criterion, ...], Field(strict=False), Tag("[criteria]")],
    # One kind is expected, so errors are about that kind.
    Discriminator(_rubric_kind),
]


class Judge(Section):
    """A model that scores all rollouts of a group in one prompt.
    Its own calls are never trained."""

    model: str
    """Name of the model: `base` for the initial weights, or a model of `policy.upstream`."""
    rubric: Rubric | None = None
    """The standard for rollouts: a text, for one score; or a list of criteria, each with its own score; null: how well
    it solves the task."""
    weight: float = 1.0
    """Coefficient of the score, which is from 0 to 1. The product is added to the episode's reward. With a list of
    criteria: a factor of their weights."""
    agent: str = "judge"
    """Agent name under which the judge's calls are recorded."""
    timeout_seconds: Positive = 300.0
    """Longest time for one response of the judge. Afterwards its group has no scores."""

    @property
    def criteria(self) -> tuple[Criterion, ...]:
        """The criteria with their own scores; empty if the rubric is a text."""
        return self.rubric if isinstance(self.rubric, tuple) else ()

    @property
    def rewards(self) -> tuple[str, ...]:
        """The names of the rewards that hold its scores."""
        return tuple(c.reward for c in self.criteria) or (JUDGE,)


class JudgeKeys(Section):
    """The keys of a judge in the section ``credit``."""

    judge: Judge | None = None
    """A model that scores rollouts; null: disabled."""


def judge_of(credit: Section) -> Judge | None:
    """The judge in the section ``credit``."""
    assert isinstance(credit, JudgeKeys)
    return credit.judge


def _check(c: Sections) -> Iterator[tuple[KeyPath, str]]:
    judge = judge_of(c.credit)
    if judge is None:
        return
    if judge.rubric == ():
        yield (*_KEY, "rubric"), "the list is empty, expected one or more criteria, or a text"
    for index, criterion in enumerate(judge.criteria):
        path = (*_KEY, "rubric", index)
        if criterion.name in [other.name for other in judge.criteria[:index]]:
            yield (*path, "name"), f"{criterion.name!r} is the name of an earlier criterion; use another"
        if any(is_pattern(agent) for agent in criterion.agents or ()):
            yield (*path, "agents"), "found a pattern (*); a criterion's agents are exact names"
    if c.rollouts.group_size == 1:
        yield ("rollouts", "group_size"), "found 1, expected 2 or more: a judge compares attempts at one task"
    if c.trainer.name == "verl" and judge.model in ("base", "policy"):
        yield (*_KEY, "model"), f"found {judge.model!r}; expected a model of policy.upstream with verl"


def _check_rules(c: Sections, rules: Mapping[str, RewardRule | None]) -> Iterator[tuple[KeyPath, str]]:
    judge = judge_of(c.credit)
    for rule in rules.values():
        if judge is not None and judge.criteria and rule is not None and "critic" in rule.needs:
            yield (
                (*_KEY, "rubric"),
                f"found a list of criteria, expected a text: with rewards: {rule.name} the critic predicts the sum of all rewards",
            )


def _agents(c: Sections) -> Iterator[tuple[KeyPath, Names | None]]:
    judge = judge_of(c.credit)
    for index, criterion in enumerate(() if judge is None else judge.criteria):
        yield (*_KEY, "rubric", index, "agents"), criterion.agents


def _models(c: Sections) -> Iterator[tuple[KeyPath, str]]:
    judge = judge_of(c.credit)
    if judge is not None:
        yield (*_KEY, "model"), judge.model


def _terms(credit: Any) -> Sequence[RewardTerm]:
    judge = judge_of(credit)
    criteria = () if judge is None else judge.criteria
    return [RewardTerm(name=c.reward, weight=judge.weight * c.weight, agents=c.agents) for c in criteria if judge]


def _rewards(credit: Section) -> Sequence[str]:
    judge = judge_of(credit)
    return () if judge is None else judge.rewards


SECTION = SignalSection(
    section="credit",
    keys=JudgeKeys,
    check=_check,
    check_rules=_check_rules,
    agents=_agents,
    models=_models,
    rewards=_rewards,
    terms=_terms,
)
