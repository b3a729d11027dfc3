"""The parts of the trainer with verl that do not require verl: rows, configuration, records. The rest is in tests/verl."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from lightning_core import Config, load_config
from lightning_core.backends.backend import SamplingParams
from lightning_core.backends.verl import VerlBackend
from lightning_core.config.build_rules import check_rules, policy_rules
from lightning_core.credit import loss as declare_loss
from lightning_core.errors import ConfigError, ConstraintError, MissingExtra, ProofError, RewardError, TrainingError
from lightning_core.model.constraint import Constraints
from lightning_core.records.run_folder.checkpoints import checkpoints, newest_sound
from lightning_core.records.run_folder.manifest import VERL_TRACKER
from lightning_core.records.store import Phase, Store
from lightning_core.rollouts.collect import Collector
from lightning_core.rollouts.counts import add_counts
from lightning_core.rollouts.rows import to_rows
from lightning_core.trainers.own_model import sampling_config
from lightning_core.trainers.plan import Plan
from lightning_core.trainers.verl.constrained_rows import constraints_of, exclude, sampled_places
from lightning_core.trainers.verl.estimator import SETTINGS, weighted_advantages
from lightning_core.trainers.verl.lost import lost_process
from lightning_core.trainers.verl.policy_loss import OWN_LOSS, loss_mode, make_policy_loss
from lightning_core.trainers.verl.records import LOG, archive_log, read_failure, read_metrics_of_verl, write_failure
from lightning_core.trainers.verl.resume import prepare_start
from lightning_core.trainers.verl.rows import SIGNAL, PromptGroup, train_rows, validation_row
from lightning_core.trainers.verl.settings import defaults, flatten, rows_per_update, translate
from lightning_core.transitions import RowStreams, Streams
from tests.chat.test_chat import make_tokenizer
from tests.records.test_store import record
from tests.rollouts.collected import ScriptedAgents, collect_step
from tests.trainers.rows import make_row
from tests.verl.rows import recorded_row

GROUP = PromptGroup(uid="u-1", columns={"raw_prompt": ["x"]}, step=4)


def config(**sections: Any) -> Config:
    trainer = {"name": "verl", **sections.pop("trainer", {})}
    return load_config({"policy": {"model": "m", **sections.pop("policy", {})}, "trainer": trainer, **sections})


def test_a_row_is_a_prompt_and_everything_after_it() -> None:
    (row,) = train_rows(GROUP, 2, [recorded_row(prompt=4, output=3, advantage=0.5)], reward=0.25, signal=True)
    assert row.key == "u-1_2_0"
    fields = row.fields
    assert fields["prompts"].tolist() == [10, 11, 12, 13]
    assert fields["responses"].tolist() == [50, 51, 52]
    assert fields["response_mask"].tolist() == [1, 1, 1]
    assert fields["rm_scores"].tolist() == [0.5, 0.5, 0.5]
    assert fields["rollout_log_probs"].tolist() == pytest.approx([-1.0, -0.55, -0.1])
    assert fields["uid"] == "u-1-2", "the rollout, by which the estimator weighs"
    assert fields["extra_fields"]["reward_extra_info"]["reward"] == 0.25
    assert (row.tag["prompt_len"], row.tag["response_len"], row.tag["seq_len"]) == (4, 3, 7)


def test_a_backend_constrains_only_if_the_trainer_can() -> None:
    params = SamplingParams(max_tokens=4, json_schema='{"type": "object"}', stop_token_ids=frozenset({256}))
    client: Any = SimpleNamespace()
    with pytest.raises(ConstraintError, match="cannot constrain a response here: fused kernels"):
        VerlBackend(client, model="policy", max_context=9, constraints="fused kernels").check(params)
    constrains = VerlBackend(client, model="policy", max_context=9, constraints=Constraints(make_tokenizer(), 320))
    constrains.check(params)
    with pytest.raises(ConstraintError, match="not supported"):
        constrains.check(dataclasses.replace(params, json_schema='{"not": {}}'))


@pytest.mark.parametrize("packed", [True, False])
def test_only_the_places_of_constrained_tokens_lose_logits(packed: bool) -> None:
    params = SamplingParams(max_tokens=4, json_schema='{"enum": [1, 2]}', stop_token_ids=frozenset({256}))
    row = make_row(([5, 6], False), ([*make_tokenizer().encode("2"), 256], True), constraint=params.constraint)
    rows = torch.nested.nested_tensor(
        [torch.tensor([7, 8, 9]), torch.from_numpy(row.token_ids.astype(np.int64))], layout=torch.jagged
    )
    masks = torch.nested.nested_tensor([torch.tensor([1]), torch.tensor([1, 1])], layout=torch.jagged)
    batch = {"input_ids": rows, "response_mask": masks, "constraints": ["", constraints_of(row.segments)]}
    logits = torch.zeros((1, 7, 320) if packed else (2, 4, 320))
    exclude(logits, sampled_places(batch), Constraints(make_tokenizer(), 320))
    of_row = logits[0, 3:] if packed else logits[1]
    allowed = [set(place.nonzero().flatten().tolist()) for place in of_row == 0]
    assert allowed[1:3] == [{*make_tokenizer().encode("1"), *make_tokenizer().encode("2")}, {256}]
    assert [len(place) for place in (allowed[0], allowed[3])] == [320, 320]
    assert not (logits[0, :3] if packed else logits[0]).any()


def test_tags_hold_the_oldest_and_the_newest_version() -> None:
    (row,) = train_rows(GROUP, 0, [recorded_row(version=7, first=5)], reward=0.0, signal=True)
    assert (row.tag["global_steps"], row.tag["min_global_steps"], row.tag["max_global_steps"]) == (4, 5, 7)
    (row,) = train_rows(GROUP, 0, [recorded_row(version=7)], reward=0.0, signal=True)
    assert (row.tag["min_global_steps"], row.tag["max_global_steps"]) == (7, 7)


def test_a_row_that_was_changed_on_its_way_is_refused() -> None:
    row = recorded_row()
    tokens = row.token_ids.copy()
    tokens[5] += 1
    with pytest.raises(ProofError, match="not those that were sampled"):
        train_rows(GROUP, 0, [dataclasses.replace(row, token_ids=tokens)], reward=0.0, signal=True)
    logprobs = row.logprobs.copy()
    logprobs[5] += np.float32(1e-6)
    with pytest.raises(ProofError):
        train_rows(GROUP, 0, [dataclasses.replace(row, logprobs=logprobs)], reward=0.0, signal=True)


def test_groups_without_signal_have_one_value_and_others_several() -> None:
    def signals(signal: bool) -> set[float]:
        return {
            row.fields["extra_fields"]["reward_extra_info"][SIGNAL]
            for session in range(3)
            for row in train_rows(GROUP, session, [recorded_row()] * (1 + session), reward=0.0, signal=signal)
        }

    assert len(signals(False)) == 1
    assert len(signals(True)) > 1


def test_in_validation_the_last_token_has_the_reward() -> None:
    row = validation_row(GROUP, 1, recorded_row(), reward=0.75)
    assert row.fields["rm_scores"].tolist() == [0.0, 0.0, 0.75]
    assert row.fields["uid"] == "u-1", "the prompt, by which verl averages"


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"policies": {"a": {"agents": ["x"]}}}, "policies: verl trains one policy"),
    ({"policy": {"train_layers": 2}}, "policy.train_layers: verl trains all layers"),
    ({"policy": {"device": "cpu"}}, "policy.device: verl runs on GPUs"),
    ({"policy": {"backend": "vllm"}}, "policy.backend: verl's own servers"),
    ({"agents": {"frozen": {"checker": "base"}}}, "agents.frozen.checker: 'base' is not available with verl"),
    ({"credit": {"judge": {"model": "base"}}}, "credit.judge.model: found 'base'"),
    ({"credit": {"rewards": "gae", "gamma": 1.0, "advantage": "none"}}, "credit.rewards: 'gae' needs"),
    ({"credit": {"advantage": "reinforce++"}, "trainer": {"mode": "colocate_async"}}, "compares all rollouts"),
    (
        {"credit": {"group_by": ["agent"]}, "trainer": {"mode": "colocate_async"}},
        "credit.group_by: without 'task' it compares rollouts of all tasks of a step: add 'task'; otherwise expected",
    ),
    ({"credit": {"group_by": ["anchor"]}, "rollouts": {"refill": 1}}, "credit.group_by: without 'task'"),
    ({"algorithm": {"kl": {"weight": 0.1}}}, "algorithm.kl: verl does not support it with algorithm.aggregation"),
    ({"algorithm": {"entropy_weight": 0.1}}, "algorithm.entropy_weight: verl does not support it"),
    ({"algorithm": {"importance": {"level": "rollout"}}}, "algorithm.importance: found"),
    (
        {"algorithm": {"loss": "gspo", "sequence": "rollout", "clip_low": 3e-4, "clip_high": 4e-4}},
        "algorithm.sequence: found 'rollout', expected 'row'",
    ),
    (
        {"algorithm": {"mini_batches": 3}, "rollouts": {"tasks_per_step": 4}},
        "algorithm.mini_batches: found 3; with verl expected a divisor of tasks_per_step · rows_per_rollout = 4",
    ),
    (
        {"algorithm": {"mini_batches": 2}, "trainer": {"mode": "separate_async", "rollout_nodes": 1}},
        "algorithm.mini_batches: found 2, expected 1: with mode: separate_async",
    ),
    (
        {"algorithm": {"distill": {"teacher": "some/model"}}},
        "algorithm.distill.teacher: found 'some/model'; with verl expected the URL of a vLLM server",
    ),
    (
        {"algorithm": {"distill": {"teacher": "http://t:8000/v1", "divergence": "forward"}}},
        "algorithm.distill.divergence: found 'forward', expected 'reverse'",
    ),
    (
        {"algorithm": {"ce": {"weight": 0.1, "tokens": ["tool", "response"]}}},
        "algorithm.ce.tokens: found ['tool', 'response'], expected tool, user or both",
    ),
    (
        {"algorithm": {"ce": {"weight": 0.1}}, "rollouts": {"temperature": 0.7}},
        "rollouts.temperature: found 0.7, expected 1.0: with algorithm.ce",
    ),
    ({"trainer": {"schedule": "linear"}}, "trainer.schedule: found 'linear', expected 'constant' or 'cosine'"),
    (
        {"trainer": {"keep_best": True}, "eval": {"every": 5}},
        "trainer.keep_best: verl keeps the newest checkpoints only",
    ),
    ({"trainer": {"token_budget": 100}}, "trainer.token_budget: verl trains until trainer.steps"),
    ({"trainer": {"minutes": 10.0}}, "trainer.minutes: verl trains until trainer.steps"),
    ({"eval": {"every": 5, "early_stop": {"reward": 1.0}}}, "eval.early_stop: verl trains until trainer.steps"),
    (
        {"tasks": {"sampling": "curriculum"}},
        "tasks.sampling: found 'curriculum', expected 'uniform' or 'auto': verl reads",
    ),
    (
        {"tasks": {"sampling_floor": 0.2}},
        "tasks.sampling_floor: goes with sampling: curriculum only, but tasks.sampling is 'auto', which is uniform with trainer.name: verl",
    ),
    ({"trainer": {"threads": 2}}, "trainer.threads: goes with trainer.name: torch only"),
    ({"trainer": {"name": "torch", "nodes": 2}}, "trainer.nodes: goes with trainer.name: verl only"),
    ({"trainer": {"name": "torch"}, "ray": {"address": "auto"}}, "ray.address: goes with trainer.name: verl"),
    ({"trainer": {"mode": "separate_async"}}, "trainer.rollout_nodes: found 0"),
    ({"trainer": {"rollout_nodes": 1}}, "trainer.rollout_nodes: found 1 with trainer.mode 'sync'"),
]


@pytest.mark.parametrize(("sections", "text"), REFUSED, ids=[text[:40] for _, text in REFUSED])
def test_what_verl_does_not_support_is_rejected_by_name(sections: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as error:
        config(**sections)
    assert text in str(error.value)


def test_every_key_that_trains_reaches_verl(tmp_path: Path) -> None:
    """A changed value must change verl's settings; otherwise it would be ignored silently."""
    changed: list[dict[str, Any]] = [
        {"rollouts": {"tasks_per_step": 3}}, {"rollouts": {"group_size": 3}}, {"rollouts": {"temperature": 0.5}},
        {"rollouts": {"refill": 1}}, {"rollouts": {"max_tokens": 17}}, {"trainer": {"steps": 7}},
        {"trainer": {"learning_rate": 2e-5}}, {"trainer": {"warmup_steps": 3}}, {"trainer": {"weight_decay": 0.1}},
        {"trainer": {"betas": [0.8, 0.9]}}, {"trainer": {"grad_clip": 0.3}}, {"trainer": {"micro_batch_tokens": 9000}},
        {"trainer": {"checkpoint_every": 3}}, {"trainer": {"keep_checkpoints": 5}}, {"trainer": {"nodes": 2}},
        {"trainer": {"gpus_per_node": 4}}, {"trainer": {"rows_per_rollout": 3}}, {"trainer": {"rollout_workers": 9}},
        {"trainer": {"mode": "colocate_async"}}, {"algorithm": {"loss": "cispo"}}, {"algorithm": {"clip_low": 0.1}},
        {"algorithm": {"clip_high": 0.5}}, {"algorithm": {"loss": "dual-clip", "clip_dual": 2.0}},
        {"algorithm": {"aggregation": "token-mean"}}, {"algorithm": {"updates_per_step": 2}},
        {"algorithm": {"importance": {"high": 3.0}}}, {"policy": {"dtype": "bfloat16"}},
        {"policy": {"gradient_checkpointing": True}}, {"policy": {"tuning": "lora"}}, {"run": {"seed": 5}},
        {"ray": {"address": "auto"}}, {"algorithm": {"mini_batches": 2}}, {"trainer": {"schedule": "cosine"}},
        {"algorithm": {"ce": {"weight": 0.1}}},
    ]  # fmt: skip

    def translated(sections: dict[str, Any]) -> str:
        found = translate(
            config(**sections), model="m", max_context=1024, weights=10**9, folder=tmp_path, working_dir=tmp_path
        )
        return json.dumps(found, sort_keys=True)

    plain = translated({})
    ignored = [sections for sections in changed if translated(sections) == plain]
    assert not ignored


def test_the_schedule_mini_batches_and_decay_have_verls_names(tmp_path: Path) -> None:
    found = config(
        rollouts={"tasks_per_step": 4, "group_size": 8},
        algorithm={"mini_batches": 2},
        trainer={"schedule": "cosine", "min_learning_rate_ratio": 0.1, "warmup_steps": 3, "weight_decay": 0.1},
    )
    keys = translate(found, model="m", max_context=1024, weights=10**9, folder=tmp_path, working_dir=tmp_path)
    actor = "actor_rollout_ref.actor"
    assert keys[f"{actor}.ppo_mini_batch_size"] == 2, "tasks of an update; verl multiplies by group_size"
    assert rows_per_update(found) == 16
    optim = {key.rpartition(".")[2]: value for key, value in keys.items() if key.startswith(f"{actor}.optim.")}
    wanted = {"lr_scheduler_type": "cosine", "min_lr_ratio": 0.1, "lr_warmup_steps": 3, "weight_decay": 0.1}
    assert {key: optim[key] for key in wanted} == wanted
    assert (
        defaults(found, max_context=1024)[f"{actor}.optim.optimizer_impl"] == "lightning_core.trainers.verl.optimizer"
    )
    assert f"{actor}.optim.optimizer_impl" not in defaults(config(), max_context=1024)


def test_the_weights_of_verls_mini_batches_sum_to_one_on_average() -> None:
    """Rollouts of 2 and 4 tokens: 1/2 · 1/2 and 1/2 · 1/4 of a step, and twice that in each of two mini-batches."""
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]])
    settings = {"aggregation": "rollout-mean", "sequence": None, "constant_tokens": None, "cross_entropy": False}
    for parts in (1, 2):
        weighted, plain = weighted_advantages(
            torch.ones(2, 4) * mask, mask, ["a", "b"], {SETTINGS: {**settings, "mini_batches": parts}}
        )
        assert weighted.tolist() == [[0.25 * parts] * 2 + [0.0] * 2, [0.125 * parts] * 4]
        assert plain.tolist() == mask.tolist()


def test_the_tokens_of_a_cross_entropy_have_its_weights() -> None:
    """With the coefficient 0.5. Of the rollouts with some, a has two, in two rows, and b one: 0.5 / 2 / 2 and 0.5 / 2."""
    mask = torch.tensor([[1, 0, 0], [1, 1, 0], [0, 1, 1], [0, 0, 0], [1, 1, 1]])
    rewards = torch.tensor([[2.0, 0.5, 0], [2, 2, 0.5], [0.5, 2, 2], [0, 0, 0], [2, 2, 2]])
    rollouts = ["a", "a", "b", "padding", "c"]
    settings = {"aggregation": "token-mean", "sequence": None, "constant_tokens": None, "mini_batches": 1}
    weighted, plain = weighted_advantages(rewards, mask, rollouts, {SETTINGS: {**settings, "cross_entropy": True}})
    own = 2 / 8
    assert weighted.tolist() == [[own, 0.125, 0], [own, own, 0.125], [0.25, own, own], [0, 0, 0], [own] * 3]
    assert plain.tolist() == (2.0 * mask).tolist()
    twice = {**settings, "cross_entropy": True, "mini_batches": 2}
    assert torch.equal(weighted_advantages(rewards, mask, rollouts, {SETTINGS: twice})[0], 2 * weighted)
    without, _ = weighted_advantages(rewards, mask, rollouts, {SETTINGS: {**settings, "cross_entropy": False}})
    assert without.tolist() == (own * mask).tolist(), (
        "a token that verl takes out of its mask is not one of a cross-entropy"
    )


def test_a_response_begins_at_the_first_token_with_a_loss() -> None:
    """The coefficient of a cross-entropy is not at sampled tokens: those have their advantage."""
    streams = RowStreams(cross_entropy=np.array([0, 0, 0.25, 0, 0.25, 0, 0], dtype="<f4"))
    row = dataclasses.replace(recorded_row(prompt=4, output=3, advantage=0.5), streams=streams)
    (made,) = train_rows(GROUP, 0, [row], reward=0.0, signal=True)
    assert made.fields["prompts"].tolist() == [10, 11]
    assert made.fields["responses"].tolist() == [12, 13, 50, 51, 52]
    assert made.fields["response_mask"].tolist() == [0, 0, 1, 1, 1]
    assert made.fields["rm_scores"].tolist() == [0.25, 0.0, 0.5, 0.5, 0.5]
    assert (made.tag["prompt_len"], made.tag["response_len"], made.tag["seq_len"]) == (2, 5, 7)


def test_a_call_is_a_run_of_sampled_tokens() -> None:
    """Log ratios 0.1 and 0.3 of one call, −0.1 of the next, 0.6 and 0 in another row, each with the mean of its call."""
    mask = torch.tensor([[1, 1, 0, 1], [1, 1, 0, 0], [0, 0, 0, 0]])
    new = torch.tensor([[0.1, 0.3, 9.0, -0.1], [0.6, 0.0, 9.0, 9.0], [9.0] * 4])
    advantages = torch.tensor([[2.0, 2.0, 0.0, -1.0], [0.5, 0.5, 0.0, 0.0], [0.0] * 4])
    settings = {
        "aggregation": "sequence-mean",
        "sequence": "call",
        "constant_tokens": None,
        "mini_batches": 1,
        "cross_entropy": False,
    }
    weighted, _ = weighted_advantages(advantages, mask, ["a", "b", "pad"], {SETTINGS: settings})
    expected = torch.tensor([[1 / 3, 1 / 3, 0, -1 / 3], [1 / 12, 1 / 12, 0, 0], [0] * 4])
    torch.testing.assert_close(weighted, expected)
    config = SimpleNamespace(clip_ratio_low=0.2, clip_ratio_high=0.3, clip_ratio_c=1e9, global_batch_info={})
    losses = {
        sequence: make_policy_loss("gspo", sequence)(torch.zeros(3, 4), new, weighted, mask, "token-mean", config)[0]
        for sequence in ("call", "row")
    }
    assert losses["call"].item() == pytest.approx(-(2 * math.exp(0.2) - math.exp(-0.1)) / 3 - 0.5 * 1.3 / 3)
    assert losses["row"].item() == pytest.approx(-(2 - 1) * math.exp(0.1) / 3 - 0.5 * 1.3 / 3)
    assert loss_mode("gspo", "call") != loss_mode("gspo", "row") == loss_mode("gspo")
    assert loss_mode("ppo", "call") == loss_mode("ppo"), "there sequence is that of the aggregation"


@pytest.mark.parametrize(
    ("loss", "clips", "masked"),
    [
        ("dppo-tv", (0.15, 0.15), [0]),
        ("examples.rules.losses:dppo_kl", (0.03, 0.09), [2]),
        ("examples.rules.losses:m2po", (0.2, 0.28), [0, 1]),
    ],
)
def test_losses_that_mask_tokens_behind_verls_signature(
    loss: str, clips: tuple[float, float], masked: list[int]
) -> None:
    """Two rows with A = 2 and A = −1, each with an observation. The policy's probability moves by 0.2, 0.02, −0.1 and 0.

    The divergences are 0.0872, 0.0092, 0.0367 and 0. (log r)² is 0.113, 1.207 and 0.0139: the smallest alone has a mean
    below 0.04.
    """
    old = torch.tensor([[0.5, 0.01, 0.5], [0.9, 0.01, 0.5]]).log()
    new = torch.tensor([[0.7, 0.03, 0.9], [0.8, 0.03, 0.5]]).log()
    mask = torch.tensor([[1, 1, 0], [1, 0, 1]])
    config = SimpleNamespace(clip_ratio_low=clips[0], clip_ratio_high=clips[1], clip_ratio_c=1e9, global_batch_info={})
    advantages = torch.tensor([[2.0], [-1.0]]).expand(2, 3)
    found, metrics = make_policy_loss(loss)(old, new, advantages, mask, "token-mean", config)
    losses = [-2.8, -6.0, 8 / 9, 1.0]
    assert found.item() == pytest.approx(sum(value for token, value in enumerate(losses) if token not in masked))
    assert metrics["actor/clip_high_fraction"] == sum(token < 2 for token in masked) / 4
    assert metrics["actor/clip_low_fraction"] == sum(token >= 2 for token in masked) / 4


def test_verls_processes_get_the_importable_name_of_a_custom_loss(tmp_path: Path) -> None:
    for name in ("examples.rules.losses:m2po", "m2po"):  # after the import, its declared name is known here too
        own = config(algorithm={"loss": name})
        check_rules(own)
        keys = translate(own, model="m", max_context=1024, weights=10**9, folder=tmp_path, working_dir=tmp_path)
        assert keys["actor_rollout_ref.actor.policy_loss.loss_mode"] == "lightning-examples.rules.losses:m2po"
        assert keys[f"+ray_kwargs.ray_init.runtime_env.env_vars.{OWN_LOSS}"] == "examples.rules.losses:m2po"
    builtin = translate(config(), model="m", max_context=1024, weights=10**9, folder=tmp_path, working_dir=tmp_path)
    assert not any(OWN_LOSS in key for key in builtin)


def by_sequence(logprobs: torch.Tensor, log_ratio: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
    return -log_ratio.exp() * advantages


def test_the_ratio_of_a_custom_loss_is_checked_once_it_is_imported() -> None:
    declare_loss("by-sequence", ratio="sequence")(by_sequence)
    own = config(algorithm={"loss": f"{__name__}:by_sequence", "sequence": "rollout"})
    with pytest.raises(
        ConfigError, match=r"algorithm\.sequence: found 'rollout', expected 'row' with '.*:by_sequence'"
    ):
        check_rules(own)


def test_the_rules_of_a_smaller_trial_are_those_of_the_run() -> None:
    """As the doctor's, whose number of tasks is not a multiple of the mini-batches."""
    whole = config(rollouts={"tasks_per_step": 8}, algorithm={"mini_batches": 4})
    trial = whole.model_copy(update={"rollouts": whole.rollouts.model_copy(update={"tasks_per_step": 2})})
    assert policy_rules(trial).keys() == policy_rules(whole).keys()


def test_an_update_holds_a_row_for_each_agent() -> None:
    assert rows_per_update(config(rollouts={"tasks_per_step": 2, "group_size": 4})) == 8
    assert rows_per_update(config(rollouts={"tasks_per_step": 2, "group_size": 4}, agents={"train": ["a", "b"]})) == 16


def test_nested_and_dotted_keys_are_the_same() -> None:
    nested = {"a": {"b.c": 1, "+d": {"e": 2}}, "+f": {"g": 3}}
    assert flatten(nested) == {"a.b.c": 1, "+a.d": {"e": 2}, "+f": {"g": 3}}


def test_the_error_of_another_process_is_read_as_data(tmp_path: Path) -> None:
    class Local(Exception):
        """An error that is not one of ours."""

    assert read_failure(tmp_path) is None
    for error, kind, message in (
        (Local("what it was"), TrainingError, "Local: what it was"),
        (RewardError("no reward"), RewardError, "no reward"),
        (MissingExtra("p", "e", "why"), MissingExtra, "why needs the package 'p': pip install 'lightning-rl[e]'"),
    ):
        write_failure(tmp_path, error)
        read = read_failure(tmp_path)
        assert (type(read), str(read)) == (kind, message)


DIED = "ActorDiedError: The actor died unexpectedly before finishing this task.\n\tclass_name: {}\n\tactor_id: 4e\n{}"


@pytest.mark.parametrize(
    ("text", "lost"),
    [
        (DIED.format("TaskRunnerV1", "its worker process has died"), "the process of verl's trainer and Lightning's"),
        (DIED.format("vLLMHttpServer", "its worker process has died"), "the process of a model server was lost"),
        (DIED.format("Own", "its worker process has died"), "the process of an actor Own was lost"),
        (
            DIED.format("WorkerDict", "Worker exit detail: Owner's node has crashed."),
            "a node of the Ray cluster was lost",
        ),
        ("ValueError: the actor has 3 layers", None),
    ],
)
def test_a_lost_process_is_named(text: str, lost: str | None) -> None:
    found = lost_process(text)
    assert found == lost or (found is not None and lost is not None and found.startswith(lost))


COUNTS = {"rollouts": 4.0, "rollouts_left_out": 1.0, "reward_sum": 1.5, "rows": 5.0, "versions_behind": 5.0}


def test_metrics_of_a_run_that_was_resumed(tmp_path: Path) -> None:
    stale = '"training/off_policy/trajectory_staleness/mean": 1.5'
    line = '{{"step": {}, "data": {{"actor/lr": {}, "table": [1], STALE}}}}\n'.replace("STALE", stale)
    (tmp_path / LOG).write_text(line.format(1, 0.1) + line.format(2, 0.2) + '{"step": 3, "da')  # killed here
    archive_log(tmp_path, after=1)
    assert read_metrics_of_verl(tmp_path, {2: COUNTS}, rows_per_update=4)[0].keys().isdisjoint({"verl/actor/lr"})
    (tmp_path / LOG).write_text(line.format(2, 0.3))
    first, second = read_metrics_of_verl(tmp_path, {1: COUNTS, 2: COUNTS}, rows_per_update=4)
    assert (first["verl/actor/lr"], second["verl/actor/lr"]) == (0.1, 0.3)
    assert (first["reward"], first["rows_padding_share"]) == (0.5, 3 / 8)
    assert "verl/table" not in first
    assert first["staleness"] == 1.5, "verl's, when the rows were trained on; they were counted before"


@pytest.mark.parametrize(
    ("step", "logged", "evaluate", "kept"),
    [
        (0, (), True, {"train": 0, "eval_before": 0, "eval": 0}),
        (0, (0,), False, {"train": 0, "eval_before": 1, "eval": 0}),
        (1, (0, 1), False, {"train": 1, "eval_before": 1, "eval": 0}),
        (2, (0, 1), True, {"train": 2, "eval_before": 1, "eval": 0}),
        (2, (0, 1, 2), False, {"train": 2, "eval_before": 1, "eval": 1}),
    ],
)
def test_a_resumed_run_repeats_what_is_after_its_checkpoint(
    tmp_path: Path, step: int, logged: tuple[int, ...], evaluate: bool, kept: dict[Phase, int]
) -> None:
    """An evaluation of the checkpoint's weights is repeated unless verl's log has its result."""
    recorded: tuple[tuple[Phase, int], ...] = (
        *(("eval_before", 0), ("train", 1), ("train", 2)),
        *(("eval", 2), ("train", 3)),
    )
    with Store(tmp_path / "store.db") as store:
        for phase, at in recorded:
            store.add_rollout(record(f"{phase}{at}", phase=phase, step=at, task_id="a"), [])
    line = '{{"step": {}, "data": {{"val-core/reward": 1.0}}}}\n'
    (tmp_path / LOG).write_text("".join(map(line.format, logged)))
    found = config(run={"resume": True}, eval={"every": 2}, trainer={"steps": 4})
    checkpoint = tmp_path / "checkpoints" / f"global_step_{step}" if step else None
    (tmp_path / "checkpoints").mkdir()
    inputs: Any = SimpleNamespace(eval_tasks=[{"id": "a"}])
    messages: list[str] = []
    observers: Any = SimpleNamespace(message=messages.append)
    start = prepare_start(
        Plan(config=found, folder=tmp_path, checkpoint=checkpoint, inputs=inputs, observers=observers)
    )
    assert (start.step, start.evaluate) == (step, evaluate)
    with Store(tmp_path / "store.db") as store:
        assert {phase: len(store.rollouts(phase=phase)) for phase in kept} == kept
    assert len(messages) == 1


@pytest.mark.parametrize(
    "credit", [{"rewards": "broadcast"}, {"rewards": "gigpo", "gamma": 0.9}], ids=["grpo", "gigpo"]
)
def test_metrics_of_rollouts_are_those_of_the_embedded_trainer(tmp_path: Path, credit: dict[str, Any]) -> None:
    """The same names and values whether groups are counted one by one, as with verl, or together."""
    settings = config(agents={"train": ["writer"]}, rollouts={"tasks_per_step": 3, "group_size": 2}, credit=credit)
    tasks = [{"id": name} for name in "abc"]
    agents = ScriptedAgents(reward=lambda task, copy: 0.5 if task == "b" else float(copy), lost=frozenset("c"))
    embedded = collect_step(settings, agents, tmp_path / "embedded", tasks).metrics

    async def one_by_one(collector: Collector) -> dict[str, float]:
        counts: dict[str, float] = {}
        for task in tasks:
            groups = [await collector.roll_out(task, "train", 0)]
            episodes = await collector.annotate(groups, 0, required=False)
            credit = collector.credit(episodes)
            rows = to_rows(settings.algorithm, episodes, credit, Streams())
            counts = add_counts(counts, collector.count(groups, episodes, credit, rows, Streams()))
        return counts

    with Store(tmp_path / "store.db") as store:
        store.add_step(1, asyncio.run(one_by_one(Collector(settings, agents, store))))
        (found,) = read_metrics_of_verl(tmp_path, store.steps(), rows_per_update=4)
    assert {key: value for key, value in found.items() if key not in ("step", "rows_padding_share")} == embedded
    assert (embedded["groups"], embedded["groups_equal"], embedded["rollouts_left_out"]) == (2, 1, 2)


def test_a_checkpoint_of_verls_is_sampled_from_its_export(tmp_path: Path) -> None:
    for name in ("global_step_10", "global_step_9"):
        (tmp_path / "checkpoints" / name / "actor" / "huggingface").mkdir(parents=True)
    newest = checkpoints(tmp_path)[-1]
    assert newest.name == "global_step_10"
    tracker = tmp_path / "checkpoints" / VERL_TRACKER
    # The last one: verl was killed while it wrote its tracker.
    for finished, expected in (("9", "global_step_9"), ("10", "global_step_10"), ("", "global_step_9")):
        tracker.write_text(finished)
        assert newest_sound(tmp_path, training=True) == newest.with_name(expected)
    with pytest.raises(
        ConfigError, match=r"contains no model with weights under actor/huggingface.*verl\.model_merger"
    ):
        sampling_config(config(), newest)
    (newest / "actor" / "huggingface" / "config.json").write_text("{}")
    (newest / "actor" / "huggingface" / "model.safetensors").touch()
    found, rest = sampling_config(config(policy={"tuning": "lora"}), newest)
    assert (found.policy.model, found.trainer.name, rest) == (str(newest / "actor" / "huggingface"), "torch", None)
