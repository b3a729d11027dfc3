"""What is compared: a study is a task with its arms, all with the same budget of model tokens."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lightning_core import Config, load_config

ROOT = Path(__file__).parents[3]
CHECKPOINT_EVERY = 4
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
    """The configuration, a path in the repository."""
    tasks: Sequence[str] = ()
    """Overrides that name the data sets, ``{data}`` for the folder ``--data``, and the held-out set as ``tasks.eval``."""
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


def configured(study: Study, arm: str, seed: int, *, data: Path, work: Path) -> Config:
    """The configuration of a run in ``work``."""
    source = [text.format(data=data) for text in study.tasks]
    name = f"{arm}-{seed}".replace(" ", "-").replace(",", "")
    run = [f"run.dir={work}", f"run.name={name}", f"run.seed={seed}", f"trainer.checkpoint_every={CHECKPOINT_EVERY}"]
    return load_config(ROOT / study.config, [*source, *study.overrides(arm), *run])


def settings_digest(study: Study, arm: str) -> str:
    """Identifies the configuration and the overrides of an arm: records with another digest are of other settings."""
    text = json.dumps([(ROOT / study.config).read_text(encoding="utf-8"), study.overrides(arm)])
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def read_from(folder: str, test: str, args: str = "") -> list[str]:
    """`Study.tasks` for a reader with the argument ``folder``; ``test``: its function for the held-out set."""
    return [
        f"tasks.train.args={{{{folder: '{{data}}/{folder}'{args}}}}}",
        f"tasks.eval.args={{{{folder: '{{data}}/{folder}'{args}}}}}",
        f"tasks.eval.source={test}",
    ]


MATH = read_from("svamp", "examples.math_tool.word_problems:test", ", operations: 1")
MULTIHOP = [
    *(
        f"tasks.{part}.args={{{{folders: ['{{data}}/multihop/musique', '{{data}}/multihop/2wiki'], subset: two-search}}}}"
        for part in ("train", "eval")
    ),
    "tasks.eval.source=examples.rag.multihop:test",
]

STUDIES: Mapping[str, Study] = {
    "math": Study(
        title="SVAMP with a calculator, problems of one operation (AutoGen)",
        config="examples/math_tool/word_problems.yaml",
        tasks=MATH,
        budget=24_000,
        arms=CREDIT,
        settings=("eval.tasks=200",),
    ),
    "multihop": Study(
        title="MuSiQue and 2WikiMultihopQA, questions of two searches (OpenAI Agents SDK)",
        config="examples/rag/multihop.yaml",
        tasks=MULTIHOP,
        budget=24_000,
        arms=CREDIT,
    ),
    "single-turn": Study(
        title="SVAMP in one response, problems of one operation",
        config="tests/bench/learning/single_turn.yaml",
        tasks=MATH,
        budget=8_000,
        arms={BROADCAST: (), "TRL": ()},
        settings=("eval.tasks=200",),
    ),
}
