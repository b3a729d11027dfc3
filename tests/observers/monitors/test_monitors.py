"""Each monitor on written histories: the step at which it is raised, and a healthy run close to its threshold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from lightning_core.errors import CreditError
from lightning_core.observers.monitoring import monitor_stop
from lightning_core.observers.monitors import MONITORS, Alert, HeldOut, alerts, new_alerts, raised, watched

HEALTHY: dict[str, Any] = {
    "reward": 0.5, "solved": 0.3, "rollouts": 32, "rollouts_failed": 2, "rollouts_left_out": 1, "rollouts_invalid": 0,
    "rollouts_without_calls": 1, "rollouts_caught_refusal": 1,
    "caught_refusal_reward": 0.4, "context_new": 32, "context_clean": 20, "context_realigned": 4, "context_forked": 2,
    "context_rewritten": 1, "calls": 64, "calls_truncated": 6, "calls_credited": 40, "response_tokens": 60.0,
    "sampling_entropy": 0.8, "groups": 4, "groups_equal": 1, "groups_single": 0, "rows_trained": 20, "staleness": 0.5,
    "grad_norm": 1.0, "clip_low_fraction": 0.05, "clip_high_fraction": 0.1, "logprob_difference_mean": 0.01,
}  # fmt: skip


NONE: dict[str, Any] = {"calls_credited": 0, "groups_equal": 4}
"""A step without a gradient."""


def run_of(*steps: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The history of a run whose steps differ from a healthy one."""
    return [{**HEALTHY, "step": number, **changes} for number, changes in enumerate(steps, start=1)]


def test_a_healthy_run_raises_nothing() -> None:
    history = run_of(*({"reward": 0.3 + 0.02 * i, "sampling_entropy": 0.8 - 0.02 * i} for i in range(30)))
    held_out = {step: {str(task): 0.3 + 0.01 * step for task in range(20)} for step in (0, 10, 20, 30)}
    assert alerts(history, held_out) == []


FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "no_gradient": ({"calls_credited": 0, "groups_equal": 4, "reward": 0.25}, "rollouts.temperature"),
    "single_attempt": ({"groups_single": 3, "groups_equal": 0, "calls_credited": 16}, "credit.group_by"),
    "failed_rollouts": ({"rollouts_failed": 16}, "lightning-rl trace"),
    "left_out": ({"rollouts_left_out": 4}, "rollouts.retries"),
    "caught_refusals": (
        {"rollouts_caught_refusal": 4, "caught_refusal_reward": 0.0},
        "0 on average, against 0.5 over all rollouts",
    ),
    "no_calls": ({"rollouts_without_calls": 16}, "agents.train"),
    "forked_contexts": ({"context_clean": 10, "context_forked": 20}, "policy.chat_template_kwargs"),
    "truncation": ({"calls_truncated": 32}, "rollouts.max_tokens"),
    "clipping": ({"clip_high_fraction": 0.3}, "trainer.learning_rate"),
    "sampler_mismatch": ({"logprob_difference_mean": 0.06}, "policy.dtype"),
    "stale_policy": ({"staleness": 4.0}, "trainer.mode"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named_after_three_steps_until_it_ends(name: str) -> None:
    changes, advice = FAULTS[name]
    found = alerts(run_of({}, changes, changes, changes, changes, {}, {}, {}), {})
    assert {alert.monitor for alert in found} == {name}
    steps = [alert.step for alert in found]
    assert steps[0] in (3, 4), "a mean over three steps may exceed the threshold early"
    assert 5 in steps
    assert steps[-1] < 8
    assert advice in found[0].message


def test_wasted_groups_are_named_from_the_first_step() -> None:
    """84% of the groups, and three of ten steps without any gradient, one of them now and then."""
    wasted = {"groups": 32, "groups_equal": 27, "groups_wasted": 27}
    (alert,) = raised(run_of(wasted), {})
    assert alert.monitor == "wasted_groups"
    assert (
        "27 of the 32 groups of the last step (84%) had no gradient, for example because their attempts"
        in alert.message
    )
    assert "rollouts.temperature" in alert.message
    assert "refill" not in alert.message, "measured to harm"
    healthy = {"groups": 32, "groups_wasted": 12}
    none = {"groups": 32, "groups_wasted": 32, "calls_credited": 0}
    history = run_of(*[healthy, none, healthy, none, *[healthy] * 5, none])
    assert [(alert.monitor, alert.step) for alert in alerts(history, {})] == [("wasted_groups", 10)]
    assert "3 of 10 steps had none at all" in alerts(history, {})[0].message
    assert raised(run_of({**wasted, "solved": 0.95}), {}) == [], "solved tasks are not wasted"
    assert raised(run_of({"groups": 4, "groups_wasted": 4}), {}) == [], "too few groups to tell"
    named = {"groups": None, "first_groups": 8, "groups_wasted": 8, "groups_equal": None}
    assert raised(run_of(*[{"groups": 8, "groups_wasted": 6}, named] * 5), {}) == [], "a resumed run with components"
    rare = [{"groups": 8, "groups_wasted": wasted} for wasted in (6, 7, 5, 5, 1, 1)]
    assert alerts(run_of(*rare), {}) == [], (
        "recorded: an agent that solves 3% of its tasks before training, and all after it"
    )


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"rollouts_failed": 24, "reward": 0.0}, "75% of the rollouts failed"),
        ({"reward": 0.7, "reward_std": 1e-8}, "Every rollout earned 0.7. The reward does not depend on the response"),
        ({"reward": 0.0, "reward_std": 0.0}, "for example because their attempts"),
        ({"reward": 0.7, "reward_std": 0.1}, "for example because their attempts"),
        ({"reward": 0.7}, "for example because their attempts"),
    ],
)
def test_wasted_groups_of_failures_and_of_a_constant_reward(changes: dict[str, Any], expected: str) -> None:
    (alert,) = raised(run_of({"groups": 8, "groups_wasted": 8, **changes}), {})
    assert alert.monitor == "wasted_groups"
    assert expected in alert.message
    assert ("rollouts.temperature" in alert.message) != ("failed" in alert.message)


def test_rewards_that_differ_from_step_to_step_are_not_constant() -> None:
    steps = [{"groups": 8, "groups_wasted": 8, "reward_std": 0.0, "reward": reward} for reward in (0.5, 0.25)]
    (alert,) = raised(run_of(*steps), {})
    assert "Every rollout" not in alert.message


def test_skipped_updates_are_named_from_the_first_step() -> None:
    skipped = {"updates": 0, "updates_skipped": 1}
    (alert,) = raised(run_of(skipped), {})
    assert alert.monitor == "skipped_updates"
    assert "was not finite in 1 of the last 1 step, so these trained nothing" in alert.message
    assert "in 2 of the last 3 steps" in raised(run_of({}, skipped, skipped), {})[0].message
    assert raised(run_of(skipped, {}, {}), {}) == [], "one skipped step is harmless"


def test_wasted_groups_are_silent_only_while_no_gradient_is_reported() -> None:
    none = run_of(*[{"groups": 32, "groups_wasted": 32, "groups_equal": 32, "calls_credited": 0}] * 4)
    found = [
        [alert.monitor for alert in raised(none, {}, monitors)]
        for monitors in (watched(), watched(disable=["no_gradient"]), watched(args={"no_gradient": {"steps": 9}}))
    ]
    assert found == [["no_gradient"], ["wasted_groups"], ["wasted_groups"]]


def test_the_reasons_of_rollouts_that_are_left_out_are_counted() -> None:
    (alert,) = raised(run_of(*[{"rollouts_left_out": 4, "rollouts_timeout": 4}] * 3), {})
    assert "12 took too long (" in alert.message
    assert "rollouts.timeout_seconds" in alert.message
    assert "infrastructure" not in alert.message
    (alert,) = raised(run_of(*[{"rollouts_left_out": 4, "rollouts_timeout": 3}] * 3), {})
    assert "the others had an infrastructure failure" in alert.message


def test_the_mean_reward_after_refusals_counts_each_rollout_once() -> None:
    one, nine = ({"rollouts_caught_refusal": n, "caught_refusal_reward": reward} for n, reward in ((1, 1.0), (9, 0.0)))
    (alert,) = raised(run_of(one, nine, {"rollouts_caught_refusal": 0, "caught_refusal_reward": None}), {})
    assert "in 10% of the rollouts of the last 3 steps" in alert.message
    assert ": 0.1 on average" in alert.message


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"reward": 0.0}, "too hard"),
        ({"reward": 1.0, "solved": 1.0}, "Use harder tasks"),
        ({"reward": 0.5, "solved": 0.0}, "does not depend on the response"),
        ({"reward": 0.0, "rollouts_failed": 15}, "too hard"),
        ({"reward": 0.0, "reward_std": 1.0, "solved": 0.0}, "some earn more than others in all attempts"),
        ({"reward": 0.5, "reward_std": 0.5, "solved": 0.5}, "some earn more than others in all attempts"),
        ({"reward": 0.7, "reward_std": 1e-8, "solved": 0.0}, "does not depend on the response"),
        (
            {"groups_equal": 2},
            "the rewards of 6 of the 12 groups differ, but all advantages are 0; change credit.rewards",
        ),
    ],
)
def test_the_cause_of_a_missing_gradient_depends_on_the_rewards(changes: dict[str, Any], expected: str) -> None:
    (alert,) = raised(run_of(*[{**NONE, **changes}] * 3), {})
    assert (alert.monitor, expected in alert.message) == ("no_gradient", True)


def test_failures_explain_a_missing_gradient() -> None:
    found = raised(run_of(*[{**NONE, "reward": 0.0, "rollouts_failed": 16}] * 3), {})
    (alert,) = [alert for alert in found if alert.monitor == "no_gradient"]
    assert (
        "50% of the rollouts failed, and attempts that fail usually have the same reward. Correct the agent: "
        in alert.message
    )
    assert "too hard" not in alert.message


def test_without_trained_rows_advantages_and_other_tokens_are_no_gradient() -> None:
    """Such as with reward_weight: 0 and a teacher of agents that made no call, or another policy's tokens_ce."""
    line = {"calls_credited": 9, "tokens_ce": 5, "rows_trained": 0}
    (alert,) = raised(run_of(*[line] * 3), {})
    assert (alert.monitor, "algorithm.reward_weight: 0" in alert.message) == ("no_gradient", True)
    assert raised(run_of(*[{**line, "calls_credited": 0, "rows_trained": 2}] * 3), {}) == []
    alone = run_of(*[{**line, "calls_credited": 64, "groups_single": 4, "groups_equal": 0}] * 3)
    assert [alert.monitor for alert in raised(alone, {})] == ["no_gradient"], "also with one attempt per task"


@pytest.mark.parametrize(
    ("before", "solved", "expected"),
    [
        (0, 0.3, "check the reward"),
        (9, 0.0, "lower trainer.learning_rate"),
        (9, 0.3, "an answer that no attempt gives is not learned"),
    ],
)
def test_a_gradient_that_ends_has_other_causes_than_one_that_never_was(
    before: int, solved: float, expected: str
) -> None:
    *_, alert = raised(run_of({"calls_credited": before}, *[{**NONE, "solved": solved}] * 3), {})
    assert (alert.monitor, expected in alert.message) == ("no_gradient", True)


def test_metrics_of_older_runs_are_read() -> None:
    """They have ``rows_trained`` only."""
    new = ("calls", "calls_credited", "solved", "response_tokens", "sampling_entropy", "context_rewritten", "staleness")
    history = [{k: v for k, v in line.items() if k not in new} for line in run_of(*[{"rows_trained": 0}] * 3)]
    assert [alert.monitor for alert in raised(history, {})] == ["no_gradient"]
    assert raised([{**line, "rows_trained": 1} for line in history], {}) == []


def test_steps_without_calls_are_not_steps_without_a_gradient() -> None:
    assert raised(run_of(*[{"calls": 0, "calls_credited": 0, "calls_truncated": 0}] * 3), {}) == []


def test_groups_of_one_attempt_are_no_fault_with_a_rule_that_credits_them() -> None:
    assert raised(run_of(*[{"groups_single": 4, "groups_equal": 0, "calls_credited": 64}] * 3), {}) == []


def test_a_changed_history_and_a_changing_template_have_different_causes() -> None:
    (agent,) = raised(run_of(*[{"context_clean": 2, "context_rewritten": 30, "context_new_clock": 20}] * 3), {})
    (template,) = raised(run_of(*[{"context_clean": 2, "context_forked": 30}] * 3), {})
    assert "The agent changes its history, most often with the cause 'clock': compute the time once" in agent.message
    assert "The chat template renders" in template.message


def entropies(*values: float, **changes: float) -> list[dict[str, Any]]:
    return run_of(*({"sampling_entropy": value, "groups": 8, "groups_equal": 8, **changes} for value in values))


def test_entropy_collapses_only_if_it_was_higher_and_the_tasks_are_not_solved() -> None:
    (alert,) = raised(entropies(0.8, 0.7, 0.6, 0.01, 0.005, 0.005), {})
    assert "fell from 0.700 to 0.0067 nats" in alert.message
    assert raised(entropies(0.8, 0.7, 0.6, 0.01, 0.005, 0.005, solved=0.95), {}) == []
    assert raised(entropies(*[0.005] * 6), {}) == [], "it was low from the beginning"
    assert raised(entropies(0.8, 0.7, 0.6, 0.1, 0.08, 0.07), {}) == []
    certain = entropies(0.8, 0.7, 0.6, 0.03, 0.02, 0.03, groups_equal=7)
    assert raised(certain, {}) == [], "short answers that still differ"


def test_entropy_that_falls_while_the_reward_does_not_rise_has_collapsed() -> None:
    """Six recorded steps of an agent that settled on one of three answers: 0.24 of its tasks solved before training, 0.25 after it."""
    rewards, entropy = (0.297, 0.297, 0.422, 0.328, 0.109, 0.188), (0.927, 0.301, 0.005, 0.046, 0.001, 0.001)
    steps = [
        {"reward": reward, "sampling_entropy": nats, "groups": 8, "groups_equal": equal}
        for reward, nats, equal in zip(rewards, entropy, (1, 5, 6, 6, 7, 6), strict=True)
    ]
    (alert,) = [alert for alert in raised(run_of(*steps), {}) if alert.monitor == "entropy_collapse"]
    assert "fell from 0.411 to 0.0160 nats per token, and the reward from 0.339 to 0.208" in alert.message
    assert "rollouts.tasks_per_step" in alert.message
    before, after = ({str(task): float(task < solved) for task in range(12)} for solved in (3, 9))
    assert [a.monitor for a in raised(run_of(*steps), {0: before, 5: after})] == [], (
        "a curriculum has harder tasks, and a gain is seen"
    )
    assert raised(run_of(*steps), {0: after, 5: before}), "no gain"
    assert raised(run_of(*steps), {0: before, 5: before}), "no gain"
    risen = [{**step, "reward": reward} for step, reward in zip(steps, sorted(rewards), strict=True)]
    assert [alert.monitor for alert in raised(run_of(*risen), {}) if alert.monitor == "entropy_collapse"] == []


def test_responses_explode_within_twenty_steps_or_grow_slowly() -> None:
    fast = run_of(*({"response_tokens": 20.0 * 1.1**step} for step in range(20)))
    slow = run_of(*({"response_tokens": 20.0 * 1.05**step} for step in range(40)))
    short = run_of(*({"response_tokens": 2.0 * 1.1**step} for step in range(20)))
    (alert,) = raised(fast, {})
    assert alert.monitor == "length_explosion"
    assert "grew from 20 to 101 tokens" in alert.message
    assert alerts(slow, {}) == alerts(short, {}) == []
    shrunk = run_of(
        {"response_tokens": None}, *({"response_tokens": n} for n in (400.0, 50.0, 60.0, 200.0, 210.0, 220.0))
    )
    assert [a.monitor for a in raised(shrunk, {})] == ["length_explosion"], "compared with the shortest"


def test_a_gradient_norm_that_is_not_finite_or_rises_suddenly() -> None:
    (infinite,) = raised(run_of({}, {"grad_norm": None}), {})
    assert "grad_norm) is not finite" in infinite.message
    (rising,) = raised(run_of(*[{}] * 8, *[{"grad_norm": 40.0}] * 3), {})
    assert "rose from 1 to 40" in rising.message
    assert raised(run_of(*[{}] * 8, {"grad_norm": 40.0}, {}, {}), {}) == [], "a single one is clipped"
    long = watched(args={"gradient_norm": {"steps": 15}})
    assert len(raised(run_of(*[{}] * 35, *[{"grad_norm": 40.0}] * 15), {}, long)) == 1, "longer than its usual window"


def held(*means: float, tasks: int = 20) -> HeldOut:
    """Evaluations every five steps; tasks differ, and so do their changes."""
    return {5 * i: {str(t): m + 0.2 * (t % 3) + 0.02 * i * (t % 2) for t in range(tasks)} for i, m in enumerate(means)}


RISING = [{"reward": 0.3 + 0.02 * i + 0.01 * (i % 2)} for i in range(15)]


def test_reward_hacking_needs_both_rewards_to_change_beyond_chance() -> None:
    (alert,) = raised(run_of(*RISING), held(0.3, 0.35, 0.2, 0.1))
    assert alert.monitor == "reward_hacking"
    assert "fell by 0.230 between the evaluations after 5 and 15 steps" in alert.message
    assert raised(run_of(*RISING), held(0.3, 0.35, 0.4, 0.5)) == []
    assert raised(run_of(*RISING), held(0.3, 0.35, 0.2, 0.1, tasks=5)) == [], "too few tasks"
    assert raised(run_of(*[{}] * 15), held(0.3, 0.35, 0.2, 0.1)) == [], "the training reward did not rise"
    noisy: HeldOut = {0: {str(t): float(t % 2) for t in range(20)}, 15: {str(t): float(t % 3 == 0) for t in range(20)}}
    assert raised(run_of(*RISING), noisy) == [], "it fell by chance"


CHOSEN = {"tasks_sampled_success": 0.5}
"""A step whose tasks a curriculum chose."""


def test_with_a_curriculum_training_rewards_of_different_steps_are_not_compared() -> None:
    """It draws harder tasks later, so they fall while the policy stays the same."""
    falling = [{**CHOSEN, "reward_air": 0.1 * i + 0.01 * (i % 2), "reward": 0.8 - 0.05 * i} for i in range(15)]
    assert raised(run_of(*falling), {}) == raised(run_of(*falling), held(0.3, 0.35, 0.4, 0.5)) == []
    (hacking, replaced) = raised(run_of(*falling), held(0.3, 0.35, 0.2, 0.1))
    assert (hacking.monitor, replaced.monitor) == ("reward_hacking", "intermediate_rewards")
    assert "the held-out reward fell by 0.230 between the evaluations after 5 and 15 steps" in hacking.message
    assert "while the held-out reward fell from 0.490 to 0.320" in replaced.message


def test_groups_that_only_intermediate_rewards_distinguish() -> None:
    (alert,) = raised(run_of(*[{"air_alone": 0.5}] * 5), {})
    assert alert.monitor == "shaping_alone"
    assert (
        "in 50% of the groups of the last 5 steps the attempts differ in the rewards of credit.air alone"
        in alert.message
    )
    assert raised(run_of(*[{"air_alone": 0.4}] * 5), {}) == []


def test_conversations_that_outlive_their_rollout_are_named_after_one_step() -> None:
    (alert,) = raised(run_of({"shared_state": 0.25}), {})
    assert alert.monitor == "shared_state"
    assert "in 25% of the rollouts of the last step the first prompt has a response" in alert.message
    assert raised(run_of({"shared_state": 0.05}), {}) == []


def test_intermediate_rewards_that_replace_the_tasks_reward() -> None:
    air = [{"reward_air": 0.1 * i + 0.01 * (i % 2), "reward": 0.8 - 0.05 * i} for i in range(12)]
    (alert,) = raised(run_of(*air), {})
    assert alert.monitor == "intermediate_rewards"
    assert "credit.air" in alert.message
    assert raised(run_of(*({**step, "reward": 0.3 + 0.01 * i} for i, step in enumerate(air))), {}) == []


def test_each_policy_has_monitors_of_its_own() -> None:
    own = {f"writer/{key}": HEALTHY[key] for key in ("calls", "calls_credited", "calls_truncated", "groups")}
    cut = {"reader/calls": 10, "reader/calls_truncated": 9, "reader/calls_credited": 5, "rollouts_failed": 20}
    found = raised(run_of(*[{**own, **cut}] * 3), {})
    assert {(a.monitor, a.policy) for a in found} == {("truncation", "reader"), ("failed_rollouts", None)}
    assert str(next(a for a in found if a.policy)).startswith("truncation: policy reader: 90% of the responses")


def test_alerts_of_all_steps_are_those_of_the_run_itself() -> None:
    """Each step knows the evaluations before it; the last one knows its own too."""
    history = run_of(*RISING)
    held_out = held(0.3, 0.35, 0.2, 0.1)
    live = [
        alert
        for number in range(1, len(history) + 1)
        for alert in raised(
            history[:number], {s: r for s, r in held_out.items() if s < number or number == len(history)}
        )
    ]
    assert alerts(history, held_out) == live
    assert live
    again = [Alert(monitor="m", step=step, message="x") for step in (1, 2, 5, 6)]
    assert [alert.step for alert in new_alerts(again)] == [1, 5]


def slow(history: Sequence[Mapping[str, Any]], held_out: HeldOut, *, above: float = 1.0) -> str | None:
    """A monitor of a user."""
    return "slow" if history[-1].get("seconds_rollouts", 0) > above else None


def truncation(history: Sequence[Mapping[str, Any]], held_out: HeldOut) -> str | None:
    return None


def test_monitors_are_switched_off_configured_and_added() -> None:
    history = run_of(*[{"calls_truncated": 40, "seconds_rollouts": 3.0}] * 3)
    assert [a.monitor for a in raised(history, {})] == ["truncation"]
    assert raised(history, {}, watched(disable=["truncation"])) == []
    assert raised(history, {}, watched(args={"truncation": {"at_least": 0.9}})) == []
    added = watched(disable=["truncation"], add={"m:slow": slow}, args={"m:slow": {"above": 2.0}})
    assert [str(a) for a in raised(history, {}, added)] == ["slow: slow"]
    with pytest.raises(CreditError, match="'m:truncation' has the name 'truncation', which is taken"):
        watched(add={"m:truncation": truncation})
    with pytest.raises(CreditError, match="cannot be one of the monitors; expected the signature"):
        watched(add={"m:f": lambda history: None})
    with pytest.raises(CreditError, match="'slow' has no argument 'belo'; expected 'above'"):
        watched(add={"m:slow": slow}, args={"m:slow": {"belo": 2.0}})


def broken(history: Sequence[Mapping[str, Any]], held_out: HeldOut) -> str | None:
    return history[-1]["missing"]


def ending(history: Sequence[Mapping[str, Any]], held_out: HeldOut) -> str | None:
    raise SystemExit(7)


def test_a_monitor_that_raises_is_reported_and_does_not_end_the_run() -> None:
    found = raised(run_of({}), {}, watched(add={"m:broken": broken, "m:ending": ending}))
    assert [str(alert).partition(". ")[0] for alert in found] == [
        "broken: the monitor itself failed: KeyError: 'missing'",
        "ending: the monitor itself failed: SystemExit: 7",
    ]
    assert monitor_stop(found, ["broken", "ending"]) is None


def test_every_monitor_is_tested_here() -> None:
    others = {
        "wasted_groups",
        "skipped_updates",
        "entropy_collapse",
        "length_explosion",
        "gradient_norm",
        "reward_hacking",
        "intermediate_rewards",
        "shaping_alone",
        "shared_state",
    }
    assert set(MONITORS) == {*FAULTS, *others}
