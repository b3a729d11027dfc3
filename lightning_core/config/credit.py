"""The configuration's section ``credit``."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le
from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from lightning_core.config.problems import OWN
from lightning_core.config.types import CallableName, Count, Names, NotNegative, Positive, Section, is_callable_name

Gamma = Annotated[float, Gt(0), Le(1)]
Lam = Annotated[float, Ge(0), Le(1)]
Anchor = Literal["exact", "normalised"]
Advantage = Literal["grpo", "dr-grpo", "rloo", "reinforce++", "reinforce++-baseline", "none"]
GroupBy = Annotated[
    tuple[Literal["task", "agent", "turn", "anchor", "anchor-normalised", "policy"], ...], Field(strict=False)
]

_RULES = ("broadcast", "last-call", "explicit", "discounted", "leave-one-branch-out", "gigpo", "gae")


def _pattern(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise PydanticCustomError(OWN, "expected a regular expression: {error}", {"error": str(error)}) from None
    return text


def _rule_name(text: str) -> str:
    if text not in _RULES and not is_callable_name(text):
        known = ", ".join(repr(rule) for rule in _RULES)
        raise PydanticCustomError(OWN, "expected {known}, or 'module:callable'", {"known": known})
    return text


RuleName = Annotated[str, AfterValidator(_rule_name)]
Pattern = Annotated[str, AfterValidator(_pattern)]


class Format(Section):
    """A reward for responses of a given form."""

    pattern: Pattern
    """Regular expression to search for in the response's text. `.` also matches newlines."""
    weight: float
    """Reward of a call whose response matches."""
    agents: Names | None = None
    """Agents that the format applies to; null: all trained agents."""


class Rule(Section):
    """A custom rule."""

    function: CallableName
    """`module:callable`, called as `function(call, tools)` with a `Call` and the `ToolSignal`s of its tool calls. It
    returns a number."""
    weight: float = 1.0
    """Coefficient of the function's result."""


class AirSection(Section):
    """Automatic intermediate rewards: rewards of calls, computed from tool outcomes and response formats."""

    tool_ok: float = 0.0
    """Reward per tool call that succeeded."""
    tool_error: float = 0.0
    """Reward per tool call that failed."""
    tool_unused: float = 0.0
    """Reward per tool call that did not run: unknown tool, or unreadable arguments."""
    tool_errors: dict[Pattern, float] = {}
    """Rewards by regular expression over the tool's error. The first match replaces `tool_error`."""
    truncated: float = 0.0
    """Reward of a response that reached `max_tokens`."""
    formats: Annotated[tuple[Format, ...], Field(strict=False)] = ()
    """Rewards for responses of a given form."""
    rules: Annotated[tuple[Rule, ...], Field(strict=False)] = ()
    """Custom rules."""


class Critic(Section):
    """With `gae`: the value head, which predicts the return from each call's prompt."""

    learning_rate: Positive = 1e-3
    """Learning rate of the head (AdamW)."""
    epochs: Count = 8
    """Passes over each step's calls."""


class Judge(Section):
    """A model that scores all rollouts of a group in one prompt. Its own calls are never trained."""

    model: str
    """Name of the model: `base` for the initial weights, or a model of `policy.upstream`."""
    rubric: str | None = None
    """Criteria for a good rollout; null: how well it solves the task."""
    weight: float = 1.0
    """Coefficient of the score, which is from 0 to 1. The product is added to the episode's reward."""
    agent: str = "judge"
    """Agent name under which the judge's calls are recorded."""


class CreditSection(Section):
    """Computes each call's advantage from an episode's rewards; docs/credit-assignment.md has the equations."""

    rewards: RuleName = "broadcast"
    """`broadcast`: every call gets the episode's return plus its own and its agent's rewards. `last-call`: the last
    trained call gets the episode's return, the others only their own rewards. `explicit`: only the rewards attached to
    a call or its agent count. `discounted`: the discounted sum of the rewards from the call on. `leave-one-branch-out`:
    `broadcast`, with parallel branches compared with each other. `gigpo`: the episode's advantage plus an advantage
    among calls with the same anchor. `gae`: turn-level GAE with a critic. Or `module:callable`, called as
    `rule(episode, gamma)`."""
    gamma: Gamma | None = None
    """With `discounted`, `gigpo`, `gae` or a custom rule: the discount factor per call."""
    lam: Lam | None = None
    """With `gae`: λ of the estimator; null: 1."""
    step_weight: NotNegative | None = None
    """With `gigpo`: weight of the advantage among calls with the same anchor; null: 1."""
    anchor: Anchor | None = None
    """With `gigpo`: when two calls have the same anchor. `exact`: equal new messages. `normalised`: equal except for
    case and white space. null: `exact`."""
    advantage: Advantage = "grpo"
    """The baseline and scale of a call's value. Within its group: `grpo` (minus the mean, divided by the standard
    deviation), `dr-grpo` (minus the mean), `rloo` (minus the mean of the others), `reinforce++-baseline` (minus the
    mean, then whitened over the batch). `reinforce++`: whitened over the batch. `none`: the value itself."""
    group_by: GroupBy = ("task",)
    """Keys that the calls of a group share. `[task, agent]`: a baseline per agent (Dr. MAS). `[task, agent, turn]`: a
    baseline per agent and turn (AT-GRPO)."""
    air: AirSection | None = None
    """Automatic intermediate rewards; null: disabled."""
    critic: Critic | None = None
    """With `gae`: the critic's settings; null: defaults."""
    judge: Judge | None = None
    """A model that scores rollouts; null: disabled."""
