"""On-policy distillation in the whole loop on tiny random models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_core import fit, load_config
from lightning_core.backends.scripted import ByteTokenizer
from lightning_core.chat.chat import Chat
from lightning_core.config.algorithm import Algorithm
from lightning_core.credit import Credit
from lightning_core.errors import ConfigError, TrainingError
from lightning_core.loop import Result
from lightning_core.prompts.agent_prompts import AgentPrompts, make_prompt
from lightning_core.rollouts.rows import to_rows
from lightning_core.signals.distill.section import Distill
from lightning_core.signals.distill.teacher import Teacher
from lightning_core.trace import Floats
from lightning_core.transitions import Candidates, Row
from tests.credit.episodes import call, from_calls
from tests.tiny_model import make_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("other"), seed=1)


def settings(model: Path, runs: Path, distill: dict[str, Any], **sections: Any) -> dict[str, Any]:
    base: dict[str, dict[str, Any]] = {
        "tasks": {"train": {"source": "tests.bandit:tasks", "args": {"count": 8}}},
        "policy": {"model": str(model), "max_context": 2048, "dtype": "float32"},
        "rollouts": {"tasks_per_step": 4, "group_size": 16, "max_tokens": 8, "executor": "task"},
        "algorithm": {"distill": distill, "reward_weight": 0.0},
        "trainer": {"steps": 10, "learning_rate": 3e-3, "checkpoint_every": 0},
        "run": {"dir": str(runs), "name": "run"},
    }
    merged = {key: {**base.get(key, {}), **sections.get(key, {})} for key in {**base, **sections}}
    return {"agent": "tests.loop.taught_agents:equal", **merged}


def train(model: Path, runs: Path, distill: dict[str, Any], **sections: Any) -> Result:
    return fit(config=load_config(settings(model, runs, distill, **sections)))


@dataclass(frozen=True)
class Raised:
    """A `TokenScorer` with logprobs that are ``by`` more than those at sampling."""

    by: Sequence[float]

    def logprobs(self, rows: Sequence[Row]) -> Mapping[str, Floats]:
        return {s.call: row.logprobs[s.start : s.stop] + np.array(self.by, "<f4") for row in rows for s in row.segments}

    def candidates(self, rows: Sequence[Row], count: int) -> Mapping[str, Candidates]:
        raise NotImplementedError


def test_tokens_get_the_difference_to_the_teacher() -> None:
    """The advantages of the calls are 0.5 and −1; the teacher scores the first one."""
    ids = np.array([7, 8], dtype="<u4")
    calls = [
        call(name, "r", agent, i, output_ids=ids)
        for i, (name, agent) in enumerate({"a": "taught", "b": "other"}.items())
    ]
    one = from_calls(calls, 0)
    teacher = Teacher(
        settings=Distill(teacher="m", weight=0.5, agents=("taught",)),
        scorer=Raised(by=[0.25, -2.0]),
        chat=Chat(ByteTokenizer()),
        max_context=100,
    )
    streams = teacher.streams([one])
    credit = Credit(values={}, advantages={"a": 0.5, "b": -1.0})
    first, second = to_rows(Algorithm(reward_weight=2.0), [one], credit, streams)
    assert first.advantages is not None
    assert second.advantages is not None
    assert first.advantages[first.mask].tolist() == [1.125, 0.0]
    assert second.advantages[second.mask].tolist() == [-2.0, -2.0]
    assert streams.counts == {"tokens_distilled": 2, "teacher_kl_sum": 1.75}


@dataclass(frozen=True)
class Reading(Raised):
    """Keeps the prompts of the rows that it scores."""

    read: list[str]

    def logprobs(self, rows: Sequence[Row]) -> Mapping[str, Floats]:
        for row in rows:
            ids = row.token_ids[: row.segments[0].start].tolist()
            self.read.append(ByteTokenizer().decode(ids, skip_special_tokens=True))
        return Raised.logprobs(self, rows)


def test_the_teacher_reads_the_prompts_of_agents_and_the_policy_does_not() -> None:
    ids = np.array([7, 8], dtype="<u4")
    said = ({"role": "user", "content": "hi"},)
    one = from_calls([call(name, "r", name, 0, output_ids=ids, messages=said) for name in ("writer", "planner")], 0)
    scorer = Reading(by=[0.0, 0.0], read=[])
    prompts = AgentPrompts({"writer": make_prompt("writer", extend="Be brief.")})
    Teacher(settings=Distill(), scorer=scorer, chat=Chat(ByteTokenizer()), max_context=200, prompts=prompts).streams(
        [one]
    )
    before = {t.agent: ByteTokenizer().decode(t.prompt_ids.tolist(), skip_special_tokens=True) for t in one.transitions}
    assert [text for text in scorer.read if "Be brief." in text] == ["system\nBe brief.\nuser\nhi\nassistant\n"]
    assert before["planner"] in scorer.read
    assert "Be brief." not in before["writer"]


@dataclass(frozen=True, slots=True)
class Unconstrained(Raised):
    """Leaves out constrained calls."""

    def logprobs(self, rows: Sequence[Row]) -> Mapping[str, Floats]:
        scored = Raised.logprobs(self, rows)
        return {s.call: scored[s.call] for row in rows for s in row.segments if s.constraint is None}


def test_calls_that_the_teacher_leaves_out_are_counted_and_keep_their_advantage() -> None:
    ids = np.array([7, 8], dtype="<u4")
    calls = [
        call(name, "r", "taught", i, output_ids=ids, constraint=constraint)
        for i, (name, constraint) in enumerate({"a": None, "b": "{}"}.items())
    ]
    one = from_calls(calls, 0)
    teacher = Teacher(
        settings=Distill(teacher="http://teacher"),
        scorer=Unconstrained(by=[0.25, -2.0]),
        chat=Chat(ByteTokenizer()),
        max_context=100,
    )
    streams = teacher.streams([one])
    assert streams.counts == {"tokens_distilled": 2, "teacher_kl_sum": 1.75, "tokens_distill_constrained": 2}
    _, second = to_rows(Algorithm(), [one], Credit(values={}, advantages={"a": 0.5, "b": -1.0}), streams)
    assert second.advantages is not None
    assert second.advantages[second.mask].tolist() == [-1.0, -1.0]


@pytest.mark.long
def test_the_policy_comes_closer_to_another_model(model: Path, other: Path, tmp_path: Path) -> None:
    """Without any difference in rewards."""
    result = train(model, tmp_path, {"teacher": str(other)})
    divergence = [metrics["teacher_kl"] for metrics in result.metrics]
    assert sum(divergence[-3:]) / 3 < 0.65 * divergence[0]
    assert result.metrics[0]["tokens_distilled"] == result.metrics[0]["tokens_trained"]
    assert result.metrics[0]["groups_wasted"] == 4
    assert not any(metrics.get("monitor/no_gradient") for metrics in result.metrics), "the teacher's gradient counts"


@pytest.mark.long
def test_the_policy_loses_its_examples(model: Path, tmp_path: Path) -> None:
    """The teacher has the same weights, with examples in its prompt."""
    distill = {"teacher": "base", "prompt": "tests.loop.taught_agents:with_examples"}
    result = train(model, tmp_path, distill, trainer={"learning_rate": 1e-3})
    divergence = [metrics["teacher_kl"] for metrics in result.metrics]
    assert divergence[0] > 0.05
    assert sum(divergence[-3:]) / 3 < 0.7 * divergence[0]


@pytest.mark.long
def test_the_policy_learns_the_distribution_of_another_model(model: Path, other: Path, tmp_path: Path) -> None:
    distill = {"teacher": str(other), "divergence": "forward"}
    few = {"rollouts": {"group_size": 4}, "trainer": {"steps": 8, "learning_rate": 2e-3}}
    result = train(model, tmp_path, distill, **few)
    divergence = [metrics["teacher_forward_kl"] for metrics in result.metrics]
    assert divergence[-1] < 0.5 * divergence[0]
    assert result.metrics[0]["tokens_distilled"] == result.metrics[0]["tokens_trained"]
    assert "teacher_kl" not in result.metrics[0]


def test_the_teacher_of_an_adapter_is_the_model_without_it(model: Path, tmp_path: Path) -> None:
    distill = {"teacher": "base", "prompt": "tests.loop.taught_agents:with_examples", "divergence": "forward"}
    sections = {
        "algorithm": {"mini_batches": 2}, "rollouts": {"group_size": 4}, "trainer": {"steps": 4, "learning_rate": 1e-2}
    }  # fmt: skip
    result = train(model, tmp_path, distill, policy={"tuning": "lora"}, **sections)
    divergence = [metrics["teacher_forward_kl"] for metrics in result.metrics]
    assert divergence[-1] < divergence[0]
    assert [metrics["updates"] for metrics in result.metrics] == [2] * 4


def test_responses_that_are_context_only_are_not_taught(model: Path, other: Path, tmp_path: Path) -> None:
    """All are cut at the limit."""
    distill = {"teacher": str(other), "divergence": "forward"}
    sections = {
        "algorithm": {"truncated": "mask"},
        "rollouts": {"max_tokens": 1, "group_size": 2},
        "trainer": {"steps": 1},
    }
    (metrics,) = train(model, tmp_path, distill, **sections).metrics
    assert "tokens_distilled" not in metrics
    assert "teacher_forward_kl" not in metrics


@pytest.mark.parametrize("teacher", ["base", pytest.param("policy", marks=pytest.mark.long)])
def test_an_adapter_is_switched_off_for_the_initial_weights(model: Path, tmp_path: Path, teacher: str) -> None:
    """The adapter begins as no change, so both teachers say the same in the first step, and not in the third."""
    distill = {"teacher": teacher, "prompt": "tests.loop.taught_agents:with_examples"}
    result = train(model, tmp_path, distill, policy={"tuning": "lora"}, trainer={"steps": 1})
    assert result.metrics[0]["teacher_kl"] == pytest.approx(0.095, abs=0.02)


@pytest.mark.parametrize(("divergence", "metric"), [("reverse", "teacher_kl"), ("forward", "teacher_forward_kl")])
def test_a_teacher_that_is_the_policy_says_nothing(model: Path, tmp_path: Path, divergence: str, metric: str) -> None:
    """Its prompt is rendered from the messages, token for token that of the policy."""
    distill = {"teacher": "policy", "prompt": "tests.loop.taught_agents:unchanged", "divergence": divergence}
    result = train(model, tmp_path, distill, trainer={"steps": 2}, rollouts={"group_size": 4})
    for metrics in result.metrics:
        assert metrics[metric] == pytest.approx(0, abs=1e-5)


def test_a_teacher_that_cannot_be_loaded_is_an_error_of_its_key(model: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"algorithm.distill.teacher: '.*nowhere' cannot be loaded; expected base, policy"
    ):
        train(model, tmp_path, {"teacher": str(tmp_path / "nowhere")})


def test_only_some_agents_learn_from_it(model: Path, other: Path, tmp_path: Path) -> None:
    """Both make as many calls; a name that no agent has is an error, since nothing would learn."""
    sections = {"agents": {"train": "all"}, "rollouts": {"group_size": 8}, "trainer": {"steps": 1}}

    def learn(runs: Path, *agents: str) -> Result:
        own = settings(model, runs, {"teacher": str(other), "agents": list(agents)}, **sections)
        return fit(config=load_config({**own, "agent": "tests.two_bandits:solve"}))

    metrics = learn(tmp_path / "a", "count*").metrics[0]
    assert metrics["calls"] == 64
    assert metrics["tokens_distilled"] < metrics["tokens_sampled"]
    assert metrics["tokens_distilled"] == pytest.approx(metrics["tokens_sampled"] / 2, rel=0.2)
    with pytest.raises(ConfigError, match=r"algorithm.distill.agents names 'teller', but the trained agents"):
        learn(tmp_path / "b", "teller")


@pytest.mark.parametrize(
    ("distill", "error", "text"),
    [
        ({"teacher": "base"}, ConfigError, "set prompt or prompts, or use algorithm.kl"),
        ({"teacher": "policy"}, ConfigError, "teacher and policy are equal; set prompt"),
        ({"teacher": "policy", "prompt": "tests.loop.taught_agents:missing"}, ConfigError, "has no 'missing'"),
        ({"teacher": "policy", "prompt": "tests.loop.taught_agents:broken"}, ConfigError, "in broken: raise KeyError"),
        ({"teacher": "policy", "prompt": "tests.loop.taught_agents:no_list"}, ConfigError, "expected a list of messages"),
        ({"teacher": "policy", "prompt": "tests.loop.taught_agents:very_long"}, TrainingError, "more than policy.max_context = 2048"),
    ],
    ids=["base", "policy", "missing", "broken", "no list", "long"],
)  # fmt: skip
def test_what_cannot_be_taught_is_an_error(
    model: Path, tmp_path: Path, distill: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error) as raised:
        train(model, tmp_path, distill, trainer={"steps": 1}, rollouts={"group_size": 2})
    assert text in str(raised.value)


def test_a_teacher_with_another_vocabulary_is_refused(model: Path, tmp_path: Path) -> None:
    teacher = make_tiny_model(tmp_path / "teacher", texts=["words of another language"] * 20)
    with pytest.raises(ConfigError, match="has another vocabulary than"):
        train(model, tmp_path, {"teacher": str(teacher)}, trainer={"steps": 1})
    assert not list(tmp_path.glob("run/store.db")), "before the first rollout"


@pytest.mark.parametrize(
    ("sections", "text"),
    [
        ({"algorithm": {"distill": None}}, "at 0 nothing is trained on without algorithm.distill"),
        (
            {"algorithm": {"distill": {"teacher": "m", "candidates": 5}}},
            "goes with divergence: forward, but algorithm.distill.divergence is 'reverse'",
        ),
        (
            {"algorithm": {"distill": {"teacher": "m", "divergence": "forward", "candidates": 5000}}},
            "found 5000, expected at most 1000",
        ),
        ({"algorithm": {"reward_weight": 0.0}, "rollouts": {"refill": 2}}, "rollouts.refill: found 2, expected 0"),
        ({"trainer": {"name": "verl"}}, "with verl expected the URL of a vLLM server"),
        (
            {"algorithm": {"distill": {"teacher": "m", "api_key_env": "KEY"}}},
            "goes with the URL of a server as the teacher",
        ),
        ({"algorithm": {"distill": {"teacher": "m", "connections": 2}}}, "connections: goes with the URL of a server"),
        (
            {"algorithm": {"distill": {"teacher": "http://t/v1"}}, "rollouts": {"temperature": 0.7}},
            "found 0.7, expected 1.0: the teacher's server 'http://t/v1' scores tokens at temperature 1",
        ),
    ],
)
def test_settings_must_fit(model: Path, tmp_path: Path, sections: dict[str, Any], text: str) -> None:
    data = settings(model, tmp_path, {"teacher": "m"}, **sections)
    data["algorithm"] = {"reward_weight": 0.0, "distill": {"teacher": "m"}, **sections.get("algorithm", {})}
    with pytest.raises(ConfigError, match=text):
        load_config(data)
