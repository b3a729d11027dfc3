"""docs/metrics.md lists the metrics of real steps: all of them, and no others."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from lightning_core import fit, load_config
from tests import bandit, two_bandits
from tests.tiny_model import make_tiny_model

PAGE = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \| (P?) ?\|", PAGE, re.MULTILINE)
DOCUMENTED = {name: bool(mark) for names, mark in ROWS for name in re.findall(r"\w+", names)}
WITH_VLLM = {"seconds_push"}
WITH_SFT = {"held_out_ce_loss"}
"""tests/tools/sft reads it."""
WITH_TEACHER = {"tokens_distill_constrained"}
OF_FAILED_UPDATES = {"updates_skipped", "updates_repeated"}
"""A teacher on a server: tests/loop/test_distill.py reads it."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


def metrics_of(model: Path, runs: Path, solve: Any, sections: dict[str, dict[str, Any]]) -> set[str]:
    """The names of one step's metrics."""
    base: dict[str, dict[str, Any]] = {
        "policy": {"model": str(model), "max_context": 2048, "dtype": "float32"},
        "rollouts": {"tasks_per_step": 1, "group_size": 2, "max_tokens": 4, "executor": "task"},
        "trainer": {"steps": 1, "checkpoint_every": 0},
        "run": {"dir": str(runs)},
    }
    settings = {key: {**base.get(key, {}), **sections.get(key, {})} for key in {**base, **sections}}
    result = fit(solve, config=load_config(settings), tasks=bandit.tasks(1))
    return set(result.metrics[0]) - {"step"}


SETTINGS: dict[str, dict[str, dict[str, Any]]] = {
    "corrections": {
        "policy": {"tuning": "lora"},
        "tasks": {"sampling": "curriculum"},
        "credit": {"air": {"truncated": -0.1}, "judge": {"model": "base"}},
        "algorithm": {"loss": "dual-clip", "kl": {"weight": 0.1}, "importance": {}, "mini_batches": 2},
    },
    "critic": {"credit": {"rewards": "gae", "gamma": 1.0, "advantage": "none"}, "algorithm": {"entropy_weight": 0.01}},
    "teacher": {"algorithm": {"distill": {"teacher": "base", "prompt": "tests.loop.taught_agents:with_examples"}}},
    "teacher's distribution": {
        "algorithm": {
            "distill": {"teacher": "base", "prompt": "tests.loop.taught_agents:with_examples", "divergence": "forward"}
        }
    },
    "cross-entropy": {"algorithm": {"ce": {"weight": 0.1, "tokens": "response", "min_reward": 0.0}}},
    "answers": {"credit": {"rewards": "igpo", "information_gain": {"answer": "prompt"}}},
    "forks": {"credit": {"rewards": "counterfactual"}, "rollouts": {"forks": {"points": 1, "samples": 1}}},
}


def test_the_page_lists_the_metrics_of_a_step(model: Path, tmp_path: Path) -> None:
    found: set[str] = set()
    for name, sections in SETTINGS.items():
        found |= metrics_of(model, tmp_path / name, bandit.solve, sections)
    own = metrics_of(
        model,
        tmp_path / "policies",
        two_bandits.solve,
        {
            "policies": {"talk": {"agents": ["talker"]}, "count": {"agents": ["counter"]}},
            "credit": {"rewards": "explicit", "group_by": ["task", "agent"], "air": {"truncated": -0.1}},
        },
    )
    for name in own:
        policy, _, metric = name.rpartition("/")
        assert metric in DOCUMENTED, name
        both = metric in (
            "calls",
            "calls_credited",
            "calls_truncated",
            "truncated",
            "response_tokens",
            "sampling_entropy",
        )
        assert DOCUMENTED[metric] == bool(policy) or both, name
    found |= {name.rpartition("/")[2] for name in own}
    assert found | WITH_VLLM | WITH_SFT | WITH_TEACHER | OF_FAILED_UPDATES == set(DOCUMENTED)
