"""The doctor names each planted fault, and finds no problem in healthy programs. Real rollouts, HTTP and models."""

from __future__ import annotations

from collections.abc import Callable
from io import StringIO
from pathlib import Path

import pytest
from starlette.responses import JSONResponse

from lightning_core.config import load_config
from lightning_core.testing.recording_server import RecordingServer
from lightning_core.tools.doctor import Finding, examine
from tests.tools.doctor.agents import BYPASSED
from tests.tools.doctor.conftest import named, problems

pytestmark = pytest.mark.slow

Examine = Callable[..., list[Finding]]


@pytest.mark.long
def test_a_healthy_example_has_no_problem(tiny_model: Path, tmp_path: Path) -> None:
    example = Path(__file__).parents[3] / "examples" / "calculator" / "lightning.yaml"
    overrides = [f"policy.model={tiny_model}", "policy.train_layers=1", f"run.dir={tmp_path / 'runs'}"]
    overrides.append("rollouts.executor=task")
    found = examine(load_config(example, overrides), attempts=2)
    assert problems(found) == []
    assert {f.section for f in found} == {"configuration", "tasks", "scripted policy", "policy", "plan"}
    assert not (tmp_path / "runs").exists()


def test_a_healthy_agent_has_no_problem_and_a_plan(with_model: Examine) -> None:
    found = with_model("healthy", trainer={"steps": 3})
    assert problems(found) == []
    assert [f.name for f in found if f.section == "plan"] == [
        *["model"] * 3, "time of a step", "time of the run", "memory of the run", "checkpoints",
    ] or any(f.name == "slow update" for f in found)  # fmt: skip
    (run,) = [f for f in found if f.name == "time of the run"]
    assert run.found.endswith("for 3 steps and 2 evaluations")


def test_a_misspelt_agent_is_a_problem_with_the_names_to_choose_from(with_script: Examine) -> None:
    found = with_script("healthy", agents={"train": ["doctord"]})
    (stopped,) = named(found, "stopped")
    assert stopped.level == "problem"
    assert "'doctord'" in stopped.found
    assert "Did you mean 'doctored'?" in stopped.found
    assert "doctored" in stopped.advice


def test_with_a_wrong_selection_no_model_is_loaded(with_model: Examine) -> None:
    found = with_model("healthy", agents={"train": ["doctord"]}, policy={"model": "/nowhere"})
    assert [f.name for f in found if f.section == "policy"] == ["not checked"]


def test_an_agent_that_opens_its_own_socket_is_a_problem_with_the_host(
    with_script: Examine, server: RecordingServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(BYPASSED, server.url)
    found = with_script("bypass")
    (stopped,) = named(found, "stopped")
    assert "came through the policy endpoint" in stopped.found or "made a call" in stopped.found
    (bypassed,) = named(found, "not routed")
    assert "connection by other code: 127.0.0.1" in bypassed.found
    assert "by doctored" in bypassed.found
    assert "endpoint_environment()" in bypassed.advice


def test_a_constant_reward_is_named(with_model: Examine) -> None:
    found = with_model("constant")
    (constant,) = named(found, "rewards")
    assert constant.found == "all 4 rewards are 1, given by what the agent returns"
    assert "choose harder tasks" in constant.advice
    (equal,) = named(found, "equal groups")
    assert equal.found.startswith("2 of 2 groups earned the same")
    assert equal.advice == "choose harder tasks"


def test_rewards_on_another_scale_than_that_of_solved_tasks(with_model: Examine) -> None:
    (rewards,) = named(with_model("pays_by_length"), "rewards")
    assert rewards.found.endswith("; with eval.solved 1 all of them count as solved")
    assert "set eval.solved" in rewards.advice
    (rewards,) = named(with_model("costs_by_length"), "rewards")
    assert rewards.found.endswith("; none reaches eval.solved 1")
    assert "set eval.solved" in rewards.advice
    assert named(with_model("earns_a_part"), "rewards") == [], "partial rewards need no other scale"


def test_the_advice_on_equal_groups_names_the_cause_that_comes_first(with_model: Examine) -> None:
    (equal,) = named(with_model("constant_part"), "equal groups")
    assert equal.advice == "check the reward first: it is the same for every task"
    (equal,) = named(with_model("raises_mostly", agents=None), "equal groups")
    assert equal.advice == "correct the agent first: attempts that fail have the same reward"


def test_equal_groups_have_a_gradient_under_a_rule_that_compares_them_with_others(with_model: Examine) -> None:
    found = with_model("pays_by_task", credit={"advantage": "reinforce++"})
    (equal,) = [f for f in found if f.name == "equal groups"]
    assert equal.level == "info"
    assert equal.found == "2 of 2 groups earned the same; by the rules of credit 2 have a gradient"


def test_advice_on_rewards_that_are_all_0_fits_them_and_the_temperature(with_model: Examine) -> None:
    found = with_model("fruitless", rollouts={"temperature": 1.0})
    (rewards,) = named(found, "rewards")
    assert rewards.found == "all 4 rewards are 0, given by what the agent returns"
    assert "choose easier tasks" in rewards.advice
    (equal,) = named(found, "equal groups")
    assert "solved examples" in equal.advice
    assert "temperature" not in equal.advice, "it is 1.0 already"


def test_failures_of_some_rollouts_have_advice_and_are_told_from_rewards_of_0(with_model: Examine) -> None:
    found = with_model("raises_sometimes", agents=None)
    _, real = named(found, "failures")
    assert real.found == "2 of 4 rollouts failed; the first error: ValueError: boom"
    assert real.advice == "correct the error, or return a reward if the model's response causes it"
    (rewards,) = [f.found for f in found if f.name == "rewards"]
    assert rewards.endswith("given by what the agent returns; 2 of the 4 are 0 because the rollout failed")
    (summary,) = [f.found for f in found if f.name == "summary"]
    assert "agents: those marked with @trainable, or else the only one that makes model calls; " in summary


def test_rollouts_of_which_some_are_left_out_have_advice(with_script: Examine) -> None:
    (failures,) = named(with_script("left_out_sometimes"), "failures")
    assert failures.found.startswith("2 of 4 rollouts were left out")
    assert "Raise rollouts.retries" in failures.advice


def test_a_reward_that_is_no_number_is_a_problem(with_script: Examine) -> None:
    (invalid,) = named(with_script("not_a_number"), "invalid rewards")
    assert invalid.level == "problem"
    assert "4 of 4 rewards are invalid" in invalid.found
    assert "nan" in invalid.found


def test_a_reward_function_that_raises_is_a_problem(with_script: Examine) -> None:
    found = with_script("answer", reward="tests.tools.doctor.agents:score_that_raises")
    (fails,) = named(found, "reward function fails")
    assert fails.level == "problem"
    assert "the reward function raised KeyError: 'expected'" in fails.found


def test_a_slow_reward_function_is_named(with_script: Examine) -> None:
    found = with_script("answer", reward="tests.tools.doctor.agents:slow_score")
    (slow,) = named(found, "slow reward function")
    assert slow.found.startswith("it takes 0.")


@pytest.mark.long
def test_a_slow_reward_function_in_worker_processes_is_named(with_script: Examine) -> None:
    rollouts = {"executor": "process"}
    found = with_script("answer", reward="tests.tools.doctor.agents:slow_score", rollouts=rollouts)
    assert len(named(found, "slow reward function")) == 1


def test_held_out_tasks_that_are_training_tasks_are_a_problem(with_script: Examine) -> None:
    found = with_script("healthy", tasks={"eval": "tests.tools.doctor.agents:copied"})
    (overlap,) = named(found, "overlap")
    assert overlap.level == "problem"
    assert overlap.found.startswith("4 of 4 evaluated tasks are also training tasks: eval-t0, eval-t1")


def test_responses_that_are_cut_are_named_with_a_limit_to_set(with_model: Examine) -> None:
    (cut,) = named(with_model("healthy", rollouts={"max_tokens": 2}), "truncation")
    assert "reached the limit of 2 tokens" in cut.found
    assert cut.advice == "raise rollouts.max_tokens to 4 or more, and max_tokens in the agent's requests if they set it"


def test_groups_that_are_equal_at_a_low_temperature_are_named(with_model: Examine) -> None:
    """The policy is almost greedy, and its reward depends on the task."""
    (equal,) = named(with_model("healthy", rollouts={"temperature": 1e-4}), "equal groups")
    assert equal.found.startswith("2 of 2 groups earned the same; with group_size 8, ")
    assert "rollouts.temperature 1.0" in equal.advice
    assert "refill" not in equal.advice, "measured to harm"


def test_a_history_that_is_rewritten_each_turn_is_named(with_script: Examine) -> None:
    (contexts,) = named(with_script("rewrites"), "contexts")
    assert "4 calls new: the first: rewritten: message 0 (user) was 'say " in contexts.found
    assert "as they were returned" in contexts.advice


def test_a_clock_in_the_system_prompt_is_named(with_script: Examine) -> None:
    (contexts,) = named(with_script("clock"), "contexts")
    assert "4 calls new: the first: clock: message 0 (system) was 'now: " in contexts.found
    assert contexts.advice.startswith("compute the time once for each rollout")


def test_an_agent_that_raises_is_named_with_its_error(with_model: Examine) -> None:
    found = with_model("raises")
    scripted, real = named(found, "failures")
    assert (scripted.level, real.level) == ("warning", "problem")
    assert "4 of 4 rollouts failed" in real.found
    assert "RuntimeError: no tool for this" in real.found
    assert problems(found) == [real]


def test_an_agent_that_raises_before_any_call_is_a_problem_with_the_script_too(with_model: Examine) -> None:
    found = with_model("raises_at_once")
    (failures,) = problems(found)
    assert (failures.section, failures.name) == ("scripted policy", "failures")
    assert failures.found == "4 of 4 rollouts failed; the first error: RuntimeError: no database"
    assert "a run stops before that" in next(f.found for f in found if f.name == "not checked")


def test_the_script_answers_a_typed_agent_by_its_schema(with_script: Examine) -> None:
    found = with_script("typed", rollouts={"max_tokens": 64})
    assert named(found, "failures") == problems(found) == []


@pytest.mark.parametrize("executor", ["thread", pytest.param("process", marks=pytest.mark.long)])
@pytest.mark.parametrize("agent", ["exits", "asks"])
def test_an_agent_that_always_exits_is_a_problem_with_any_answer(
    with_script: Examine, agent: str, executor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", StringIO())
    (failures,) = named(with_script(agent, rollouts={"executor": executor}), "failures")
    assert (failures.level, failures.found[:32]) == ("problem", "4 of 4 rollouts failed; the firs")
    assert "sys.exit()" in failures.advice


def test_if_the_script_keeps_a_trained_agent_from_its_call_the_policy_decides(
    with_model: Examine, server: RecordingServer
) -> None:
    choice = {"index": 0, "message": {"role": "assistant", "content": "first"}, "finish_reason": "stop"}
    server.refusal = JSONResponse(
        {"id": "1", "created": 0, "model": "planner", "object": "chat.completion", "choices": [choice]}
    )
    found = with_model("needs_a_plan", policy={"upstream": {"base_url": server.url}})
    assert problems(found) == []
    (failures,) = named(found, "failures")
    assert failures.found.startswith(
        "4 of 4 rollouts failed with the scripted answer 'ok'; the first error: ValueError"
    )
    assert "doctored → policy: 4 calls" in next(
        f.found for f in found if f.name == "speakers" and f.section == "policy"
    )


def test_a_refused_request_is_named_with_the_reason(with_script: Examine) -> None:
    (refused,) = named(with_script("refused"), "refused")
    assert refused.found.startswith("4 requests of doctored refused:")
    assert "functions" in refused.found


def test_an_agent_that_no_task_reaches_is_named(with_script: Examine) -> None:
    found = with_script("healthy", agents={"train": ["doctored", "reviewer"]})
    assert [f.level for f in found if f.name == "not reached"] == ["warning"]


def test_the_script_answers_in_place_of_providers(with_script: Examine) -> None:
    """The provider's host does not exist: a forwarded call would fail."""
    found = with_script("two_agents")
    (speakers,) = [f for f in found if f.name == "speakers"]
    assert sorted(speakers.found.split("; ")) == ["doctored → policy: 4 calls", "reviewer → not trained: 4 calls"]
    assert named(found, "failures") == []


@pytest.mark.parametrize(
    ("sections", "why"),
    [
        ({"policy": {"model": "none", "backend": "vllm"}}, "policy.backend is vllm"),
        ({"trainer": {"name": "verl"}}, "trainer.name is verl"),
    ],
)
def test_what_was_not_checked_is_said(with_model: Examine, sections: dict[str, object], why: str) -> None:
    found = with_model("healthy", **sections)
    (skipped,) = [f for f in found if f.name == "not checked"]
    assert why in skipped.found
    assert problems(found) == []


def test_an_update_that_fails_is_a_problem(with_model: Examine) -> None:
    """No sampler agrees with its trainer as closely as this limit requires."""
    found = with_model("healthy", trainer={"max_logprob_difference": 1e-15})
    (update,) = named(found, "update")
    assert update.level == "problem"
    assert "max_logprob_difference" in update.found


def test_credit_that_ignores_the_rewards_is_a_problem(with_model: Examine) -> None:
    """The rule uses rewards of single calls, and the agent gives none."""
    (flat,) = named(with_model("healthy", credit={"rewards": "explicit"}), "no gradient")
    assert flat.level == "problem"


def test_a_run_that_needs_held_out_tasks_and_has_none_is_a_problem(with_script: Examine) -> None:
    found = with_script("healthy", tasks={"eval": None}, eval={"every": 2})
    (held_out,) = named(found, "held-out tasks")
    assert (held_out.level, held_out.found) == (
        "problem",
        "tasks.eval is not set, but eval.every requires held-out tasks",
    )


@pytest.mark.parametrize(
    "sections",
    [
        pytest.param({"policy": {"tuning": "lora"}}, marks=pytest.mark.long),
        {
            "policies": {"one": {"agents": ["doctored"], "tuning": "lora"}, "two": {"agents": ["reviewer"]}},
            "agents": None,
        },
    ],
    ids=["an adapter", "two policies"],
)
def test_every_kind_of_policy_has_a_plan(with_model: Examine, sections: dict[str, object]) -> None:
    found = with_model("two_agents", **{"agents": {"train": ["doctored", "reviewer"]}, **sections})
    assert problems(found) == []
    assert "time of a step" in {f.name for f in found}
    (saved,) = [f for f in found if f.name == "checkpoints"]
    assert saved.level == "ok"


def test_a_model_that_cannot_be_loaded_is_a_problem(with_model: Examine, tmp_path: Path) -> None:
    """The agent's wiring is checked before."""
    found = with_model("healthy", policy={"model": str(tmp_path / "nothing")})
    assert [(f.section, f.name) for f in problems(found)] == [("policy", "stopped")]
    assert "nothing" in problems(found)[0].found
    assert [f.section for f in found if f.name == "speakers"] == ["scripted policy"]


def test_an_agent_whose_history_outlives_its_rollout_is_a_problem(with_script: Examine) -> None:
    (found,) = named(with_script("never_forgets", rollouts={"concurrency": 1}), "shared state")
    assert found.level == "problem"
    assert found.found == "3 of 4 rollouts began with a response that was sampled in another rollout"
    assert "rollouts.fresh: true" in found.advice
    assert named(with_script("healthy"), "shared state") == []
