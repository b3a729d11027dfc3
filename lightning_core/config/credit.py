"""The configuration's section ``credit``."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from annotated_types import Ge, Le
from pydantic import Field

from lightning_core.config.rule_names import AdvantageRuleName, GroupKeyName, RewardRuleName
from lightning_core.config.signal_keys import with_signal_keys
from lightning_core.config.types import Count, NotNegative, Positive, Section
from lightning_core.credit.reward_rules import Gamma

Lam = Annotated[float, Ge(0), Le(1)]
Anchor = Literal["exact", "normalised"]
GroupBy = Annotated[tuple[GroupKeyName, ...], Field(strict=False)]
Arguments = dict[str, Any]

RULE_ARGUMENT_KEYS = ("gamma", "lam", "step_weight", "anchor")
"""Arguments of reward rules that have their own key in the section."""


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
    critic: CriticSection | None = None
    """With `gae`, or a custom rule that needs a critic: the critic's settings; null: defaults."""
