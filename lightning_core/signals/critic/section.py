"""Checks of ``credit.critic``, whose keys each policy may set for itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from lightning_core.config.rule_names import declared, goes_with
from lightning_core.config.signal_sections import SignalSection
from lightning_core.config.source import KeyPath
from lightning_core.credit import REWARD_RULES

if TYPE_CHECKING:
    from lightning_core.config.sections import Sections

NEED = "critic"
"""What rules that need a critic declare."""


def _check(c: Sections) -> Iterator[tuple[KeyPath, str]]:
    from lightning_core.config.resolve import policy_settings

    for name, settings in policy_settings(c).items():
        rule = declared(REWARD_RULES, settings.credit.rewards)
        if settings.credit.critic is not None and rule is not None and NEED not in rule.needs:
            path = ("policies", name, "credit", "critic") if c.policies else ("credit", "critic")
            using = [other.name for other in REWARD_RULES.values() if NEED in other.needs]
            yield path, goes_with(using, settings.credit.rewards)


SECTION = SignalSection(check=_check)
