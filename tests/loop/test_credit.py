"""Credit in the whole loop on a tiny random model: dynamic sampling, a judge, a critic, recomputed credit."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from lightning_core import fit, load_config
from lightning_core.backends.scripted import ScriptedBackend
from lightning_core.chat.chat import Chat
from lightning_core.endpoint.server import Routing
from lightning_core.errors import InfrastructureError
from lightning_core.loop import Result
from lightning_core.records.store import Store
from lightning_core.tools.cli.main import main
from lightning_core.tools.runs.recredit import recredit
from lightning_core.tools.serving import ServingEndpoint
from tests.tiny_model import make_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


def train(model: Path, runs: Path, agent: str, **sections: Any) -> Result:
    base: dict[str, dict[str, Any]] = {
        "tasks": {"train": {"source": "tests.bandit:tasks", "args": {"count": 16}}},
        "policy": {"model": str(model), "max_context": 2048, "dtype": "float32"},
        "rollouts": {"tasks_per_step": 4, "group_size": 4, "max_tokens": 4, "temperature": 1.0, "executor": "task"},
        "trainer": {"steps": 2, "learning_rate": 5e-3},
        "run": {"dir": str(runs), "name": "run"},
    }
    merged = {key: {**base.get(key, {}), **sections.get(key, {})} for key in {**base, **sections}}
    return fit(config=load_config({"agent": agent, **merged}))


def test_groups_that_teach_nothing_are_replaced_within_the_budget(model: Path, tmp_path: Path):
    """Three quarters of the tasks always earn 1. 4 of 16 tasks have a signal, and each step uses up to 4 + 6 of them."""
    result = train(model, tmp_path, "tests.loop.bandit_programs:mostly_equal", rollouts={"refill": 6})
    with Store(result.folder / "store.db", read_only=True) as store:
        for step, metrics in enumerate(result.metrics, start=1):
            records = store.rollouts(step=step, phase="train")
            tried = {r.task_id for r in records}
            credited = {store.rollout(c.rollout).task_id for c in store.credit(step=step)}
            assert len(tried) == 4 + metrics["groups_refilled"]
            assert len(credited) == 4, "the batch keeps its size"
            assert metrics["rollouts"] == 4 * len(tried)
            equal = {task for task in tried if int(task[1:]) % 4}
            assert metrics["groups_refilled"] == 6 or not credited & equal
            assert metrics["groups_equal"] == len(credited & equal)
            assert metrics["reward"] == pytest.approx(sum(r.reward or 0 for r in records) / len(records))


@pytest.mark.long
def test_without_a_budget_nothing_is_replaced(model: Path, tmp_path: Path):
    result = train(model, tmp_path, "tests.loop.bandit_programs:mostly_equal")
    assert [(m["rollouts"], m["groups_refilled"]) for m in result.metrics] == [(16, 0)] * 2


def letters(prompt: str) -> str:
    """A judge that prefers small letters: reads the attempts in its prompt and scores each."""
    attempts = re.split(r"--- Attempt \d+\n", prompt.partition("<|im_end|>\n<|im_start|>assistant")[0])[1:]
    attempts[-1] = attempts[-1].partition("\nAnswer as JSON")[0]
    said = [a.partition("assistant (talker): ")[2] for a in attempts]
    return json.dumps({"scores": [min(10, round(2.5 * sum("a" <= c <= "z" for c in text))) for text in said]})


@pytest.mark.parametrize("steps", [1, pytest.param(10, marks=pytest.mark.long)])
def test_a_judge_behind_the_upstream_is_all_the_reward_there_is(model: Path, tmp_path: Path, steps: int):
    backend = ScriptedBackend(letters, models=["critic"])
    chat = Chat(backend.tokenizer)
    with ServingEndpoint(backend, chat, routing=Routing(max_tokens=1000)) as upstream:
        result = train(
            model,
            tmp_path,
            "tests.loop.bandit_programs:silent",
            policy={"upstream": {"base_url": upstream.url}},
            credit={"judge": {"model": "critic", "weight": 2.0}},
            rollouts={"group_size": 8},
            trainer={"steps": steps},
        )
    with Store(result.folder / "store.db", read_only=True) as store:

        def score(step: int) -> float:
            values = [c.reward for c in store.credit(step=step)]
            return sum(values) / len(values)

        assert steps == 1 or score(steps) > score(1) + 0.5
        first = store.rollouts(step=1, phase="train")[0]
        trace = store.trace(first.id)
        (reward,) = [r for r in trace.rewards if r.name == "judge"]
        said = (trace.calls[0].response or {})["content"]
        assert reward.value == pytest.approx(2 * min(10, round(2.5 * sum("a" <= c <= "z" for c in said))) / 10)
        judged = store.rollouts(step=1, phase="judge")
        assert len(judged) == 4
        (call,) = store.trace(judged[0].id).calls
        assert (call.agent, call.model, call.policy_version) == ("judge", "critic", None)
    assert all(m["reward"] == 0 for m in result.metrics), "the agents' own return does not change"


def by_criteria(prompt: str) -> str:
    """A judge with the scores of `letters` under "small", and the opposite under "other"."""
    small = json.loads(letters(prompt))["scores"]
    return json.dumps({"small": small, "other": [10 - score for score in small]})


def test_a_judge_scores_each_criterion_and_each_counts_on_its_own(model: Path, tmp_path: Path):
    backend = ScriptedBackend(by_criteria, models=["critic"])
    rubric = [
        {"name": "small", "text": "Small letters.", "weight": 1.0, "agents": ["talker"]},
        {"name": "other", "text": "Anything else.", "weight": 0.25},
    ]
    with ServingEndpoint(backend, Chat(backend.tokenizer), routing=Routing(max_tokens=1000)) as upstream:
        result = train(
            model,
            tmp_path,
            "tests.loop.bandit_programs:silent",
            policy={"upstream": {"base_url": upstream.url}},
            credit={"judge": {"model": "critic", "rubric": rubric, "weight": 2.0}},
        )
    with Store(result.folder / "store.db", read_only=True) as store:
        for step, metrics in enumerate(result.metrics, start=1):
            credit = {c.rollout: c for c in store.credit(step=step)}
            scores: dict[str, dict[str, list[float]]] = {}
            for record in store.rollouts(step=step, phase="train"):
                judged = {r.name: r for r in store.trace(record.id).rewards if (r.name or "").startswith("judge_")}
                assert [r.agent for r in judged.values()] == ["talker", None]
                small, other = (r.value for r in judged.values())
                assert small + other == pytest.approx(1.0)
                assert credit[record.id].reward == pytest.approx(2 * small + 2 * 0.25 * other)
                scores.setdefault(record.task_id, {})[record.id] = [small, other]
            for group in scores.values():
                mean = sum(small for small, _ in group.values()) / len(group)
                deviation = math.sqrt(sum((small - mean) ** 2 for small, _ in group.values()) / (len(group) - 1))
                for rollout, (small, _) in group.items():
                    expected = 2 * (1 - 0.25) * (small - mean) / (deviation + 1e-6)
                    assert credit[rollout].advantage == pytest.approx(expected, abs=1e-6)
            mean_small = [small for group in scores.values() for small, _ in group.values()]
            assert metrics["reward_judge_small"] == pytest.approx(sum(mean_small) / len(mean_small))
            assert metrics["reward_judge_other"] == pytest.approx(1 - metrics["reward_judge_small"])
            assert metrics["judge_small_groups"] == metrics["groups"] == 4
            assert "reward_judge" not in metrics
            assert not [name for name in metrics if name.endswith("_sum")]
            assert len(store.rollouts(step=step, phase="judge")) == 4, "one prompt for all criteria of a group"
            config = load_config(result.folder / "config.yaml")
            assert [change for change in recredit(store, step, config) if change.size > 1e-6] == []


def test_the_untrained_weights_score_every_criterion_of_the_schema(model: Path, tmp_path: Path):
    rubric = [{"name": name, "text": "Good."} for name in ("first", "second")]
    credit = {"judge": {"model": "base", "rubric": rubric}}
    result = train(model, tmp_path, "tests.loop.bandit_programs:silent", credit=credit, trainer={"steps": 1})
    with Store(result.folder / "store.db", read_only=True) as store:
        for record in store.rollouts(phase="judge"):
            (call,) = store.trace(record.id).calls
            answer = json.loads((call.response or {})["content"])
            assert {name: len(found) for name, found in answer.items()} == {"first": 4, "second": 4}


def test_the_untrained_weights_can_be_the_judge(model: Path, tmp_path: Path):
    """Judges respond with random text that the schema allows."""
    credit = {"judge": {"model": "base"}}
    result = train(model, tmp_path, "tests.loop.bandit_programs:silent", credit=credit, trainer={"steps": 1})
    with Store(result.folder / "store.db", read_only=True) as store:
        for record in store.rollouts(phase="judge"):
            (call,) = store.trace(record.id).calls
            assert (record.status, call.model, call.policy_version) == ("ok", "base", None)
            assert len(json.loads((call.response or {})["content"])["scores"]) == 4


def test_a_judge_without_scores_stops_the_run(model: Path, tmp_path: Path):
    backend = ScriptedBackend(lambda prompt: "they are all fine", models=["critic"])
    with (
        ServingEndpoint(backend, Chat(backend.tokenizer), routing=Routing(max_tokens=100)) as upstream,
        pytest.raises(InfrastructureError, match=r"'critic' scored none of 4 groups.*expected 4 scores"),
    ):
        train(
            model,
            tmp_path,
            "tests.loop.bandit_programs:silent",
            policy={"upstream": {"base_url": upstream.url}},
            credit={"judge": {"model": "critic"}},
        )


@pytest.mark.long
def test_a_critic_learns_what_to_expect_and_is_resumed(model: Path, tmp_path: Path):
    credit = {"rewards": "gae", "gamma": 1.0, "lam": 0.9, "advantage": "reinforce++", "critic": {"learning_rate": 0.02}}
    sections: dict[str, Any] = {"credit": credit, "rollouts": {"group_size": 8}}
    result = train(model, tmp_path, "tests.bandit:solve", trainer={"steps": 12}, **sections)
    rewards = [m["reward"] for m in result.metrics]
    assert sum(rewards[-3:]) > sum(rewards[:3]) + 0.5
    losses = [m["critic_loss"] for m in result.metrics]
    assert losses[0] == pytest.approx(ignorant(result.folder, 1)), "at first the critic predicts 0"
    assert losses[-1] < ignorant(result.folder, 12) / 3
    resumed = {"dir": str(tmp_path), "name": "run", "resume": True}
    more = train(model, tmp_path, "tests.bandit:solve", trainer={"steps": 13}, run=resumed, **sections)
    assert more.metrics[-1]["critic_loss"] < ignorant(more.folder, 13) / 3, "the checkpoint has the trained critic"


def ignorant(folder: Path, step: int) -> float:
    """The loss of a critic that predicts 0 for rollouts with one call."""
    with Store(folder / "store.db", read_only=True) as store:
        returns = [r.reward or 0.0 for r in store.rollouts(step=step, phase="train")]
    return sum(r**2 for r in returns) / len(returns)


def test_credit_computed_anew_shows_what_changes(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    result = train(model, tmp_path, "tests.bandit:solve")
    run = str(result.folder)
    assert main(["credit", run]) == 0
    same = capsys.readouterr().out
    assert re.search(r"talker +32 .* 1\.000 +0 +0 +0\n?$", same.strip()), "the rule it was trained with changes nothing"
    assert main(["credit", run, "credit.advantage=rloo", "--step", "2", "--calls", "2"]) == 0
    other = capsys.readouterr().out
    assert "16 calls of 1 step, as trained and with rewards: broadcast, advantage: rloo" in other
    assert len(re.findall(r"^ +\d+  talker", other, re.MULTILINE)) == 2
    for wrong, message in (
        (["--step", "7"], "steps 1 to 2"),
        (["--rule", "gae", "credit.gamma=1.0", "credit.advantage=none"], "a critic's values"),
        (["rollouts.max_tokens=3"], "expected settings under credit"),
        (["--rule", "gpro"], "credit.rewards"),
    ):
        assert main(["credit", run, *wrong]) == 2
        assert message in capsys.readouterr().err


def test_rules_of_ones_own_train(model: Path, tmp_path: Path):
    """A reward rule, an advantage rule, a group key and a loss, each by module:callable; then credit is recomputed."""
    credit = {
        "rewards": "tests.credit.own_rules:per_call",
        "rewards_args": {"penalty": 0.25},
        "advantage": "tests.credit.own_rules:shifted",
        "advantage_args": {"by": 0.5},
        "group_by": ["task", "tests.credit.own_rules:first_turn"],
    }
    algorithm = {"loss": "tests.credit.own_rules:sapo", "loss_args": {"temperature": 2.0}}
    result = train(model, tmp_path, "tests.bandit:solve", credit=credit, algorithm=algorithm)
    with Store(result.folder / "store.db", read_only=True) as store:
        rewards = {r.id: r.reward for r in store.rollouts(phase="train")}
        for c in store.credit(step=1):
            assert c.reward == pytest.approx((rewards[c.rollout] or 0) - 0.25)
            assert c.advantage == pytest.approx(c.reward + 0.5)
    assert all(m["grad_norm"] > 0 for m in result.metrics)
    assert main(["credit", str(result.folder)]) == 0


def test_a_critic_for_a_rule_of_ones_own(model: Path, tmp_path: Path):
    credit = {"rewards": "tests.loop.own_critic_rule:residual", "advantage": "none"}
    result = train(model, tmp_path, "tests.bandit:solve", credit=credit)
    assert all("critic_loss" in m for m in result.metrics)
