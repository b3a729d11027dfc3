"""Information gain in the whole loop on a tiny random model."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_core import fit, load_config
from lightning_core.errors import ConfigError
from lightning_core.loop import Result
from lightning_core.records.store import Store
from lightning_core.signals.information_gain.gains import ANSWER_LOGPROBS
from lightning_core.tools.cli.main import main
from lightning_core.tools.runs.recredit import recredit, step_episodes
from lightning_core.trace import Call
from tests.loop.search_agents import PREFIX
from tests.tiny_model import make_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


def settings(model: Path, runs: Path, agent: str = "chat", **sections: Any) -> dict[str, Any]:
    base: dict[str, dict[str, Any]] = {
        "tasks": {"train": {"source": "tests.loop.search_agents:tasks"}},
        "policy": {"model": str(model), "max_context": 512, "dtype": "float32"},
        "credit": {"rewards": "igpo", "information_gain": {"answer": "gold", "prefix": PREFIX}},
        "rollouts": {"tasks_per_step": 2, "group_size": 3, "max_tokens": 4, "executor": "task"},
        "trainer": {"steps": 1, "learning_rate": 3e-3, "checkpoint_every": 0},
        "run": {"dir": str(runs), "name": "run"},
    }
    merged = {key: {**base.get(key, {}), **sections.get(key, {})} for key in {**base, **sections}}
    return {"agent": f"tests.loop.search_agents:{agent}", **merged}


def train(model: Path, runs: Path, agent: str = "chat", **sections: Any) -> Result:
    return fit(config=load_config(settings(model, runs, agent, **sections)))


def calls_of(result: Result, step: int = 1) -> list[list[Call]]:
    with Store(result.folder / "store.db", read_only=True) as store:
        return [list(e.trace.calls) for e in step_episodes(store, step)]


def plain_logprobs(model: Path, calls: list[Call], answer: str = "bb") -> list[list[float]]:
    """The logprobs of the answer's tokens after each prompt and the prefix, by transformers alone, one sequence at a time."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    network: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    prefix, said = tokenizer.encode(PREFIX), tokenizer.encode(answer)
    found: list[list[float]] = []
    for call in calls:
        assert call.prompt_ids is not None
        ids = [*call.prompt_ids.tolist(), *prefix, *said]
        with torch.no_grad():
            logits = network(torch.tensor([ids])).logits[0]
        logprobs = logits.log_softmax(-1)[range(len(ids) - len(said) - 1, len(ids) - 1), said]
        found.append(logprobs.tolist())
    return found


@pytest.mark.parametrize("agent", ["chat", pytest.param("graph", marks=pytest.mark.long)])
def test_the_scores_are_those_of_a_plain_forward_pass(model: Path, tmp_path: Path, agent: str) -> None:
    result = train(model, tmp_path, agent)
    metrics = result.metrics[0]
    rollouts = calls_of(result)
    assert [len(calls) for calls in rollouts] == [3] * 6
    calls = [call for rollout in rollouts for call in rollout]
    plain = plain_logprobs(model, calls)
    for call, expected in zip(calls, plain, strict=True):
        assert call.arrays[ANSWER_LOGPROBS] == pytest.approx(np.array(expected), abs=1e-4)
    assert metrics["answer_logprob"] == pytest.approx(np.mean(plain), abs=1e-4)
    assert metrics["calls_unscored"] == metrics["rollouts_without_answer"] == 0
    whole = sum(len(c.prompt_ids) + len(PREFIX) + 2 for c in calls if c.prompt_ids is not None)
    assert 18 * (len(PREFIX) + 2) < metrics["tokens_scored"] < 0.8 * whole, "common beginnings are computed once"


def test_equal_rewards_train_by_their_gains(model: Path, tmp_path: Path) -> None:
    """All rewards are 0. The advantage of a call has the gains of the later calls, as recorded."""
    result = train(model, tmp_path, credit={"advantage": "dr-grpo", "gamma": 0.5})
    assert result.metrics[0]["reward"] == 0
    assert result.metrics[0]["groups_wasted"] == 0
    assert result.metrics[0]["grad_norm"] > 0
    with Store(result.folder / "store.db", read_only=True) as store:
        credit = {c.call: c for c in store.credit(step=1)}
        episodes = step_episodes(store, 1)
    of_task: dict[str, list[list[float]]] = {}
    for e in episodes:
        scores = [
            math.exp(float(c.arrays[ANSWER_LOGPROBS].mean())) for c in e.trace.calls if ANSWER_LOGPROBS in c.arrays
        ]
        of_task.setdefault(e.task_id, []).append([scores[1] - scores[0], scores[2] - scores[1], 0.0])
    for e in episodes:
        mean = float(np.mean(of_task[e.task_id]))
        own = of_task[e.task_id].pop(0)
        of_task[e.task_id].append(own)
        following = 0.0
        for call, gain in reversed(list(zip(e.trace.calls, own, strict=True))):
            following = gain - mean + 0.5 * following
            assert credit[call.id].reward == pytest.approx(gain, abs=1e-6)
            assert credit[call.id].advantage == pytest.approx(following, abs=1e-6)


def test_recorded_scores_give_the_same_credit_again(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = train(
        model,
        tmp_path,
        credit={"rewards": "examples.rules.information_gain:a2tgpo", "gamma": 0.9},
        trainer={"steps": 2},
    )
    assert [m["gain_groups"] for m in result.metrics] == [4, 4], "two tasks, two turns with a gain"
    config = load_config(result.folder / "config.yaml")
    with Store(result.folder / "store.db", read_only=True) as store:
        for step in (1, 2):
            for change in recredit(store, step, config):
                assert change.advantage == pytest.approx(change.trained.advantage, abs=1e-6)
    assert main(["credit", str(result.folder), "--rule", "igpo"]) == 0
    assert main(["credit", str(result.folder), "--rule", "discounted", "credit.information_gain=null"]) == 0
    assert "searcher" in capsys.readouterr().out


def test_a_task_without_an_answer_is_counted_and_said(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        result = train(
            model,
            tmp_path,
            tasks={"train": {"source": "tests.loop.search_agents:tasks", "args": {"count": 2, "missing": 1}}},
            credit={"information_gain": {"answer": "tests.loop.search_agents:gold"}},
            trainer={"steps": 2},
        )
    assert [m["rollouts_without_answer"] for m in result.metrics] == [3, 3]
    assert [m["groups_wasted"] for m in result.metrics] == [1, 1], "its rewards are equal"
    assert caplog.text.count("1 of 2 tasks have no answer") == 1
    scored = {calls[0].messages[0]["content"] for calls in calls_of(result) if ANSWER_LOGPROBS in calls[0].arrays}
    assert scored == {"say 0"}


def test_a_prompt_that_leaves_no_room_is_counted(model: Path, tmp_path: Path) -> None:
    """First prompts have 42 tokens, later ones more."""
    result = train(model, tmp_path, credit={"information_gain": {"answer": "gold", "prefix": "x" * (512 - 42 - 2)}})
    assert result.metrics[0]["calls_unscored"] == 12
    unscored = [[ANSWER_LOGPROBS not in c.arrays for c in calls] for calls in calls_of(result)]
    assert unscored == [[False, True, True]] * 6


def test_several_policies_score_their_own_calls(model: Path, tmp_path: Path) -> None:
    """The writer's rule needs no answer, so its calls are not scored."""
    result = train(
        model,
        tmp_path,
        "two",
        policies={
            "search": {"agents": ["searcher"]},
            "text": {"agents": ["writer"], "credit": {"rewards": "broadcast"}},
        },
    )
    calls = [call for rollout in calls_of(result) for call in rollout]
    assert {c.agent for c in calls if ANSWER_LOGPROBS in c.arrays} == {"searcher"}
    searcher = [c for c in calls if c.agent == "searcher"]
    for call, expected in zip(searcher, plain_logprobs(model, searcher), strict=True):
        assert call.arrays[ANSWER_LOGPROBS] == pytest.approx(np.array(expected), abs=1e-4)


def test_a_run_without_scores_has_no_gains(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = train(model, tmp_path, credit={"rewards": "broadcast", "information_gain": None})
    assert main(["credit", str(result.folder), "--rule", "igpo", "credit.information_gain.answer=gold"]) != 0
    assert "which this run did not record" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("credit", "text"),
    [
        ({"information_gain": None}, r"'igpo' needs credit.information_gain, such as \{answer: answer\}"),
        ({"rewards": "broadcast"}, "goes with rewards: igpo only, but credit.rewards is 'broadcast'"),
        ({"information_gain": {"answer": "golden"}}, r"no task has the key 'golden'; found the keys .*; did you mean 'gold'"),
        ({"information_gain": {"answer": ""}}, "information_gain.answer"),
        ({"information_gain": {"answer": "tests.loop.search_agents:nothing"}}, "information_gain.answer: .* has no 'nothing'"),
        ({"information_gain": {"answer": "tests.loop.search_agents:broken"}}, "(?s)'tests.loop.search_agents:broken' failed.*KeyError"),
        ({"information_gain": {"answer": "tests.loop.search_agents:several"}}, r"several' returned \['bb'\]; expected text.*return one"),
        ({"rewards_args": {"after": "rollout"}}, "rewards_args.after: found 'rollout', expected"),
    ],
    ids=["missing", "unused", "key", "empty", "import", "broken", "list", "after"],
)  # fmt: skip
def test_what_cannot_be_scored_is_an_error(model: Path, tmp_path: Path, credit: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        train(model, tmp_path, credit=credit)


def test_verl_does_not_score_answers(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the embedded trainer scores the answers before rows are built"):
        load_config(settings(model, tmp_path, trainer={"name": "verl"}))
