"""The configuration's section ``credit``."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le
from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from lightning_core.config.problems import OWN
from lightning_core.config.rules import AdvantageRuleName, GroupKeyName, RewardRuleName
from lightning_core.config.types import CallableName, Count, Names, NotNegative, Positive, Section

Gamma = Annotated[float, Gt(0), Le(1)]
Lam = Annotated[float, Ge(0), Le(1)]
Anchor = Literal["exact", "normalised"]
GroupBy = Annotated[tuple[GroupKeyName, ...], Field(strict=False)]
Arguments = dict[str, Any]

FLAT = ("gamma", "lam", "step_weight", "anchor")
"""Arguments of reward rules that have keys of their own in the section."""


def _pattern(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise PydanticCustomError(OWN, "expected a regular expression: {error}", {"error": str(error)}) from None
    return text


Pattern = Annotated[str, AfterValidator(_pattern)]


class Format(Section):
    """A form that responses should have."""

    pattern: Pattern
    """A regular expression that is searched for in the response's text; `.` matches line ends too."""
    weight: float
    """The reward of a call whose response has it."""
    agents: Names | None = None
    """Whose responses; null: all trained agents'."""


class Rule(Section):
    """A rule of your own."""

    function: CallableName
    """`module:callable`, called as `function(call, tools)` with a `Call` and the `ToolSignal`s of the tools that it asked for."""
    weight: float = 1.0
    """What its result is multiplied with."""


class Air(Section):
    """Automatic intermediate rewards: what the run tells of itself, as rewards on the calls behind it."""

    tool_ok: float = 0.0
    """For each tool that a call asked for and that worked."""
    tool_error: float = 0.0
    """For each that failed."""
    tool_unused: float = 0.0
    """For each that was asked for and did not run: it does not exist, or its arguments could not be read."""
    tool_errors: dict[Pattern, float] = {}
    """Regular expressions over a tool's error; the first that is found counts in place of `tool_error`."""
    truncated: float = 0.0
    """For a response that ran into `max_tokens`."""
    formats: Annotated[tuple[Format, ...], Field(strict=False)] = ()
    """Forms that responses should have."""
    rules: Annotated[tuple[Rule, ...], Field(strict=False)] = ()
    """Rules of your own."""


class Critic(Section):
    """With `gae`: the value head, which learns what to expect of the rest of a rollout at each call's prompt."""

    learning_rate: Positive = 1e-3
    """AdamW's learning rate for the head."""
    epochs: Count = 8
    """Passes over each step's calls."""


class Judge(Section):
    """A model that scores the attempts at a task beside one another. Its own calls are never trained."""

    model: str
    """Its name: `base` for the untrained weights, or one that goes on to `policy.upstream`."""
    rubric: str | None = None
    """What makes an attempt good; null: how well it does what the task asks."""
    weight: float = 1.0
    """What its score, from 0 to 1, is multiplied with before it is added to the episode's reward."""
    agent: str = "judge"
    """The name that its calls are recorded under."""


class Credit(Section):
    """From the rewards of an episode to the advantage of each call; docs/credit-assignment.md has the equations."""

    rewards: RewardRuleName = "broadcast"
    """The value of a call. `module:callable`: a function `rule(episode, *, …)`, or `rule(episode, gamma)`, that returns a number for each
    call."""
    rewards_args: Arguments = {}
    """Arguments of `rewards` that have no key of their own here."""
    gamma: Gamma | None = None
    """the discount factor per call. A rule of your own may have it, too, as any other key that is an argument of a rule."""
    lam: Lam | None = None
    """the λ of the estimator; null: 1."""
    step_weight: NotNegative | None = None
    """the weight of the advantage among calls in the same place; null: 1."""
    anchor: Anchor | None = None
    """when two calls are in the same place: they were shown the same, or the same but for case and white space; null: exact."""
    advantage: AdvantageRuleName = "grpo"
    """How the values of calls are compared. `module:callable`: a function `rule(groups, *, …)` that returns the advantages by call id."""
    advantage_args: Arguments = {}
    """Arguments of `advantage`."""
    group_by: GroupBy | None = None
    """What calls of a group have in common; null: the keys that `rewards` declares, `[task]` with `broadcast`. `[task, agent]` gives each
    agent a baseline of its own (Dr. MAS), `[task, agent, turn]` each of its turns too (AT-GRPO). `module:callable`: a function
    `key(episode)` that returns a string for each call."""
    air: Air | None = None
    """Automatic intermediate rewards; null: none."""
    critic: Critic | None = None
    """With `gae`, or a rule of your own that needs a critic: the critic; null: its defaults."""
    judge: Judge | None = None
    """A model that scores attempts; null: none."""
