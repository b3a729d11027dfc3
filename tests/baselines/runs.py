"""The runs whose rows, metrics and summaries are compared: what each of them adds to `BASE`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

BASE: dict[str, Any] = {
    "agent": "tests.baselines.agents:solve",
    "tasks": {"train": "tests.baselines.agents:tasks", "sampling": "uniform"},
    "agents": {"train": ["planner", "writer"], "frozen": {"reviewer": "base"}},
    "policy": {"model": "no-such-model"},
    "rollouts": {"tasks_per_step": 2, "group_size": 3, "max_tokens": 96, "executor": "task"},
    "trainer": {"steps": 2, "checkpoint_every": 0, "measure_change": 1},
}
FORKS = {"points": 2, "samples": 2}
CRITERIA = [
    {"name": "small", "text": "It is in lower case.", "weight": 2.0, "agents": ["writer"]},
    {"name": "short", "text": "It is short."},
]
AIR = {
    "tool_ok": 0.25,
    "tool_error": -0.5,
    "tool_unused": -1.0,
    "token_cost": 0.015625,
    "call_cost": 0.125,
    "truncated": -0.5,
    "formats": [{"pattern": "^plan", "weight": 0.5, "agents": ["planner"]}],
}
GAIN = {"answer": "answer", "prefix": "answer: "}
TEACHER = {"teacher": "base", "prompt": "tests.baselines.agents:with_examples"}

RUNS: dict[str, dict[str, Any]] = {
    "embedded": {
        "tasks": {"eval": "tests.baselines.agents:held_out"},
        "trainer": {"steps": 3, "checkpoint_every": 1, "keep_best": True, "measure_change": 4},
        "eval": {"every": 1, "samples": 2, "tasks": 6},
        # The summary's answers are those of the rollouts that ended first.
        "rollouts": {"concurrency": 1},
    },
    "outcomes": {
        "agent": "tests.baselines.agents:solve_badly",
        "reward": "tests.baselines.agents:judge_badly",
        # The summary's first errors are those of the rollouts that ended first.
        "rollouts": {"group_size": 6, "max_invalid": 100, "max_tokens": 12, "concurrency": 1},
        "algorithm": {"truncated": "mask"},
    },
    "several policies": {
        "agent": "tests.baselines.agents:solve_per_agent",
        "credit": {"rewards": "explicit"},
        "policies": {
            "plan": {"agents": ["planner"], "credit": {"advantage": "rloo"}},
            "write": {"agents": ["writer"], "credit": {"rewards": "discounted", "gamma": 0.5}},
        },
    },
    "forks, counterfactual": {
        "rollouts": {"forks": {**FORKS, "tools": "recorded"}},
        "credit": {"rewards": "counterfactual", "advantage": "rloo"},
    },
    "forks, vine": {"rollouts": {"forks": FORKS}, "credit": {"rewards": "vine", "advantage": "none"}, "trainer": {"steps": 1}},
    "distillation, reverse": {"algorithm": {"distill": {**TEACHER, "weight": 0.5, "agents": ["writer"]}, "reward_weight": 2.0}},
    "distillation, forward": {"algorithm": {"distill": {**TEACHER, "divergence": "forward", "candidates": 3}}, "trainer": {"steps": 1}},
    "cross-entropy, tool and user": {"algorithm": {"ce": {"weight": 0.5, "tokens": ["tool", "user"]}}},
    "cross-entropy, response": {
        "algorithm": {"ce": {"weight": 0.5, "tokens": "response", "min_reward": 0.5, "agents": ["writer"]}},
        "trainer": {"steps": 1},
    },
    "judge": {"credit": {"judge": {"model": "base", "rubric": "It is good.", "weight": 0.5}}},
    "judge, criteria": {"credit": {"judge": {"model": "base", "rubric": CRITERIA, "weight": 0.5}}, "trainer": {"steps": 1}},
    "information gain": {"credit": {"rewards": "igpo", "information_gain": GAIN}},
    "air": {"credit": {"rewards": "discounted", "gamma": 0.5, "air": AIR}, "rollouts": {"max_tokens": 24}},
    "critic": {"credit": {"rewards": "gae", "gamma": 0.5, "lam": 0.5, "advantage": "reinforce++"}},
    "curriculum": {
        "agent": "tests.baselines.agents:solve_or_not",
        "tasks": {"train": {"source": "tests.baselines.agents:tasks", "args": {"count": 6}}, "sampling": "curriculum"},
        "trainer": {"steps": 3},
    },
    "refill": {
        "agent": "tests.baselines.agents:solve_or_not",
        "tasks": {"train": {"source": "tests.baselines.agents:tasks", "args": {"count": 6}}},
        "rollouts": {"refill": 2},
    },
    "together": {
        "rollouts": {"forks": FORKS},
        "credit": {
            "rewards": "counterfactual",
            "advantage": "rloo",
            "air": AIR,
            "judge": {"model": "base", "rubric": CRITERIA},
        },
        "algorithm": {"distill": TEACHER, "ce": {"weight": 0.5, "tokens": ["tool", "response"], "min_reward": 0.5}},
    },
}  # fmt: skip


def settings(name: str, runs: Path) -> dict[str, Any]:
    """The configuration of the run ``name``, whose folder is in ``runs``."""
    own: dict[str, Any] = {**RUNS[name], "run": {"dir": str(runs), "name": "run"}}
    merged = {**BASE, **own}
    for section in BASE.keys() & own.keys():
        if isinstance(own[section], dict):
            merged[section] = {**BASE[section], **own[section]}
    return merged
