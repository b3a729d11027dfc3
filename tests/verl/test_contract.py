"""Checks our assumptions about the installed verl, so that a change in verl is reported instead of causing a hang."""

from __future__ import annotations

import ast
import asyncio
import importlib
import inspect
import pickle
import textwrap
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transfer_queue as tq
from omegaconf import OmegaConf
from verl.trainer import main_ppo
from verl.trainer.ppo import core_algos
from verl.trainer.ppo import utils as ppo_utils
from verl.trainer.ppo.v1 import replay_buffer, trainer_base
from verl.utils.config import validate_config
from verl.utils.import_utils import load_class_from_fqn
from verl.utils.tensordict_utils import list_of_dict_to_tensordict
from verl.workers.config import HFModelConfig
from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
from verl.workers.rollout import llm_server
from verl.workers.rollout.replica import TokenOutput
from verl.workers.rollout.vllm_rollout.utils import build_cli_args_from_config
from vllm import SamplingParams
from vllm.entrypoints.openai.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

from lightning_core import load_config
from lightning_core.backends.backend import SamplingParams as OurSamplingParams
from lightning_core.backends.verl import VerlBackend
from lightning_core.errors import ConfigError
from lightning_core.trainers.verl import plugin
from lightning_core.trainers.verl.compose import compose_config
from lightning_core.trainers.verl.constrained_rows import ENGINE, sampled_places, why_unconstrained
from lightning_core.trainers.verl.dataset import TaskDataset, write_tasks
from lightning_core.trainers.verl.estimator import ESTIMATOR
from lightning_core.trainers.verl.manager import LightningManager
from lightning_core.trainers.verl.policy_loss import OWN_LOSS, loss_mode
from lightning_core.trainers.verl.prompts import read_prompts
from lightning_core.trainers.verl.rows import PromptGroup, train_rows, validation_row
from lightning_core.trainers.verl.settings import MANAGER, defaults, translate
from tests.trainers.rows import make_row
from tests.verl.rows import recorded_row

COMPUTED = {
    "entropy",
    "log_probs",
    "old_log_probs",
    "ref_log_prob",
    "values",
    "advantages",
    "returns",
    "token_level_rewards",
}
"""Fields that verl's trainer writes before it reads them."""
VERSIONS = ("min_global_steps", "max_global_steps")


def moved(what: str, found: object, expected: object) -> str:
    return f"verl {metadata.version('verl')} has moved: {what} is {found!r}, and lightning_core/trainers/verl expects {expected!r}"


def test_the_version_that_the_adapter_was_written_for() -> None:
    version = metadata.version("verl")
    assert version.startswith("0.9."), moved("its version", version, "0.9.x")


def test_manager_is_created_and_called_as_it_expects() -> None:
    assert load_class_from_fqn(MANAGER) is LightningManager
    source = inspect.getsource(
        inspect.unwrap(main_ppo.TaskRunnerV1.__ray_metadata__.modified_class.init_agent_loop_manager)
    )
    made = next(c for c in calls(source) if name_of(c.func) == "create")
    found = {keyword.arg for keyword in made.keywords}
    expected = set(inspect.signature(LightningManager.create).parameters)
    assert found <= expected, moved("the arguments of create()", found, expected)
    requests = [c for c in calls(inspect.getsource(trainer_base)) if name_of(c.func) == "generate_sequences"]
    assert requests, moved("the request for rollouts", "not generate_sequences", "generate_sequences(batch)")
    assert all(len(c.args) == 1 and not c.keywords for c in requests), moved(
        "generate_sequences", ast.unparse(requests[0]), "generate_sequences(batch)"
    )


def test_model_servers_are_called_as_they_expect() -> None:
    for client in (llm_server.LLMServerClient, llm_server.FullyAsyncLLMServerClient):
        found = set(inspect.signature(client.generate).parameters)
        expected = {"request_id", "prompt_ids", "sampling_params"}
        assert expected <= found, moved(f"{client.__name__}.generate", found, expected)
        source = inspect.getsource(client)
        assert "min_global_steps" in source, moved(client.__name__, "silent", "min_global_steps and max_global_steps")
        assert "max_global_steps" in source, moved(client.__name__, "silent", "min_global_steps and max_global_steps")
    found = set(TokenOutput.model_fields)
    expected = {"token_ids", "log_probs", "stop_reason", "extra_fields"}
    assert expected <= found, moved("TokenOutput", found, expected)


def test_the_engine_that_applies_constraints_is_the_one_of_the_policy() -> None:
    importlib.import_module(ENGINE)  # as verl does
    for strategy in ("fsdp", "fsdp2"):
        found = EngineRegistry.get_engine_cls("language_model", strategy)
        assert (found.__module__, found.__name__) == (ENGINE, "ConstrainedEngine")
    own = inspect.signature(found.prepare_model_outputs).parameters
    theirs = inspect.signature(FSDPEngineWithLMHead.prepare_model_outputs).parameters
    assert list(own) == list(theirs), moved("prepare_model_outputs", list(theirs), list(own))
    assert "import_external_libs(self.external_lib)" in inspect.getsource(HFModelConfig)


def test_the_server_gets_the_automaton_of_the_trainer() -> None:
    settings = defaults(load_config({"policy": {"model": "m"}, "trainer": {"name": "verl"}}), max_context=1024)
    (key,) = (key for key in settings if key.endswith("structured_outputs_config"))
    assert key.split(".")[-3:-1] == ["engine_kwargs", "vllm"]
    arguments = build_cli_args_from_config({key.rpartition(".")[2]: settings[key]})
    parsed = make_arg_parser(FlexibleArgumentParser()).parse_args(arguments)
    assert parsed.structured_outputs_config.backend == "guidance"


def test_constraints_arrive_as_vllms() -> None:
    sent: dict[str, Any] = {}

    class Client:
        async def generate(self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any]) -> Any:
            sent.update(pickle.loads(pickle.dumps(sampling_params)))
            return TokenOutput(token_ids=[9], log_probs=[0.0], extra_fields=dict.fromkeys(VERSIONS, 1))

    async def sample() -> None:
        params = OurSamplingParams(max_tokens=1, json_schema='{"type": "object"}', stop_token_ids=frozenset({9}))
        backend = VerlBackend(Client(), model="policy", max_context=9, constraints="never", whole=Client())
        async for _ in backend._generate([1], params, stream=False):
            pass

    asyncio.run(sample())
    del sent["max_tokens"], sent["logprobs"]
    grammar = SamplingParams(max_tokens=1, **sent).structured_outputs.grammar
    assert grammar.startswith("start: response (<[9]>)")


def test_rows_have_the_fields_that_the_trainer_reads() -> None:
    read = {name for names in string_lists(inspect.getsource(trainer_base.PPOTrainer)) for name in names}
    row = train_rows(group(), 0, [recorded_row()], reward=1.0, signal=True)[0]
    missing = read - set(row.fields) - COMPUTED
    assert not missing, moved("the fields that it reads from a row", sorted(missing), "no further fields")


def test_tags_have_the_keys_that_the_trainer_reads() -> None:
    source = inspect.getsource(trainer_base) + inspect.getsource(replay_buffer)
    read = {
        node.slice.value
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Subscript) and name_of(node.value) == "tag" and isinstance(node.slice, ast.Constant)
    }
    tag = train_rows(group(), 0, [recorded_row()], reward=1.0, signal=True)[0].tag
    assert read <= set(tag), moved("the fields that it reads from a tag", read, set(tag))
    wrong = {key: value for key, value in tag.items() if key != "status" and type(value) is not int}
    assert not wrong, f"tags must be ints, which verl casts: {wrong}"


def test_keys_and_statuses_are_those_of_the_replay_buffer() -> None:
    described = replay_buffer.ReplayBuffer.__doc__ or ""
    assert "{uid}_{session_id}_{index}" in described, moved(
        "the format of keys", described[:200], "{uid}_{session_id}_{index}"
    )
    key = train_rows(group(), 3, [recorded_row(), recorded_row()], reward=1.0, signal=True)[1].key
    assert key.rsplit("_", 2) == ["uid-1", "3", "1"]
    source = inspect.getsource(replay_buffer.ReplayBuffer._sync_metadata_from_transfer_queue)
    for status in ("running", "finished", "failure"):
        assert f'case "{status}"' in source, moved("a prompt's status", "another", status)


def test_transfer_queue_is_written_as_it_expects() -> None:
    for function, expected in (
        (tq.async_kv_put, {"key", "partition_id", "tag"}),
        (tq.async_kv_batch_put, {"keys", "fields", "tags", "partition_id"}),
    ):
        found = set(inspect.signature(function).parameters)
        assert expected <= found, moved(f"TransferQueue's {function.__name__}", found, expected)
    rows = train_rows(group(), 0, [recorded_row(), recorded_row(prompt=9)], reward=1.0, signal=True)
    batch = list_of_dict_to_tensordict([dict(row.fields) for row in rows])
    assert [len(x) for x in batch["prompts"].unbind()] == [4, 9]
    assert batch["rm_scores"].dtype == torch.float32
    assert list(sampled_places(batch)) == []
    constrained = make_row(([1, 2], False), ([3], True), constraint='{"json_schema": {}}')
    rows += train_rows(group(), 0, [constrained], reward=1.0, signal=True)
    (tokens,) = sampled_places(list_of_dict_to_tensordict([dict(row.fields) for row in rows]))
    assert (tokens.row, tokens.start, tokens.token_ids, tokens.constraint) == (2, 2, [3], '{"json_schema": {}}')


def test_dataset_is_made_and_read_as_it_expects(tmp_path: Path) -> None:
    write_tasks(tmp_path / "tasks.jsonl", [{"id": "a", "x": 1}, {"id": "b", "x": 2}])
    config = OmegaConf.create(
        {"custom_cls": {"path": "pkg://lightning_core.trainers.verl.dataset", "name": "TaskDataset"}}
    )
    dataset = ppo_utils.create_rl_dataset(str(tmp_path / "tasks.jsonl"), config, None, None)
    assert isinstance(dataset, TaskDataset)
    from verl.utils import tensordict_utils as tu
    from verl.utils.dataset.rl_dataset import collate_fn

    columns = collate_fn([dataset[0], dataset[1]])
    columns["uid"] = np.array(["u-1", "u-2"], dtype=object)
    batch = tu.get_tensordict(columns)
    tu.assign_non_tensor_data(batch, "global_steps", 3)
    prompts = read_prompts(batch)
    assert [(p.uid, p.task["x"], p.step, p.training) for p in prompts] == [("u-1", 1, 3, True), ("u-2", 2, 3, True)]
    tu.assign_non_tensor_data(batch, "validate", True)
    assert not any(p.training for p in read_prompts(batch))
    again = list_of_dict_to_tensordict(
        [dict(validation_row(p.group, 0, recorded_row(), reward=0.5).fields) for p in prompts]
    )
    assert again["rm_scores"].sum(dim=1).tolist() == [0.5, 0.5]


def test_estimator_and_losses_are_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ESTIMATOR in core_algos.ADV_ESTIMATOR_REGISTRY, moved(
        "the entry point group verl.plugins", "not read", "read"
    )
    for loss in ("ppo", "dual-clip", "gspo", "cispo", "dppo-tv", "reinforce"):
        assert loss_mode(loss) in core_algos.POLICY_LOSS_REGISTRY
    own = "examples.rules.losses:m2po"
    monkeypatch.setattr(core_algos, "POLICY_LOSS_REGISTRY", {})
    monkeypatch.setenv(OWN_LOSS, own)
    importlib.reload(plugin)
    assert loss_mode(own) in core_algos.POLICY_LOSS_REGISTRY, "the custom loss of a run"


_ACTOR = "actor_rollout_ref.actor"
_REQUIRED: dict[str, dict[str, Any]] = {"policy": {"model": "m"}, "trainer": {"name": "verl"}}
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "kl": {"algorithm": {"aggregation": "token-mean", "kl": {"weight": 0.01}, "entropy_weight": 0.01}},
    "decoupled": {"algorithm": {"importance": {"level": "row"}, "updates_per_step": 2}},
    "masked": {"algorithm": {"importance": {"kind": "mask", "low": 0.5, "high": 2.0}}},
    "adapters": {"policy": {"tuning": "lora"}},
    "precision": {"policy": {"dtype": "bfloat16", "gradient_checkpointing": True}},
    "schedule": {"trainer": {"schedule": "cosine", "min_learning_rate_ratio": 0.1, "weight_decay": 0.1}},
    "mini-batches": {"algorithm": {"mini_batches": 2}},
    "dynamic sampling": {"rollouts": {"refill": 4}},
    "colocated": {"trainer": {"mode": "colocate_async", "nodes": 2, "gpus_per_node": 8}},
    "separate": {"trainer": {"mode": "separate_async", "rollout_nodes": 1}},
    "a cluster that runs": {"ray": {"address": "auto"}},
    "Megatron": {"trainer": {"schedule": "cosine", "verl": {"model_engine": "megatron"}}},
    "VeOmni": {"trainer": {"schedule": "cosine", "verl": {"model_engine": "veomni"}}},
}


@pytest.mark.filterwarnings("ignore:set sequence parallel to false:UserWarning")  # verl's, for Megatron on one GPU
@pytest.mark.parametrize("sections", CONFIGURATIONS.values(), ids=CONFIGURATIONS)
def test_every_key_is_one_of_verls(sections: dict[str, Any], tmp_path: Path) -> None:
    """The configuration is composed with verl's defaults and accepted by verl's checks."""
    data = {"policy": {"model": "m", **sections.get("policy", {})}}
    trainer = {"trainer": {"name": "verl", **sections.get("trainer", {})}}
    config = load_config({**sections, **data, **trainer})
    derived = translate(config, model="m", max_context=1024, folder=tmp_path, working_dir=tmp_path)
    found = compose_config(derived, defaults(config, max_context=1024), config.trainer.verl)
    wanted = config.algorithm.kl is not None
    assert (why_unconstrained(found) is None) == ("model_engine" not in config.trainer.verl), "only FSDP constrains"
    found.actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu = None
    OmegaConf.resolve(found)
    validate_config(config=found, use_reference_policy=wanted, use_critic=False)
    assert found.actor_rollout_ref.rollout.n == config.rollouts.group_size
    assert found.data.train_batch_size == config.rollouts.tasks_per_step


@pytest.mark.parametrize(
    ("sections", "max_context", "checkpointing", "tokens"),
    [
        ({}, 1024, True, 16_384),
        ({}, 32_768, True, 32_768),
        ({"trainer": {"verl": {f"{_ACTOR}.ppo_max_token_len_per_gpu": 40_000}}}, 32_768, True, 40_000),
        ({"policy": {"gradient_checkpointing": False}, "trainer": {"micro_batch_tokens": 9000}}, 1024, False, 9000),
        ({"trainer": {"micro_batch_tokens": 99}}, 1024, True, 1024),
    ],
)
def test_settings_of_small_machines_that_are_null_leave_verls_defaults(
    sections: dict[str, Any], max_context: int, checkpointing: bool, tokens: int, tmp_path: Path
) -> None:
    """A limit below the longest row would stop the run in verl's first long micro-batch."""
    policy, trainer = ({**start, **sections.get(key, {})} for key, start in _REQUIRED.items())
    config = load_config({"policy": policy, "trainer": trainer})
    derived = translate(config, model="m", max_context=max_context, folder=tmp_path, working_dir=tmp_path)
    found = compose_config(derived, defaults(config, max_context=max_context), config.trainer.verl).actor_rollout_ref
    assert found.model.enable_gradient_checkpointing is checkpointing
    limits = (
        found.actor.ppo_max_token_len_per_gpu,
        found.rollout.log_prob_max_token_len_per_gpu,
        found.ref.log_prob_max_token_len_per_gpu,
    )
    assert limits == (tokens,) * 3


def test_keys_that_verl_does_not_have_and_keys_of_ours_are_refused(tmp_path: Path) -> None:
    config = load_config({"policy": {"model": "m"}, "trainer": {"name": "verl"}})
    derived = translate(config, model="m", max_context=1024, folder=tmp_path, working_dir=tmp_path)
    with pytest.raises(ConfigError, match=r"no key 'trainer\.devcie'; did you mean 'trainer\.device'"):
        compose_config(derived, {}, {"trainer": {"devcie": "cuda"}})
    with pytest.raises(ConfigError, match=r"'actor_rollout_ref\.actor\.optim\.lr' is determined by other keys"):
        compose_config(derived, {}, {"actor_rollout_ref": {"actor": {"optim.lr": 1e-6}}})
    added = compose_config(derived, {}, {"trainer": {"+of_mine": 3}})
    assert added.trainer.of_mine == 3


def group() -> PromptGroup:
    return PromptGroup(uid="uid-1", columns={"raw_prompt": [], "reward_model": {}, "data_source": "t"}, step=1)


_SHARED = "actor_rollout_ref"


@pytest.mark.parametrize(
    ("own", "why"),
    [
        ({f"{_SHARED}.rollout.name": "sglang"}, "use 'vllm'"),
        ({f"{_SHARED}.rollout.engine_kwargs.vllm.structured_outputs_config.backend": "xgrammar"}, "'guidance'"),
        ({f"{_SHARED}.rollout.engine_kwargs.vllm.reasoning_parser": "qwen3"}, "no reasoning parser"),
        ({f"{_SHARED}.model.external_lib": "theirs"}, "external_lib"),
        ({f"{_SHARED}.model.use_fused_kernels": True}, "fused kernels"),
        ({f"{_SHARED}.actor.fsdp_config.ulysses_sequence_parallel_size": 2}, "split over GPUs"),
        ({f"{_SHARED}.ref.strategy": "veomni"}, "FSDP"),
    ],
)
def test_constraints_are_refused_where_the_trainer_cannot_apply_them(
    own: dict[str, Any], why: str, tmp_path: Path
) -> None:
    config = load_config({"policy": {"model": "m"}, "trainer": {"name": "verl", "verl": own}})
    derived = translate(config, model="m", max_context=1024, folder=tmp_path, working_dir=tmp_path)
    assert why in (
        why_unconstrained(compose_config(derived, defaults(config, max_context=1024), config.trainer.verl)) or ""
    )


def calls(source: str) -> Iterator[ast.Call]:
    return (node for node in ast.walk(ast.parse(textwrap.dedent(source))) if isinstance(node, ast.Call))


def name_of(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def string_lists(source: str) -> Iterator[list[str]]:
    """The lists of field names in ``source``: ``fields = [...]`` and ``select_fields=[...]``."""
    for node in ast.walk(ast.parse(textwrap.dedent(source))):
        named: ast.expr | None = None
        if (isinstance(node, ast.keyword) and node.arg == "select_fields") or (
            isinstance(node, ast.Assign) and name_of(node.targets[0]) == "fields"
        ):
            named = node.value
        if isinstance(named, ast.List):
            yield [item.value for item in named.elts if isinstance(item, ast.Constant)]
