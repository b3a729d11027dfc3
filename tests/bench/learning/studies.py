"""What is compared: a study is a task with its arms, all with the same budget of model tokens."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[3]
BROADCAST = "broadcast"
COUNTERFACTUAL = (
    "rollouts.group_size=4",
    "rollouts.forks={points: 2, samples: 2}",
    "credit.rewards=counterfactual",
    "credit.advantage=rloo",
)
"""Half as many attempts, and as many forks: a step has as many rollouts as broadcast's, which sample fewer tokens."""
VINE = (
    "rollouts.group_size=4",
    "rollouts.forks={points: 2, samples: 2}",
    "credit.rewards=vine",
    "credit.advantage=none",
)
TREE = ("rollouts.group_size=4", "rollouts.forks={points: 2, samples: 2}", "credit.rewards=tree")
CREDIT: Mapping[str, Sequence[str]] = {
    BROADCAST: (),
    "counterfactual": COUNTERFACTUAL,
    "vine": VINE,
    "tree": TREE,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """One table and one figure."""

    title: str
    config: str
    """The configuration, a path in the repository. Its ``tasks.eval`` is the held-out set."""
    data: str
    """The folder of the data set in ``--data``; "": the tasks need none."""
    budget: int
    """Tokens that a run samples, forks included; without evaluations."""
    arms: Mapping[str, Sequence[str]]
    """Overrides of the configuration, by arm. The first arm is the baseline."""
    settings: Sequence[str] = ()
    """Overrides for all arms."""

    @property
    def baseline(self) -> str:
        return next(iter(self.arms))

    def overrides(self, arm: str) -> list[str]:
        return [*self.settings, *self.arms[arm], "trainer.steps=1000", f"trainer.token_budget={self.budget}"]


def settings_digest(study: Study, arm: str) -> str:
    """Identifies the configuration and the overrides of an arm: records with another digest are of other settings."""
    text = json.dumps([(ROOT / study.config).read_text(encoding="utf-8"), study.overrides(arm)])
    return hashlib.sha256(text.encode()).hexdigest()[:12]


STUDIES: Mapping[str, Study] = {
    "calculator": Study(
        title="Generated word problems with a calculator (LangGraph, one agent, two calls)",
        config="examples/calculator/lightning.yaml",
        data="",
        budget=12_000,
        arms=CREDIT,
    ),
}
