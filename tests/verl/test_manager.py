"""The manager on real Ray and TransferQueue, without verl's trainer. A script answers, so that tests can cause failures."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transfer_queue as tq
from starlette.responses import JSONResponse
from transformers import AutoModelForCausalLM
from verl.workers.rollout.replica import TokenOutput

from lightning_core import load_config
from lightning_core.errors import InfrastructureError, RewardError
from lightning_core.model.source import load_tokenizer
from lightning_core.records.store import Store
from lightning_core.testing.recording_server import recording_server
from lightning_core.trainers.verl.manager import LightningManager
from lightning_core.trainers.verl.records import read_failure, read_metrics_of_verl
from lightning_core.trainers.verl.rows import SIGNAL
from tests.rollouts.collected import ScriptedAgents, collect_step
from tests.verl.manager_runs import SECONDS, open_cluster, request, rows, settled, start_manager
from tests.verl.scoring_server import logprobs_of, scoring_server

pytestmark = pytest.mark.timeout(3 * SECONDS)

Start = Callable[..., LightningManager]


class Client:
    """Returns random bytes, with the interface of verl's client."""

    async def generate(self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any]) -> TokenOutput:
        await asyncio.sleep(0.01)
        count = min(4, sampling_params["max_tokens"])
        return TokenOutput(
            token_ids=[int(b) for b in os.urandom(count)],
            log_probs=[-1.0] * count,
            stop_reason="completed",
            extra_fields={"min_global_steps": 0, "max_global_steps": 2},
        )


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    with open_cluster():
        yield


@pytest.fixture
def start(model: Path, tmp_path: Path) -> Start:
    def start(agent: str, **sections: Any) -> LightningManager:
        data: dict[str, Any] = {
            "agent": f"tests.verl.agents:{agent}",
            "policy": {"max_context": 512},
            "rollouts": {"tasks_per_step": 2, "group_size": 3, "max_tokens": 8, "timeout_seconds": 60},
            "trainer": {"rollout_workers": 2},
        }
        for section, values in sections.items():
            data[section] = {**data.get(section, {}), **values}
        return start_manager(data, Client(), model=model, folder=tmp_path)[0]

    return start


def poll(seconds: float) -> None:
    """Poll as verl's replay buffer does: an interrupt arrives between two polls."""
    for _ in range(int(seconds * 10)):
        time.sleep(0.1)


def test_every_rollout_becomes_a_row(start: Start, tmp_path: Path) -> None:
    uids = request(start("digits"), {"id": "a"}, {"id": "b"})
    assert set(settled(uids).values()) == {"finished"}
    found = rows(uids)
    assert sorted(found) == sorted(f"{uid}_{session}_0" for uid in uids for session in range(3))
    tags = tq.kv_list("train")["train"]
    assert {(tags[key]["min_global_steps"], tags[key]["max_global_steps"]) for key in found} == {(0, 2)}
    with Store(tmp_path / "store.db", read_only=True) as store:
        assert len(store.rollouts(phase="train", step=1, status="ok")) == 6


def test_forks_become_rows_of_sessions_of_their_own(start: Start, tmp_path: Path) -> None:
    """Each agent makes one call; a fork has the same prompt, and another response."""
    forks = {"forks": {"points": 1, "samples": 2}}
    uids = request(start("digits", rollouts=forks, credit={"rewards": "counterfactual"}), {"id": "a"}, {"id": "b"})
    assert set(settled(uids).values()) == {"finished"}
    assert sorted(rows(uids)) == sorted(f"{uid}_{session}_0" for uid in uids for session in range(5))
    with Store(tmp_path / "store.db", read_only=True) as store:
        assert len(store.rollouts(phase="fork", step=1, status="ok")) == 4
        assert len(store.credit(step=1)) == 10


@pytest.mark.slow
def test_a_group_in_progress_at_the_checkpoint_is_stored_once(start: Start, tmp_path: Path) -> None:
    """Both groups ended before the run was killed, but in its checkpoint only the first is complete: verl requests the second again."""
    sections: dict[str, Any] = {
        "rollouts": {"forks": {"points": 1, "samples": 2}},
        "credit": {"rewards": "counterfactual"},
    }
    manager = start("slow_for_b", **sections)
    first = request(manager, {"id": "a"})
    assert set(settled(first).values()) == {"finished"}
    second = request(manager, {"id": "b"})
    tq.save_checkpoint(tmp_path / "transfer_queue")
    assert set(settled(second).values()) == {"finished"}
    with Store(tmp_path / "store.db", read_only=True) as store:
        assert Counter((r.task_id, r.step) for r in store.rollouts()) == {("a", 1): 5, ("b", 1): 5}
        assert store.steps()[1]["rows"] == 10
    tq.load_checkpoint(tmp_path / "transfer_queue")
    resumed = start("slow_for_b", **sections)
    request(resumed, {"id": "b"}, step=2, uids=second)
    assert set(settled(second).values()) == {"finished"}
    with Store(tmp_path / "store.db", read_only=True) as store:
        assert Counter((r.task_id, r.step) for r in store.rollouts()) == {("a", 1): 5, ("b", 2): 5}
        assert len({c.rollout for c in store.credit()}) == 10
        assert {step: counts["rows"] for step, counts in store.steps().items()} == {1: 5, 2: 5}


def test_a_worker_that_is_lost_loses_no_rollout(start: Start, tmp_path: Path) -> None:
    """Its process is killed in the middle of a group, as the kernel would; the group is run again."""
    uids = request(start("kills_its_process_once", rollouts={"executor": "task"}), {"id": str(tmp_path)}, {"id": "b"})
    assert set(settled(uids).values()) == {"finished"}
    assert len(rows(uids)) == 6
    assert (tmp_path / "killed").exists()


def test_a_rollout_that_hangs_is_left_out_and_its_group_trained(start: Start, tmp_path: Path) -> None:
    # It counts its runs in a global variable.
    rollouts = {"executor": "task", "timeout_seconds": 5, "retries": 1, "on_timeout": "leave_out"}
    uids = request(start("hangs_twice", rollouts=rollouts), {"id": "a"}, {"id": "b"})
    assert set(settled(uids).values()) == {"finished"}
    with Store(tmp_path / "store.db", read_only=True) as store:
        spoiled = [r for r in store.rollouts() if r.status == "timeout"]
        fine = [r for r in store.rollouts() if r.status == "ok"]
    assert len(spoiled) == 2  # a rollout, and its retry
    assert all("timeout_seconds" in (r.error or "") for r in spoiled)
    assert len(rows(uids)) == len(fine) == 5


@pytest.fixture(
    params=[signal.default_int_handler, pytest.param(signal.SIG_IGN, marks=pytest.mark.slow)],
    ids=["as usual", "in the background"],
)
def _interrupts(request: pytest.FixtureRequest) -> Iterator[None]:
    """The SIGINT handler at the start: a process that a script started in the background ignores SIGINT."""
    before = signal.signal(signal.SIGINT, request.param)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_interrupts")
def test_a_missing_reward_stops_the_run(start: Start, tmp_path: Path) -> None:
    manager = start("earns_nothing_real")
    request(manager, {"id": "a"})
    with pytest.raises(KeyboardInterrupt):  # verl's trainer would otherwise wait for rows forever
        poll(SECONDS)
    error = read_failure(tmp_path)
    assert isinstance(error, RewardError)
    assert "nan" in str(error)


def test_flat_groups_are_marked_as_often_as_may_be_replaced(start: Start, tmp_path: Path) -> None:
    """Two of three equal groups may be replaced. verl replaces groups whose rows all have the same signal."""
    uids = request(start("earns_the_same", rollouts={"refill": 2}), {"id": "a"}, {"id": "b"}, {"id": "c"})
    assert set(settled(uids).values()) == {"finished"}
    keys = rows(uids)
    fields = tq.kv_batch_get(keys=keys, partition_id="train", select_fields=["extra_fields"])["extra_fields"]
    signals: dict[str, set[float]] = {}
    for key, value in zip(keys, fields, strict=True):
        info = getattr(value, "data", value)["reward_extra_info"]
        signals.setdefault(key.split("_")[0], set()).add(info[SIGNAL])
    assert sorted(len(found) for found in signals.values()) == [1, 1, 3]
    with Store(tmp_path / "store.db", read_only=True) as store:
        (metrics,) = read_metrics_of_verl(tmp_path, store.steps(), rows_per_update=3)
        credited = {store.rollout(c.rollout).task_id for c in store.credit(step=1)}
    assert (metrics["rollouts"], metrics["context_new"], metrics["groups_refilled"]) == (9, 9, 2)
    assert (metrics["groups"], metrics["groups_equal"], metrics["groups_single"]) == (1, 1, 0)
    assert (metrics["rows"], metrics["rows_per_rollout"], len(credited)) == (3, 1, 1)
    assert metrics["reward"] == 0.5
    embedded = collect_step(
        load_config(tmp_path / "config.yaml"), ScriptedAgents(), tmp_path / "embedded", [{"id": "a"}, {"id": "b"}]
    )
    assert set(metrics) == {*embedded.metrics, "step", "rows_padding_share"}


@pytest.mark.slow
def test_a_judge_separates_attempts_with_equal_rewards(start: Start, tmp_path: Path) -> None:
    message = {"role": "assistant", "content": '{"scores": [10, 5, 0]}'}
    answer = {"object": "chat.completion", "id": "1", "created": 0, "model": "j"}
    response = JSONResponse({**answer, "choices": [{"index": 0, "message": message, "finish_reason": "stop"}]})
    with recording_server(refusal=response) as server:
        upstream = {"upstream": {"base_url": f"{server.url}/v1"}}
        uids = request(start("earns_the_same", credit={"judge": {"model": "j"}}, policy=upstream), {"id": "a"})
        assert set(settled(uids).values()) == {"finished"}
        assert len(server.requests) == 1
    keys = sorted(rows(uids))
    fields = tq.kv_batch_get(keys=keys, partition_id="train", select_fields=["rm_scores"])["rm_scores"]
    assert [round(float(x[0]), 3) for x in fields.unbind()] == [1.0, 0.0, -1.0]
    with Store(tmp_path / "store.db", read_only=True) as store:
        assert len(store.rollouts(phase="judge")) == 1


def test_whitening_waits_for_all_groups(start: Start) -> None:
    """REINFORCE++ compares all rollouts of the step, so no rows are published before the last group is complete."""
    uids = request(start("slow_for_b", credit={"advantage": "reinforce++"}), {"id": "a"}, {"id": "b"})
    began = time.monotonic()
    while not rows(uids):
        assert time.monotonic() - began < SECONDS
        time.sleep(0.05)
    assert set(settled(uids).values()) == {"finished"}
    fields = tq.kv_batch_get(keys=rows(uids), partition_id="train", select_fields=["rm_scores"])["rm_scores"]
    advantages = np.array([float(x[0]) for x in fields.unbind()])
    assert len(advantages) == 6
    assert advantages.mean() == pytest.approx(0, abs=1e-5)
    assert advantages.std(ddof=1) == pytest.approx(1, rel=1e-3)


@pytest.mark.slow
def test_groups_without_the_task_compare_all_prompts(start: Start) -> None:
    """One baseline over both prompts, as in the embedded trainer. Within each prompt all rewards are equal."""
    credit = {"advantage": "dr-grpo", "group_by": ["agent"]}
    uids = request(start("earns_for_a", credit=credit), {"id": "a"}, {"id": "b"})
    assert set(settled(uids).values()) == {"finished"}
    keys = sorted(rows(uids))
    fields = tq.kv_batch_get(keys=keys, partition_id="train", select_fields=["rm_scores"])["rm_scores"]
    assert [round(float(x[0]), 3) for x in fields.unbind()] == [0.5] * 3 + [-0.5] * 3


def fields_of(uids: list[str], *names: str) -> list[dict[str, Any]]:
    """Some tensors of each row."""
    keys = sorted(rows(uids))
    found = tq.kv_batch_get(keys=keys, partition_id="train", select_fields=list(names))
    return [dict(zip(names, values, strict=True)) for values in zip(*(found[n].unbind() for n in names), strict=True)]


@pytest.mark.slow
def test_tokens_with_a_cross_entropy_are_marked_where_no_token_was_sampled(start: Start, model: Path) -> None:
    """All rewards are equal, so nothing else is."""
    tokenizer: Any = load_tokenizer(model)
    algorithm = {"ce": {"weight": 0.5, "tokens": "user"}}
    uids = request(start("says_twice", algorithm=algorithm), {"id": "a"}, {"id": "b"})
    assert set(settled(uids).values()) == {"finished"}
    found = fields_of(uids, "responses", "response_mask", "rm_scores")
    assert len(found) == 6
    for row in found:
        marked = row["rm_scores"] != 0
        assert not (marked & row["response_mask"].bool()).any()
        assert set(row["rm_scores"][marked].tolist()) == {0.5}, "the weight"
        assert tokenizer.decode(row["responses"][marked].tolist()) == "and now?"


def test_tokens_get_the_difference_to_a_teacher(start: Start, model: Path, tmp_path: Path) -> None:
    network: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with scoring_server(model) as url:
        algorithm = {"distill": {"teacher": url, "weight": 0.5}, "reward_weight": 0.0}
        uids = request(start("says_twice", algorithm=algorithm), {"id": "a"}, {"id": "b"})
        assert set(settled(uids).values()) == {"finished"}
    found = fields_of(uids, "input_ids", "prompts", "response_mask", "rm_scores", "rollout_log_probs")
    for row in found:
        scores = torch.tensor([0.0, *logprobs_of(network, row["input_ids"].tolist())])[len(row["prompts"]) :]
        expected = 0.5 * (scores - row["rollout_log_probs"]) * row["response_mask"]
        torch.testing.assert_close(row["rm_scores"], expected, rtol=1e-4, atol=1e-4)
    with Store(tmp_path / "store.db", read_only=True) as store:
        (counts,) = store.steps().values()
    assert counts["tokens_distilled"] == 6 * 2 * 4


@pytest.mark.slow
def test_a_teacher_that_does_not_respond_is_an_error_at_the_start(start: Start) -> None:
    with pytest.raises(InfrastructureError, match="no usable response from the teacher's server"):
        start("digits", algorithm={"distill": {"teacher": "http://127.0.0.1:9/v1"}})


def test_a_teacher_that_is_lost_stops_the_run(start: Start, model: Path, tmp_path: Path) -> None:
    with scoring_server(model) as url:
        manager = start("digits", algorithm={"distill": {"teacher": url}})
    request(manager, {"id": "a"})
    with pytest.raises(KeyboardInterrupt):
        poll(SECONDS)
    assert isinstance(read_failure(tmp_path), InfrastructureError)
