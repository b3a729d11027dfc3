"""Computes one advantage per call from the rewards of episodes.

Pure functions in registries; no torch, no I/O.

1. A *reward rule* gives every call of an episode a value (episode → call). Before that, signals add rewards.
2. An *advantage rule* compares the values within groups, or over the batch. *Group keys* define the groups.
3. Every token of a call has the call's advantage (call → token; arXiv 2508.03680, §3.3); see ``transitions_to_rows``. A *loss* is
   computed from the advantage and the logprobs of each token.

`registry` describes how to add a rule.
"""

from lightning_core.credit import advantage_rules, gae, grouping, losses, reward_rules
from lightning_core.credit.assign import Credit, assign_credit
from lightning_core.credit.episode import Accumulate, Component, Episode, Value
from lightning_core.credit.losses import TokenLosses
from lightning_core.credit.multi_policy import assign_by_policy
from lightning_core.credit.registry import (
    ADVANTAGE_RULES,
    GROUP_KEYS,
    LOSSES,
    REWARD_RULES,
    advantage_rule,
    group_key,
    loss,
    reward_rule,
)
from lightning_core.credit.reward_terms import RewardTerm
from lightning_core.credit.rules import CreditRules

_DECLARED = (advantage_rules, gae, grouping, losses, reward_rules)
"""Imported so that their rules are in the registries."""

__all__ = [
    "ADVANTAGE_RULES",
    "GROUP_KEYS",
    "LOSSES",
    "REWARD_RULES",
    "Accumulate",
    "Component",
    "Credit",
    "CreditRules",
    "Episode",
    "RewardTerm",
    "TokenLosses",
    "Value",
    "advantage_rule",
    "assign_by_policy",
    "assign_credit",
    "group_key",
    "loss",
    "reward_rule",
]
