"""The plan of a run is extrapolated from one measured step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from lightning_core.config import load_config
from lightning_core.testing.recording_server import serve_app
from lightning_core.tools.doctor.equal_groups import expected_equal
from lightning_core.tools.doctor.finding import Finding
from lightning_core.tools.doctor.plan import (
    Measured,
    TimeRange,
    checks,
    disk_needed,
    evaluations,
    rollouts_time,
    step_time,
    steps_of_run,
)
from tests.tools.doctor.conftest import named

GIB = 1 << 30
CONFIG = load_config(
    {
        "policy": {"model": "m"},
        "rollouts": {"tasks_per_step": 4, "group_size": 8, "concurrency": 16},
        "trainer": {"steps": 10, "keep_checkpoints": 2},
        "eval": {"every": 5},
    }
)
MEASURED = Measured(
    config=CONFIG,
    eval_tasks=16,
    rollouts=8,
    seconds_rollouts=6.0,
    seconds_rollout=4.0,
    seconds_own=1.0,
    seconds_update=3.0,
    memory=2 * GIB,
    peak=3 * GIB,
    trained_bytes=GIB,
    frozen_bytes=GIB,
    optimizer_bytes=2 * GIB,
    disk_bytes=100 * GIB,
)


def examine(measured: Measured) -> list[Finding]:
    return list(checks.examine("plan", measured))


def test_a_step_takes_between_its_rounds_of_rollouts_and_their_sum() -> None:
    """32 rollouts, 16 at a time: two rounds of 4 s, or four times the 6 s of eight."""
    assert step_time(MEASURED) == (TimeRange(8.0, 24.0), TimeRange(3.0, 12.0))
    few = replace(MEASURED, gradient_share=0.25)
    assert step_time(few) == (TimeRange(8.0, 24.0), TimeRange(0.75, 12.0)), "rows without a gradient are not computed"


def test_rollouts_one_at_a_time_have_one_time() -> None:
    alone = replace(MEASURED, rollouts=1, seconds_rollouts=4.0)
    one_by_one = CONFIG.rollouts.model_copy(update={"concurrency": 1})
    alone = replace(alone, config=CONFIG.model_copy(update={"rollouts": one_by_one}))
    assert rollouts_time(alone, 5) == TimeRange(20.0, 20.0)


def test_fewer_rollouts_than_those_of_the_trial_take_up_to_the_time_of_one() -> None:
    assert rollouts_time(MEASURED, 2) == TimeRange(1.5, 4.0)


def test_the_run_is_its_steps_and_evaluations() -> None:
    assert evaluations(MEASURED, 10) == 3  # before, after step 5, at the end
    assert evaluations(replace(MEASURED, eval_tasks=0), 10) == 0
    (run,) = [f for f in examine(MEASURED) if f.name == "time of the run"]
    low, high = 10 * (8 + 3) + 3 * 4, 10 * (24 + 12) + 3 * 12
    assert run.found == f"{low // 60}m{low % 60:02}s to {high // 60}m{high % 60:02}s for 10 steps and 3 evaluations"


def limited(**limits: float) -> Measured:
    """A run of up to 1,000 steps."""
    trainer = CONFIG.trainer.model_copy(update={"steps": 1000, **limits})
    return replace(MEASURED, config=CONFIG.model_copy(update={"trainer": trainer}), sampled_tokens=100)


@pytest.mark.parametrize(
    ("measured", "steps"),
    [
        (limited(), (1000, 1000)),
        (limited(minutes=6), (10, 33)),  # steps of 11 to 36 s
        (limited(token_budget=4000), (10, 10)),  # 400 a step
        (limited(token_budget=4000, minutes=3), (5, 10)),
        (limited(token_budget=1, minutes=3), (1, 1)),
        (limited(minutes=1e6), (1000, 1000)),
        (replace(limited(token_budget=1), sampled_tokens=0), (1000, 1000)),
    ],
)
def test_a_run_has_the_steps_that_its_budgets_admit(measured: Measured, steps: tuple[int, int]) -> None:
    assert steps_of_run(measured) == steps


def test_the_time_of_the_run_is_that_of_its_budgets() -> None:
    (run,) = [f for f in examine(limited(minutes=6)) if f.name == "time of the run"]
    fast, slow = 33 * 11 + 8 * 4, 10 * 36 + 3 * 12
    assert (fast, slow) == (395, 396)
    assert run.found == "6m35s to 6m36s for 10 to 33 steps and 3 to 8 evaluations; trainer.steps is 1,000"


def test_a_disk_that_is_too_small_for_the_checkpoints_is_a_problem() -> None:
    """Two kept and a new one, the frozen weights once, and three optimizer states while an old one is not deleted."""
    assert disk_needed(MEASURED) == (3 + 1 + 6) * GIB
    (disk,) = named(examine(replace(MEASURED, disk_bytes=9 * GIB)), "checkpoints")
    assert disk.level == "problem"
    assert disk.found == "4.0 GiB for the newest, up to 10.0 GiB at the same time; 9.0 GiB free"
    assert named(examine(replace(MEASURED, disk_bytes=10 * GIB)), "checkpoints") == []


def test_an_update_that_takes_longer_than_the_rollouts_suggests_fewer_weights() -> None:
    assert [f for f in examine(MEASURED) if f.name == "slow update"] == []
    (slow,) = [f for f in examine(replace(MEASURED, seconds_update=7.0)) if f.name == "slow update"]
    assert "policy.train_layers" in slow.advice
    assert "lora" in slow.advice
    assert "takes 7.0s for rows with a gradient, its rollouts 6.0s" in slow.found
    half = replace(MEASURED, seconds_update=7.0, gradient_share=0.5)
    assert [f for f in examine(half) if f.name == "slow update"] == [], "rows without a gradient are not computed"


def test_times_near_a_limit_are_warnings_at_the_concurrency_of_the_run() -> None:
    """Eight rollouts took 600 s; sixteen beside each other may take 1,200."""
    assert named(examine(MEASURED), "time limits") == []
    slow = replace(MEASURED, seconds_own=61.0, seconds_rollouts=600.0)
    own, whole = named(examine(slow), "time limits")
    assert (own.level, own.found) == (
        "warning",
        "a rollout took 1m01s apart from its model calls; rollouts.timeout_seconds is 120",
    )
    assert whole.found == "a rollout may take 20m00s beside 15 others; rollouts.total_seconds is 1200"


def test_an_update_that_fails_is_a_problem() -> None:
    failed = replace(MEASURED, seconds_update=None, update_error="the loss is nan")
    assert [f.level for f in named(examine(failed), "update")] == ["problem"]


def test_the_share_of_equal_groups_is_that_of_the_binomial() -> None:
    """Half of many attempts succeed: eight are equal with probability 2 · 0.5^8."""
    many = [[0.0, 1.0] * 2000]
    assert expected_equal(many, 8).mean == pytest.approx(2 * 0.5**8, rel=0.05)


def test_few_attempts_give_a_wide_interval() -> None:
    few, more = expected_equal([[0.0] * 4] * 2, 8), expected_equal([[0.0] * 64] * 8, 8)
    assert few.low < 0.2 < 0.9 < few.high
    assert more.low > 0.8
    assert few.low < few.mean < few.high


@pytest.mark.parametrize(("tasks", "attempts", "constant"), [(8, 2, 0.5), (8, 4, 0.8), (16, 4, 0.5)])
def test_the_interval_of_equal_groups_holds_for_graded_rewards(tasks: int, attempts: int, constant: float) -> None:
    """Five of six intervals, at least, hold the share of tasks with a constant reward. All other tasks' rewards differ."""
    generator = np.random.default_rng(0)
    held = 0
    for _ in range(30):
        trial = [
            [round(generator.random(), 1)] * attempts
            if generator.random() < constant
            else list(generator.random(attempts))
            for _ in range(tasks)
        ]
        found = expected_equal(trial, 8)
        held += found.low - 0.01 <= constant <= found.high
    assert held >= 25


def test_rewards_that_always_differ_are_not_expected_to_be_equal() -> None:
    assert expected_equal([[0.1, 0.4, 0.5, 0.9], [0.2, 0.3, 0.6, 0.7]], 8).high < 0.1


def test_calls_to_providers_are_counted_and_priced(with_model: Callable[..., list[Finding]], tmp_path: Path) -> None:
    """Another agent's model is at a provider, which counts tokens."""

    async def answer(request: Request) -> Response:
        choice = {"index": 0, "message": {"role": "assistant", "content": "fine"}, "finish_reason": "stop"}
        usage = {"prompt_tokens": 50, "completion_tokens": 10}
        return JSONResponse({"model": (await request.json())["model"], "choices": [choice], "usage": usage})

    prices = tmp_path / "prices.yaml"
    prices.write_text("large: {input: 1000, output: 5000}")  # 0.1 USD a call
    size = {"tasks_per_step": 4, "group_size": 8}
    with serve_app(Starlette(routes=[Route("/chat/completions", answer, methods=["POST"])])) as url:
        found = with_model(
            "two_agents",
            agents={"frozen": {"reviewer": "large"}},
            policy={"upstream": {"base_url": url}},
            rollouts=size,
            trainer={"steps": 10},
            tasks={"eval": None},
            prices=str(prices),
        )
    (text,) = [f.found for f in found if f.name == "provider calls"]
    assert text == (
        f"large at {url.removeprefix('http://')}: a step 32 calls (1,600 tokens in, 320 out), $3.20; "
        "with evaluations, the run 320 calls, $32.00"
    )


def test_calls_that_a_provider_fails_are_counted_too(with_model: Callable[..., list[Finding]]) -> None:
    """Each of the four rollouts asks once, and every second request fails."""
    requests = count(1)

    async def answer(_: Request) -> Response:
        if next(requests) % 2 == 0:
            return JSONResponse({"error": {"message": "no capacity"}}, 500)
        choice = {"index": 0, "message": {"role": "assistant", "content": "fine"}, "finish_reason": "stop"}
        usage = {"prompt_tokens": 50, "completion_tokens": 10}
        # A provider answers with the name of a version of the model.
        return JSONResponse({"model": "large-2026", "choices": [choice], "usage": usage})

    with serve_app(Starlette(routes=[Route("/chat/completions", answer, methods=["POST"])])) as url:
        found = with_model(
            "two_agents",
            agents={"frozen": {"reviewer": "large"}},
            policy={"upstream": {"base_url": url}},
            rollouts={"tasks_per_step": 4, "group_size": 8, "retries": 2},
            trainer={"steps": 10},
            tasks={"eval": None},
        )
    texts = [f.found for f in found if f.name == "provider calls"]
    assert len(texts) == 1
    assert texts[0].startswith(f"large-2026 at {url.removeprefix('http://')}: a step 32 calls (800 tokens in, 160 out)")
    assert "the run 320 calls; 2 of 4 calls of the trial failed, and rollouts that are left out" in texts[0]
