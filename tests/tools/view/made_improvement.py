"""A folder of ``lightning-rl improve`` that trains, written without running it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_core.records.statistics.intervals import Estimate
from lightning_core.records.statistics.measured import EvaluationSummary
from lightning_core.records.statistics.prices import Prices
from lightning_core.records.statistics.usage import AnsweredCall, usage_of
from lightning_core.tools.runs.improvement import CurrentStage, Improvement, Note, StageResult
from tests.tools.view.made_runs import make_run, rollout

COMMAND = "lightning-rl train c.yaml run.dir=runs"


def make_improvement(folder: Path, **values: Any) -> Improvement:
    """Write a folder with a provider's run, a policy's, a search of prompts, and training that runs; ``values`` replace fields."""
    for name in ("baseline-1", "eval-1"):
        make_run(folder / name, rollouts=[rollout(1, phase="eval_manual", step=0)])
    stages = [
        _stage("provider", "baseline-1", 0.9, (0.8, 0.97), "large"),
        _stage("policy", "eval-1", 0.2, (0.1, 0.35), "tiny", over_provider=Estimate(-0.7, -0.8, -0.5)),
        StageResult(
            name="prompts", command="lightning-rl prompts c.yaml", run=None, minutes=1.5, result=None, over_policy=None,
            over_provider=None,
        ),
    ]  # fmt: skip
    defaults: dict[str, Any] = {
        "name": folder.name, "command": "lightning-rl improve c.yaml --model large", "model": "large", "started": time.time() - 600,
        "minutes": 10.0, "minutes_limit": 60.0, "usd": 0.012, "usd_limit": None, "tokens_limit": None,
        "stages": stages,
        "current": CurrentStage("train", COMMAND),
        "notes": [
            Note("prompts", "none is better than the agent's own"), Note("warm start", "left out, there are no traces")
        ],
        "best": "policy", "result": ["No stage is better than the untrained policy."], "use": None,
    }  # fmt: skip
    found = Improvement(**{**defaults, **values})
    found.write(folder)
    return found


def _stage(
    name: str, run: str, reward: float, interval: Sequence[float], model: str, over_provider: Estimate | None = None
) -> StageResult:
    calls = [
        AnsweredCall(requested=model, model=model, host="h", input_tokens=900, cached_tokens=0, output_tokens=100, seconds=0.5)
    ] * 4  # fmt: skip
    result = EvaluationSummary(
        model=model,
        tasks=20,
        rollouts=4,
        left_out=0,
        reward=reward,
        reward_ci95=(interval[0], interval[1]),
        solved=int(20 * reward),
        usage=usage_of(calls, rollouts=4, prices=Prices()),
    )
    command = f"lightning-rl eval c.yaml run.name={run}"
    return StageResult(
        name=name, command=command, run=run, minutes=2, result=result, over_policy=None, over_provider=over_provider
    )
