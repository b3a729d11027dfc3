"""Checks of ``credit.critic``, whose keys each policy may set for itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from lightning_core.config.rule_names import goes_with
from lightning_core.config.signal_sections import SignalSection, key_of_rule
from lightning_core.config.source import KeyPath
from lightning_core.credit import REWARD_RULES
from lightning_core.credit.registry import RewardRule

if TYPE_CHECKING:
    from lightning_core.config.sections import Sections

NEED = "critic"
"""The name that rules which need a critic declare in ``needs``."""


def _check_rules(c: Sections, rules: Mapping[str, RewardRule | None]) -> Iterator[tuple[KeyPath, str]]:
    from lightning_core.config.resolve import policy_settings

    settings = policy_settings(c)
    for policy, rule in rules.items():
        if settings[policy].credit.critic is not None and rule is not None and NEED not in rule.needs:
            path = (*key_of_rule(c, policy)[:-1], "critic")
            using = [other.name for other in REWARD_RULES.values() if NEED in other.needs]
            yield path, goes_with(using, settings[policy].credit.rewards)


SECTION = SignalSection(check_rules=_check_rules)
