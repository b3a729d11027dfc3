"""Compares ways to train an agent that compacts its own history: credit for the summaries, or for the answers only.

    python -m tests.bench.horizon [--seeds 6] [--tokens 12500] [--arm credit masked …] [--results horizon.jsonl] [--resume]
        [--model FOLDER]

The task has 40 turns, and the window holds 8 (`horizon_task.py`). All runs start from the same model of 0.1 million weights
(`horizon_model.py`), whose summaries omit most of what the window did not repeat. A run ends with the first evaluation after it has
sampled ``--tokens`` tokens, those of forks too. Runs of one seed share tasks and sampling seeds. Arms:

- ``credit``: summaries and answers are trained, each call with the episode's return (``rewards: broadcast``).
- ``masked``: the policy writes the summaries, but their tokens are not trained on (``agents.auxiliary``).
- ``frozen``: the model before training writes the summaries (``agents.frozen: {summariser: base}``).
- ``forks``: as ``credit``, with forks at summaries only (``rewards: counterfactual``), at the same number of tokens.

Each run is a line in ``--results``, added when the run ends. With ``--resume``, runs that are in the file and have sampled enough
tokens are not repeated. The table is made from the file: means over seeds and their 95 % intervals (bootstrap over seeds; none with
fewer than 6), on held-out tasks.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lightning_core.records.statistics.intervals import Estimate
from tests.bench.bootstrap import over_seeds

TASKS_PER_STEP = 3
GROUP = 8
MAX_STEPS = 1000
EVAL_EVERY = 8
LEARNING_RATE = 5e-4
CONTEXT = 160
"""Tokens of the window: 8 turns, the answers, and two summaries."""
BOTH = {"train": ["worker", "summariser"]}
ARMS: dict[str, dict[str, Any]] = {
    "credit": {"agents": BOTH},
    "masked": {"agents": {**BOTH, "auxiliary": [{"name": "masked", "agent": "summariser"}]}},
    "frozen": {"agents": {"train": ["worker"], "frozen": {"summariser": "base"}}},
    "forks": {
        "agents": BOTH,
        "credit": {"rewards": "counterfactual"},
        "rollouts": {"group_size": GROUP // 2, "forks": {"points": 2, "samples": 2, "agents": ["summariser"]}},
    },
}


class Spent(Exception):
    """The run has sampled its tokens."""


def run(arm: str, seed: int, tokens: int, model: Path) -> dict[str, Any]:
    """One training run."""
    import torch

    from lightning_core import fit, load_config
    from lightning_core.observers.progress import SilentProgress
    from lightning_core.records.results import held_out_rewards
    from lightning_core.records.store import Store

    torch.set_num_threads(1)
    curve: list[dict[str, float]] = []

    class Watch(SilentProgress):
        def phase(self, name: str, total: int | None = None) -> None:
            if name == "train" and curve and len(curve) % EVAL_EVERY == 0 and curve[-1]["tokens"] >= tokens:
                raise Spent  # after an evaluation

        def step(self, step: int, total_steps: int, metrics: Any) -> None:
            spent = metrics["tokens_sampled"] + metrics.get("tokens_forked", 0)
            before = curve[-1]["tokens"] if curve else 0
            names = ("rows", "rollouts", "tokens_trained", "reward")
            curve.append({"tokens": before + spent, **{name: float(metrics[name]) for name in names}})

    with tempfile.TemporaryDirectory() as folder:
        common: dict[str, Any] = {
            "agent": "tests.bench.horizon_task:remember",
            "tasks": {
                "train": "tests.bench.horizon_task:training_tasks",
                "eval": "tests.bench.horizon_task:held_out_tasks",
            },
            "policy": {"model": str(model), "max_context": CONTEXT, "dtype": "float32"},
            "trainer": {
                "steps": MAX_STEPS,
                "learning_rate": LEARNING_RATE,
                "checkpoint_every": 0,
                "threads": 1,
            },
            "algorithm": {"updates_per_step": 2},
            "eval": {"every": EVAL_EVERY, "samples": 2},
            "run": {"dir": folder, "name": "run", "seed": seed},
        }
        own = ARMS[arm]
        rollouts = {"tasks_per_step": TASKS_PER_STEP, "group_size": GROUP, "max_tokens": 10, "executor": "task"}
        config = {**common, **own, "rollouts": {**rollouts, **own.get("rollouts", {})}}
        with contextlib.suppress(Spent):
            fit(config=load_config(config), progress=Watch())
        with Store(Path(folder) / "run" / "store.db", read_only=True) as store:
            held_out = held_out_rewards(store, "eval_before", "eval")
    return {
        "arm": arm,
        "seed": seed,
        "curve": curve,
        "held_out": {str(k): v for k, v in held_out.items()},
    }


def shown(estimate: Estimate) -> str:
    return f"{estimate.mean:.2f} [{estimate.low:.2f}, {estimate.high:.2f}]"


def held_out_at(result: dict[str, Any], tokens: float) -> float:
    """The held-out reward when ``tokens`` tokens were sampled, interpolated between two evaluations."""
    spent = [0.0, *(point["tokens"] for point in result["curve"])]
    steps = sorted(int(step) for step in result["held_out"])
    return float(np.interp(tokens, [spent[step] for step in steps], [result["held_out"][str(step)] for step in steps]))


def report(results: Sequence[dict[str, Any]], budget: int) -> None:
    """Print the table, up to ``budget`` tokens."""
    marks = [budget * part / 5 for part in range(6)]
    print("held-out reward by sampled tokens" + "".join(f"{mark:>20,.0f}" for mark in marks))
    for arm in ARMS:
        own = [r for r in results if r["arm"] == arm]
        if own:
            means = [shown(over_seeds([held_out_at(r, mark) for r in own])) for mark in marks]
            print(f"  {arm:24s} {len(own)} seeds" + "".join(f"{mean:>20}" for mean in means))
    reference = {r["seed"]: held_out_at(r, budget) for r in results if r["arm"] == "credit"}
    for arm in ARMS:
        own = [r for r in results if r["arm"] == arm and r["seed"] in reference]
        if arm != "credit" and own:
            difference = over_seeds([reference[r["seed"]] - held_out_at(r, budget) for r in own])
            print(f"  credit minus {arm}, same seeds, at {budget:,} tokens: {shown(difference)}")


def read(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=12_500)
    parser.add_argument("--arm", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--results", type=Path, default=Path("horizon.jsonl"))
    parser.add_argument("--resume", action="store_true", help="keep the runs that are in the file")
    parser.add_argument("--model", type=Path, help="folder of the pretrained model, written if it does not exist")
    options = parser.parse_args()
    from tests.bench.horizon_model import make_forgetful

    file: Path = options.results
    if not options.resume:
        file.unlink(missing_ok=True)
    done = {(r["arm"], r["seed"]) for r in read(file) if r["curve"][-1]["tokens"] >= options.tokens}
    wanted = [(arm, seed) for seed in range(options.seeds) for arm in options.arm if (arm, seed) not in done]
    with tempfile.TemporaryDirectory() as folder:
        model: Path = options.model or Path(folder) / "model"
        if wanted and not model.exists():
            make_forgetful(model)
        for arm, seed in wanted:
            with file.open("a") as lines:
                lines.write(json.dumps(run(arm, seed, options.tokens, model)) + "\n")
    report([r for r in read(file) if r["curve"][-1]["tokens"] >= options.tokens], options.tokens)


if __name__ == "__main__":
    main()
