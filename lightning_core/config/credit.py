"""The configuration's section ``credit``."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le
from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from lightning_core.config.problems import INVALID_VALUE
from lightning_core.config.rule_names import AdvantageRuleName, GroupKeyName, RewardRuleName
from lightning_core.config.signal_keys import with_signal_keys
from lightning_core.config.types import CallableName, Count, CountOrZero, Names, NotNegative, Positive, Section
from lightning_core.credit.reward_rules import Gamma

Lam = Annotated[float, Ge(0), Le(1)]
Anchor = Literal["exact", "normalised"]
GroupBy = Annotated[tuple[GroupKeyName, ...], Field(strict=False)]
Arguments = dict[str, Any]

RULE_ARGUMENT_KEYS = ("gamma", "lam", "step_weight", "anchor")
"""Arguments of reward rules that have their own key in the section."""


def _pattern(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise PydanticCustomError(
            INVALID_VALUE, "expected a regular expression: {error}", {"error": str(error)}
        ) from None
    return text


Pattern = Annotated[str, AfterValidator(_pattern)]


class Format(Section):
    """A reward for responses of a given form."""

    pattern: Pattern
    """Regular expression to search for in the response's text. `.` also matches newlines."""
    weight: float
    """Reward of a call whose response matches."""
    agents: Names | None = None
    """Agents that the format applies to, with `*` as wildcard; null: all trained agents."""


class Rule(Section):
    """A custom rule."""

    function: CallableName
    """`module:callable`, called as `function(call, tools)` with a `Call` and the `ToolOutcome`s of its tool calls. It
    returns a number."""
    weight: float = 1.0
    """Coefficient of the function's result."""


class AirSection(Section):
    """Automatic intermediate rewards of calls, from tool outcomes, response formats and lengths."""

    tool_ok: float = 0.0
    """Reward per tool call that succeeded."""
    tool_error: float = 0.0
    """Reward per tool call that failed."""
    tool_unused: float = 0.0
    """Reward per tool call that did not run: unknown tool, or unreadable arguments."""
    tool_errors: dict[Pattern, float] = {}
    """Rewards by regular expression over the tool's error. The first match replaces `tool_error`."""
    truncated: float = 0.0
    """Reward of a response that reached its token limit."""
    truncated_ramp: CountOrZero = 0
    """Number of tokens before the limit over which `truncated` grows linearly from 0: DAPO's soft overlong penalty
    (2503.14476). 0: only responses that reached the limit get it."""
    token_cost: NotNegative = 0.0
    """Subtracted from the call's reward per sampled token of the call, such as 0.0001."""
    call_cost: NotNegative = 0.0
    """Subtracted from the call's reward, such as 0.01: the cost of a turn."""
    formats: Annotated[tuple[Format, ...], Field(strict=False)] = ()
    """Rewards for responses of a given form."""
    rules: Annotated[tuple[Rule, ...], Field(strict=False)] = ()
    """Custom rules."""


class CriticSection(Section):
    """With `gae`: the value head, which predicts the return from each call's prompt."""

    learning_rate: Positive = 1e-3
    """Learning rate of the head (AdamW)."""
    epochs: Count = 8
    """Passes over each step's calls."""


@with_signal_keys("credit")
class CreditSection(Section):
    """Computes each call's advantage from an episode's rewards.
    docs/credit-assignment.md has the equations."""

    rewards: RewardRuleName = "broadcast"
    """The value of a call. `module:callable`: a function `rule(episode, *, …)` or `rule(episode, gamma)` that returns a
    number for each call."""
    rewards_args: Arguments = {}
    """Arguments of `rewards` that do not have their own key in this section."""
    gamma: Gamma | None = None
    """the discount factor per call. It is also passed to custom rules with a parameter of that name, as are `lam`,
    `step_weight` and `anchor`."""
    lam: Lam | None = None
    """λ of the estimator; null: 1."""
    step_weight: NotNegative | None = None
    """weight of the advantage among calls with the same anchor; null: 1."""
    anchor: Anchor | None = None
    """when two calls have the same anchor. `exact`: equal new messages. `normalised`: equal except for case and white
    space. null: `exact`."""
    advantage: AdvantageRuleName = "grpo"
    """The baseline and scale of a call's value. `module:callable`: a function `rule(groups, *, …)` that returns the
    advantages by call id."""
    advantage_args: Arguments = {}
    """Arguments of `advantage`."""
    group_by: GroupBy | None = None
    """Keys that the calls of a group share; null: the default of `rewards`, `[task]` with `broadcast`. `[task, agent]`: a
    baseline per agent (Dr. MAS). `[task, agent, turn]`: a baseline per agent and turn (AT-GRPO). `module:callable`: a
    function `key(episode)` that returns a string for each call."""
    air: AirSection | None = None
    """Automatic intermediate rewards; null: disabled."""
    critic: CriticSection | None = None
    """With `gae`, or a custom rule that needs a critic: the critic's settings; null: defaults."""
