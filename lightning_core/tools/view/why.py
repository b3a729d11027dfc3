"""Explains the credit of a rollout's calls: recomputed by the run's rules, and compared with the stored credit."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from jinja2.utils import LRUCache

from lightning_core.config import Config
from lightning_core.config.build_rules import policy_rules
from lightning_core.config.resolve import policy_settings
from lightning_core.config.signal_sections import signal_sections, with_derived
from lightning_core.config.types import is_callable_name
from lightning_core.credit import CreditRules
from lightning_core.credit.explain import Explanation, explain_credit
from lightning_core.errors import ConfigError, describe
from lightning_core.records.run_folder.configs import config_of_step, load_recorded
from lightning_core.records.store import CallCredit, RolloutRecord, Store
from lightning_core.tools.runs.recredit import step_episodes
from lightning_core.tools.view.library import file_signature
from lightning_core.trace import Trace

_TOLERANCE = 1e-6
_EXPLAINED = LRUCache(4)
"""The newest explanations, by the calls that they compare and their configuration."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Why:
    """The explanations of a rollout's calls, or the reason there are none."""

    rules: Mapping[str, CreditRules] = field(default_factory=dict[str, CreditRules])
    """Rules by policy."""
    explanations: Mapping[str, Explanation] = field(default_factory=dict[str, Explanation])
    """Explanations by call id."""
    problem: str | None = None
    imports: Sequence[str] = ()
    """Functions of the user that must be imported first."""

    def of(self, row: CallCredit) -> Explanation | None:
        """The explanation of the call of ``row``."""
        return self.explanations.get(row.call)

    def differs(self, row: CallCredit) -> bool:
        """Whether the call's advantage by these rules is not the stored one."""
        explained = self.of(row)
        return explained is not None and not math.isclose(
            explained.advantage, row.advantage, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE
        )


def user_functions(config: Config) -> list[str]:
    """The functions that the credit of ``config`` names as ``module:callable``."""
    names: list[str] = []
    for settings in policy_settings(config).values():
        credit = settings.credit
        own = [name for signal in signal_sections().values() for name in signal.functions(credit)]
        names += [credit.rewards, credit.advantage, *(credit.group_by or ()), *own]
    return list(dict.fromkeys(name for name in names if is_callable_name(name)))


def explain_rollout(
    store: Store,
    folder: Path,
    record: RolloutRecord,
    credit: Sequence[CallCredit],
    *,
    may_import: bool,
    traces: Mapping[str, Trace] | None = None,
) -> Why:
    """The explanations of ``credit``, the stored credit of the rollout ``record`` of the run in ``folder``.

    ``may_import``: whether functions of the user that the configuration names are imported and called. ``traces``: those that are
    already read, by rollout.
    """
    if not credit:
        return Why()
    try:
        file = config_of_step(folder, credit[0].step)
        config = load_recorded(file)
    except ConfigError as error:
        return Why(problem=f"The run's configuration cannot be read: {error}")
    imports = user_functions(config)
    if imports and not may_import:
        return Why(imports=imports)
    try:
        rules = policy_rules(config)
        critics = [r.reward_rule.name for r in rules.values() if r.needs_values]
        if critics:
            reason = f"The reward rule {critics[0]} needs the critic's value of each call, which is available in training only."
            return Why(rules=rules, problem=reason)
        # Other tasks matter only to rules that compare calls of several tasks.
        rollouts = None if any(r.needs_batch for r in rules.values()) else _attempts(store, record)
        step = credit[0].step
        trained = tuple(c for c in store.credit(step=step) if rollouts is None or c.rollout in rollouts)
        key = (store.path, file_signature(file), trained)
        found: Mapping[str, Explanation] | None = _EXPLAINED.get(key)
        if found is None:
            episodes = with_derived(config, step_episodes(store, step, rollouts=rollouts, traces=traces))
            found = _EXPLAINED[key] = explain_credit(episodes, rules)
        return Why(rules=rules, explanations=found)
    except Exception as error:  # noqa: BLE001 - rules can be functions of the user
        return Why(problem=f"The credit cannot be computed again: {describe(error)}")


def _attempts(store: Store, record: RolloutRecord) -> set[str]:
    query = "SELECT id FROM rollouts WHERE task_id = ? AND step = ? AND phase IN ('train', 'fork')"
    return {row["id"] for row in store.select(query, record.task_id, record.step)}
