"""What is compared: a study is a task with its arms, all with the same budget of model tokens."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import yaml

from lightning_core import Config, load_config
from tests.bench.coder_model import fetch_coder
from tests.bench.learning.records import EVALUATED

ROOT = Path(__file__).parents[3]
CHECKPOINT_EVERY = 4
UNIFORM = "tasks.sampling=uniform"
"""Of all runs, unless an arm changes it: rules are compared on the same tasks."""
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
TREE = ("rollouts.group_size=4", "rollouts.forks={points: 2, samples: 2}", "credit.rewards=examples.rules.tree:tree")
CREDIT: Mapping[str, Sequence[str]] = {
    BROADCAST: (),
    "counterfactual": COUNTERFACTUAL,
    "vine": VINE,
    "tree": TREE,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmStart:
    """Supervised fine-tuning on gold solutions, once for all arms and seeds of a study."""

    respond: str
    """The function that returns the responses; see `examples.demonstrations`."""
    tasks: Sequence[str]
    """Overrides that name the demonstrated tasks as ``tasks.train``. They are in no run's training tasks."""
    epochs: int = 1
    batch: int = 8
    held_out: float = 0.05
    settings: Sequence[str] = ("trainer.learning_rate=1e-4", "trainer.schedule=linear", "trainer.warmup_steps=2")


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
    warm: WarmStart | None = None
    """None: the arms start from the configuration's model."""
    model: Callable[[], Path] | None = None
    """Returns the folder of the initial weights, if the configuration cannot name them. The configuration has the model's name."""
    untrained: Sequence[str] = ()
    """With a warm start: overrides for the evaluation of the configuration's model, which may need examples in its prompt."""

    @property
    def baseline(self) -> str:
        return next(iter(self.arms))

    def overrides(self, arm: str) -> list[str]:
        return [*self.settings, *self.arms[arm], "trainer.steps=1000", f"trainer.token_budget={self.budget}"]


def configured(study: Study, arm: str, seed: int, *, data: Path, work: Path, model: Path | None = None) -> Config:
    """The configuration of a run in ``work``. ``model``: the initial weights; None: those of the configuration."""
    source = located(study.tasks, data)
    # With the digest, so that no run resumes from another setting's checkpoint.
    name = f"{arm}-{seed}-{settings_digest(study, arm)}".replace(" ", "-")
    run = [f"run.dir={work}", f"run.name={name}", f"run.seed={seed}", f"trainer.checkpoint_every={CHECKPOINT_EVERY}"]
    initial = [] if model is None else [f"policy.model={model}"]
    return load_config(ROOT / study.config, [UNIFORM, *source, *study.overrides(arm), *run, *initial])


def located(overrides: Sequence[str], data: Path) -> list[str]:
    """``overrides`` with the folder of the data sets."""
    return [text.format(data=data) for text in overrides]


def settings_digest(study: Study, arm: str) -> str:
    """Identifies the configuration and the overrides of an arm: records with another digest are of other settings.

    An arm that is only evaluated has no budget.
    """
    warm = [list(study.untrained), warm_digest(study)] if study.warm else []
    evaluated = [*study.settings, *study.arms[study.baseline]]
    overrides = evaluated if arm in EVALUATED else study.overrides(arm)
    return _digest(study, list(study.tasks), overrides, *warm)


def warm_digest(study: Study) -> str:
    """Identifies the warm start of a study: weights with another digest are of other settings."""
    return _digest(study, asdict(study.warm) if study.warm else None)


def _digest(study: Study, *parts: object) -> str:
    config = yaml.safe_load((ROOT / study.config).read_text(encoding="utf-8"))
    return hashlib.sha256(json.dumps([config, *parts]).encode()).hexdigest()[:12]


def demonstrated(folder: str, args: str, *, train: str, count: int) -> list[str]:
    """Training tasks of ``train``, a function of `tests.bench.learning.tasks`, with ``count`` demonstrations."""
    return [
        f"tasks.train.source={train}",
        f"tasks.train.args={{{{folder: '{{data}}/{folder}', demonstrations: {count}{args}}}}}",
    ]


def read_from(
    folder: str, test: str, args: str = "", *, train: str | None = None, less: int | None = None
) -> list[str]:
    """`Study.tasks` for a reader with the argument ``folder``; ``test``: its function for the held-out set.

    ``train``: that for the training set without ``less`` demonstrated tasks; None: the configuration's.
    """
    own = [f"tasks.train.args={{{{folder: '{{data}}/{folder}'{args}}}}}"]
    return [
        *(own if train is None or less is None else demonstrated(folder, args, train=train, count=less)),
        f"tasks.eval.args={{{{folder: '{{data}}/{folder}'{args}}}}}",
        f"tasks.eval.source={test}",
    ]


TASKS = "tests.bench.learning.tasks"
AFTER_WARM_START = ("rollouts.temperature=1.0", "rollouts.executor=task", "trainer.measure_change=0", "eval.tasks=200")
"""Fine-tuning on gold solutions leaves little entropy: at a lower temperature most groups have equal rewards."""
SPIDER = ", subset: one-table, max_schema: 400"
MATH = ", operations: 1"
DEMONSTRATED_SPIDER, DEMONSTRATED_MATH = 600, 48
"""The number of training tasks whose gold answers the policy learns before the runs."""


def multihop(part: str, subset: str, *, examples: bool) -> str:
    """An override that names the questions of ``tasks.<part>``."""
    folders = "['{data}/multihop/musique', '{data}/multihop/2wiki']"
    return f"tasks.{part}.args={{{{folders: {folders}, subset: {subset}, examples: {str(examples).lower()}}}}}"


STUDIES: Mapping[str, Study] = {
    "spider": Study(
        title="Spider, queries over one table (LangGraph)",
        config="examples/text_to_sql/spider.yaml",
        tasks=read_from(
            "spider", "examples.text_to_sql.spider:test", SPIDER, train=f"{TASKS}:spider_rest", less=DEMONSTRATED_SPIDER
        ),
        warm=WarmStart(
            respond="examples.text_to_sql.spider:gold_response",
            tasks=demonstrated("spider", SPIDER, train=f"{TASKS}:spider_demonstrated", count=DEMONSTRATED_SPIDER),
        ),
        untrained=[
            f"tasks.eval.args={{{{folder: '{{data}}/spider'{SPIDER}, own_examples: 6}}}}",
            "rollouts.temperature=0.3",
        ],
        budget=12_000,
        arms={
            BROADCAST: (),
            "counterfactual": COUNTERFACTUAL,
            "vine": VINE,
            "writer alone": ("agents.train=[writer]", "agents.frozen={rewriter: base, checker: base}"),
            "weights per agent": (
                "agents={frozen: {checker: base}}",
                "policies={writer: {agents: [writer]}, rewriter: {agents: [rewriter]}}",
            ),
        },
        settings=(*AFTER_WARM_START, "trainer.learning_rate=2e-5"),
    ),
    "math": Study(
        title="SVAMP with a calculator, problems of one operation (AutoGen)",
        config="examples/math_tool/word_problems.yaml",
        tasks=read_from(
            "svamp",
            "examples.math_tool.word_problems:test",
            f"{MATH}, examples: none",
            train=f"{TASKS}:math_rest",
            less=DEMONSTRATED_MATH,
        ),
        warm=WarmStart(
            respond="examples.math_tool.word_problems:gold_response",
            tasks=demonstrated(
                "svamp", f"{MATH}, examples: none", train=f"{TASKS}:math_demonstrated", count=DEMONSTRATED_MATH
            ),
        ),
        untrained=[f"tasks.eval.args={{{{folder: '{{data}}/svamp'{MATH}}}}}", "rollouts.temperature=0.7"],
        budget=12_000,
        arms={BROADCAST: (), "counterfactual": COUNTERFACTUAL, "vine": VINE},
        settings=(*AFTER_WARM_START, "trainer.learning_rate=3e-5"),
    ),
    "multihop": Study(
        title="MuSiQue and 2WikiMultihopQA, questions of two searches (OpenAI Agents SDK)",
        config="examples/rag/multihop.yaml",
        tasks=[
            multihop("train", "two-search", examples=False),
            multihop("eval", "two-search", examples=False),
            "tasks.eval.source=examples.rag.multihop:test",
        ],
        warm=WarmStart(
            respond="examples.rag.multihop:gold_response",
            tasks=[multihop("train", "bridge", examples=False)],
        ),
        untrained=[multihop("eval", "two-search", examples=True), "rollouts.temperature=0.7"],
        budget=12_000,
        arms=CREDIT,
        settings=(*AFTER_WARM_START, "trainer.learning_rate=3e-5"),
    ),
    "single-turn": Study(
        title="SVAMP in one response, problems of one operation",
        config="tests/bench/learning/single_turn.yaml",
        tasks=read_from("svamp", "examples.math_tool.word_problems:test", MATH),
        budget=8_000,
        arms={
            BROADCAST: (),
            "MaxRL": ("credit.advantage=maxrl",),
            "curriculum": ("tasks.sampling=curriculum",),
            "token mean": ("algorithm.aggregation=token-mean",),
            "TRL": (),
        },
        settings=("eval.tasks=200",),
    ),
    "spider-coder": Study(
        title="Spider, queries of all forms, Qwen2.5-Coder-0.5B-Instruct (LangGraph)",
        config="tests/bench/learning/spider_coder.yaml",
        tasks=read_from("spider", "examples.text_to_sql.spider:test", ", max_schema: 900"),
        budget=20_000,
        arms={BROADCAST: ()},
        model=fetch_coder,
    ),
}
