"""Credit: from the rewards of an episode to one advantage for each call. Pure functions in registries; no torch, no I/O.

1. A *reward rule* gives every call of an episode a value (episode → call). AIR puts rewards of its own on calls before.
2. An *advantage rule* compares the values within groups, and perhaps over the batch.
3. Every token of a call has the call's advantage (call → token; arXiv 2508.03680, §3.3): ``transitions_to_rows`` writes it down.
"""

from lightning_core.credit.advantage_rules import ADVANTAGE_RULES
from lightning_core.credit.air import Air, FormatRule
from lightning_core.credit.assign import Credit, CreditRules, assign_credit
from lightning_core.credit.episode import Episode
from lightning_core.credit.grouping import GROUP_KEYS
from lightning_core.credit.reward_rules import REWARD_RULES
from lightning_core.credit.several import assign_by_policy

__all__ = [
    "ADVANTAGE_RULES",
    "GROUP_KEYS",
    "REWARD_RULES",
    "Air",
    "Credit",
    "CreditRules",
    "Episode",
    "FormatRule",
    "assign_by_policy",
    "assign_credit",
]
