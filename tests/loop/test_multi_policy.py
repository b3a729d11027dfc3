"""Several policies through the whole loop on a tiny random model: each agent uses its own policy, and both learn."""

from __future__ import annotations

import itertools
import json
import signal
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from openai import OpenAI

from lightning_core import fit, load_config
from lightning_core.errors import ConfigError
from lightning_core.loop import Result
from lightning_core.records.store import Store
from lightning_core.tools.cli.main import main
from lightning_core.tools.serving import open_serving
from tests import two_bandits, warm
from tests.bandit_runs import RUN
from tests.tiny_model import make_tiny_model

LORA = {"tuning": "lora", "lora": {"rank": 8}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


def settings(model: Path, runs: Path, policies: dict[str, Any], **sections: dict[str, Any]) -> dict[str, Any]:
    base: dict[str, dict[str, Any]] = {
        "tasks": {"train": "tests.two_bandits:tasks"},
        "policy": {"model": str(model), "max_context": 256, "dtype": "float32"},
        "credit": {"rewards": "explicit", "group_by": ["task", "agent"]},
        "rollouts": {"tasks_per_step": 4, "group_size": 6, "max_tokens": 4, "executor": "task"},
        "trainer": {"steps": 12, "learning_rate": 5e-3},
        "run": {"dir": str(runs), "name": "run"},
    }
    merged = {key: {**base.get(key, {}), **sections.get(key, {})} for key in {**base, **sections}}
    return {"agent": "tests.two_bandits:solve", "policies": policies, **merged}


def earned(result: Result, agent: str, step: int) -> float:
    """The mean value of an agent's calls in a step."""
    with Store(result.folder / "store.db", read_only=True) as store:
        values = [c.reward for c in store.credit(step=step) if c.agent == agent]
    return sum(values) / len(values)


@pytest.mark.parametrize(
    ("talker", "counter", "policy"),
    [
        pytest.param({}, {"learning_rate": 1.5e-2}, LORA, id="adapters"),
        pytest.param({}, {"learning_rate": 6e-3}, {}, id="models"),
    ],
)
@pytest.mark.long
def test_two_agents_learn_two_bandits_at_once(
    model: Path, tmp_path: Path, talker: dict[str, Any], counter: dict[str, Any], policy: dict[str, Any]
):
    more: dict[str, Any] = {
        "trainer": {"learning_rate": 1e-2 if policy else 5e-3, "steps": 16},
        "rollouts": {"group_size": 8},
        "algorithm": {"updates_per_step": 2},
    }
    own = {"advantage": "rloo"}
    policies = {"talk": {"agents": ["talker"], **talker}, "count": {"agents": ["counter"], "credit": own, **counter}}
    result = fit(config=load_config(settings(model, tmp_path, policies, policy=policy, **more)))
    after = {agent: fmean(earned(result, agent, step) for step in (14, 15, 16)) for agent in ("talker", "counter")}
    for agent, value in after.items():
        assert value > earned(result, agent, 1) + 0.15, agent
    assert sum(after.values()) > 1, (
        "a single policy could earn at most this: both get the same prompts, and no character earns in both"
    )
    with Store(result.folder / "store.db", read_only=True) as store:
        calls = [c for r in store.rollouts(step=4) for c in store.trace(r.id).calls]
    assert {(c.agent, c.model, c.policy_version) for c in calls} == {("talker", "talk", 3), ("counter", "count", 3)}
    for metrics in result.metrics:
        for name in policies:  # without different rewards there is nothing to compare
            assert metrics.get(f"{name}/logprob_difference_max", 0) < 1e-3
        assert metrics["talk/groups"] == metrics["count/groups"] == 4
        assert "loss" not in metrics


def test_a_policy_without_calls_does_not_change(model: Path, tmp_path: Path):
    """The counter is called in the first step only: steps continue, its version does not change."""
    rollouts = itertools.count()

    def solve(task: dict[str, Any]) -> float:
        if next(rollouts) < 8:
            two_bandits.say("counter", task["prompt"])
        return len(two_bandits.say("talker", task["prompt"])) / 4

    policies = {"talk": {"agents": ["talker"]}, "count": {"agents": ["counter"]}}
    more = {"credit": {"rewards": "broadcast"}, "rollouts": {"group_size": 2}, "trainer": {"steps": 3}}
    result = fit(solve, config=load_config(settings(model, tmp_path, policies, policy=LORA, **more)))
    assert [m["step"] for m in result.metrics] == [1, 2, 3]
    assert [m["talk/version"] for m in result.metrics] == [1, 2, 3]
    assert [m.get("count/version") for m in result.metrics] == [1, None, None]


def test_a_killed_run_resumes_exactly_where_it_stopped(model: Path, tmp_path: Path):
    policies = {"talk": {"agents": ["talker"], **LORA}, "count": {"agents": ["counter"]}}
    config = settings(
        model, tmp_path, policies, rollouts={"concurrency": 1, "group_size": 2}, trainer={"steps": 3, "checkpoint_every": 1}
    )  # fmt: skip
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    fit(config=load_config(str(file), ["run.name=whole"]))  # in this process, which has another seed of hashes
    command = ["-c", RUN, str(file)]
    with warm.Warm([*command, "run.name=cut"]) as process:
        for line in process.stdout:
            if line.startswith("step 2"):
                process.send_signal(signal.SIGKILL)
    warm.run([*command, "run.name=cut", "run.resume=true"], check=True)

    def read(name: str) -> list[dict[str, Any]]:
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        return [{k: v for k, v in json.loads(line).items() if "second" not in k} for line in lines]

    assert read("cut") == read("whole")


def test_every_policy_is_served_by_name(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """The credit of a run can also be recomputed with other rules for one policy."""
    policies = {"talk": {"agents": ["talker"]}, "count": {"agents": ["counter"]}}
    config = load_config(settings(model, tmp_path, policies, policy=LORA, trainer={"steps": 1}))
    result = fit(config=config)
    with open_serving(config, checkpoint=result.checkpoint) as endpoint:
        assert endpoint.models == ("talk", "count", "base")
        client = OpenAI(base_url=endpoint.url, api_key="any")
        for name in endpoint.models:
            reply = client.chat.completions.create(
                model=name, messages=[{"role": "user", "content": "say 1"}], temperature=0, max_tokens=4
            )
            assert reply.model == name
    assert main(["credit", str(result.folder)]) == 0
    assert "talk: rewards: explicit, advantage: grpo; count: rewards: explicit" in capsys.readouterr().out
    assert main(["credit", str(result.folder), "policies.talk.credit.advantage=rloo"]) == 0
    assert (
        "talk: rewards: explicit, advantage: rloo; count: rewards: explicit, advantage: grpo" in capsys.readouterr().out
    )


def test_a_frozen_agent_may_have_the_words_of_a_policy_that_learns(model: Path, tmp_path: Path):
    """Its calls are sampled by that policy, and no policy is trained on them."""
    policies = {"talk": {"agents": ["talker"]}}
    config = settings(
        model, tmp_path, policies, policy=LORA, agents={"frozen": {"counter": "talk"}}, trainer={"steps": 1}
    )
    result = fit(config=load_config(config))
    with Store(result.folder / "store.db", read_only=True) as store:
        assert {c.agent for c in store.credit()} == {"talker"}
        calls = [c for r in store.rollouts(step=1) for c in store.trace(r.id).calls]
    assert {(c.agent, c.model) for c in calls} == {("talker", "talk"), ("counter", "talk")}
    assert result.metrics[0]["rows"] == 24
    assert "loss" in result.metrics[0], "a single policy's metrics have no prefix"


def test_an_agent_that_is_marked_for_another_policy_is_refused(model: Path, tmp_path: Path):
    from lightning_core import trainable

    trainable("marked for talk", policy="talk")(lambda: None)
    policies = {"talk": {"agents": ["talker"]}, "count": {"agents": ["counter", "marked for talk"]}}
    with pytest.raises(
        ConfigError, match=r"'marked for talk' is marked with policy 'talk', but policies\.count\.agents"
    ):
        fit(config=load_config(settings(model, tmp_path, policies, policy=LORA)))
