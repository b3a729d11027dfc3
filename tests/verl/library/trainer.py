"""verl's trainer without Ray and vLLM: its driver's own methods, with one actor in each process."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hydra
import pytest
import torch
import torch.distributed as dist
import verl.trainer.ppo.padding_utils as padding_utils
import verl.trainer.ppo.v1.trainer_base as trainer_base
from omegaconf import DictConfig, OmegaConf
from tensordict import NonTensorStack, TensorDict
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.utils import need_reference_policy
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.utils import tensordict_utils as tu
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.config import TrainingWorkerConfig
from verl.workers.engine_workers import TrainingWorker
from verl.workers.utils.losses import ppo_loss

from lightning_core import Row
from lightning_core.config.algorithm import Algorithm
from lightning_core.trainers.verl.constrained_rows import ENGINE
from lightning_core.trainers.verl.constrained_rows import FIELD as CONSTRAINTS
from lightning_core.trainers.verl.estimator import ESTIMATOR, SETTINGS
from lightning_core.trainers.verl.policy_loss import loss_mode
from lightning_core.trainers.verl.rows import PromptGroup, train_rows
from tests.verl.library.step import TEMPERATURE, Weights

PARTITION = "train"
FIELDS = (
    "uid", "prompts", "responses", "input_ids", "position_ids", "response_mask", "loss_mask", "rollout_log_probs", "rm_scores",
    CONSTRAINTS,
)  # fmt: skip
"""Those of a row that the update reads."""
EOS = 2  # padding rows consist of any token


@contextlib.contextmanager
def join(*, rank: int, ranks: int, meeting: Path) -> Iterator[None]:
    """Set up one of ``ranks`` processes for verl. ``meeting``: path of a new file through which they find each other."""
    variables = {
        "RANK": rank,
        "WORLD_SIZE": ranks,
        "LOCAL_RANK": rank,
        "LOCAL_WORLD_SIZE": ranks,
        "DIST_INIT_METHOD": meeting.as_uri(),
        # Read, but not used with a file.
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": 0,
        "GLOO_SOCKET_IFNAME": "lo",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, str(value))
        try:
            yield
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()


class Table:
    """Stand-in for TransferQueue in verl's driver: the fields of each row, by key."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._fields: dict[str, dict[str, Any]] = {}
        for number, row in enumerate(rows):
            group = PromptGroup(uid=row.rollout, columns={}, step=1)
            (made,) = train_rows(group, 0, [row], reward=0.0, signal=True)
            self._fields[f"{row.rollout}_0_{number}"] = {name: made.fields[name] for name in FIELDS}

    def batch(self) -> KVBatchMeta:
        """All rows."""
        tags = [{"seq_len": len(fields["input_ids"])} for fields in self._fields.values()]
        return KVBatchMeta(keys=list(self._fields), tags=tags, partition_id=PARTITION)

    def kv_batch_get(
        self, keys: Sequence[str], partition_id: str, select_fields: Sequence[str] | None = None
    ) -> TensorDict:
        del partition_id
        names = set.intersection(*(set(self._fields[key]) for key in keys))
        columns = {name: [self._fields[key][name] for key in keys] for name in names}
        return TensorDict(
            {
                name: torch.nested.as_nested_tensor(values, layout=torch.jagged)
                if isinstance(values[0], Tensor)
                else NonTensorStack(*values)
                for name, values in columns.items()
                if select_fields is None or name in select_fields
            },
            batch_size=len(keys),
        )

    def kv_batch_put(
        self, keys: Sequence[str], partition_id: str, fields: TensorDict, tags: Sequence[Any] = ()
    ) -> KVBatchMeta:
        del tags
        for name in fields.keys():  # noqa: SIM118  a TensorDict goes by its rows
            self.put(keys, name, list(fields[name]))
        return KVBatchMeta(keys=list(keys), tags=[{} for _ in keys], partition_id=partition_id)

    def put(self, keys: Sequence[str], name: str, values: Sequence[Any]) -> None:
        """Set a field of rows."""
        for key, value in zip(keys, values, strict=True):
            self._fields.setdefault(key, {})[name] = value


class Actor:
    """This process's part of verl's actor and worker group: each rank has its share of a batch."""

    def __init__(self, config: DictConfig, weights: Mapping[str, Weights]) -> None:
        """``weights``: of the reference (``base``), of the actor (``now``), and after its first update (``later``)."""
        actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
        self._worker = TrainingWorker(
            TrainingWorkerConfig(
                model_type="language_model",
                model_config=omega_conf_to_dataclass(config.actor_rollout_ref.model),
                engine_config=actor.engine,
                optimizer_config=actor.optim,
                checkpoint_config=actor.checkpoint,
            )
        )
        self._worker.reset()
        self._engine = self._worker.engine
        self._weights = weights
        self._rank, self._ranks = dist.get_rank(), dist.get_world_size()
        # The driver looks up which rank's share of a batch each worker gets.
        self._dispatch_info = {"actor": list(range(self._ranks))}
        self.table: Table
        self.updates: list[Weights] = []
        """The gradients of each update, by parameter, where the optimizer would take them."""
        self._engine.optimizer_step = self._take

    def begin(self, config: DictConfig, table: Table) -> None:
        """Start a step on the rows of ``table``, with the loss and micro-batches of ``config``."""
        self.table = table
        actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
        self._worker.set_loss_fn(functools.partial(ppo_loss, config=actor))
        engine = self._worker.engine_config
        engine.use_dynamic_bsz = actor.use_dynamic_bsz
        engine.micro_batch_size_per_gpu = engine.infer_micro_batch_size_per_gpu = actor.ppo_micro_batch_size_per_gpu
        engine.max_token_len_per_gpu = engine.infer_max_token_len_per_gpu = actor.ppo_max_token_len_per_gpu
        self._load("now")

    def compute_log_prob(self, batch: KVBatchMeta) -> KVBatchMeta:
        output = self._worker.infer_batch(self._share(batch))
        columns = {name: output[name].unbind() for name in ("log_probs", "entropy") if name in output}
        shares: list[Any] = [None] * self._ranks
        dist.all_gather_object(shares, columns)
        for name in columns:
            self.table.put(batch.keys, name, [value for share in shares for value in share[name]])
        return batch

    def compute_ref_log_prob(self, batch: KVBatchMeta) -> KVBatchMeta:
        self._load("base")
        self.compute_log_prob(batch)
        self._load("now")
        return batch

    def update_actor(self, batch: KVBatchMeta) -> TensorDict:
        self._load("now")
        return self._worker.train_mini_batch(self._share(batch))

    def _share(self, batch: KVBatchMeta) -> TensorDict:
        share = batch.chunk(self._ranks)[self._rank]
        data = self.table.kv_batch_get(share.keys, PARTITION)
        tu.assign_non_tensor(data, **share.extra_info)
        return data

    def _take(self) -> float:
        self.updates.append({name: p.grad.full_tensor().clone() for name, p in self._engine.module.named_parameters()})
        self._load("later")
        return 0.0

    def _load(self, name: str) -> None:
        set_model_state_dict(
            self._engine.module, dict(self._weights[name]), options=StateDictOptions(full_state_dict=True)
        )


class VerlTrainer:
    """The steps of verl's driver from finished rollouts to the update, with stand-ins for TransferQueue and the worker group."""

    def __init__(self, folder: Path, weights: Mapping[str, Weights]) -> None:
        with hydra.initialize_config_module("verl.trainer.config", version_base=None):
            self._config = hydra.compose("ppo_trainer", _overrides(folder))
        OmegaConf.set_struct(self._config, False)
        self._actor = Actor(self._config, weights)
        self._driver = SimpleNamespace(
            actor_rollout_wg=self._actor,
            ref_policy_wg=self._actor,
            ref_in_actor=False,
            use_critic=False,
            distillation_config=None,
            tokenizer=SimpleNamespace(eos_token_id=EOS),
            global_steps=1,
        )
        self._driver._get_required_batch_multiple = functools.partial(
            PPOTrainer._get_required_batch_multiple, self._driver
        )

    def prepare(
        self, rows: Sequence[Row], algorithm: Algorithm, *, multiple: int = 1, micro: int = 1, budget: int | None = None
    ) -> KVBatchMeta:
        """Everything before the update: padding to a ``multiple``, order by rank, old logprobs, weighted advantages.

        Micro-batches have ``micro`` rows, or as many as fit into ``budget`` tokens.
        """
        trains_unsampled = any(row.streams.cross_entropy is not None for row in rows)
        settings = [
            *_settings(algorithm, trains_unsampled=trains_unsampled),
            f"actor_rollout_ref.actor.ppo_mini_batch_size={multiple}",
        ]
        settings.append(f"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu={micro}")
        if budget is not None:
            settings.append("actor_rollout_ref.actor.use_dynamic_bsz=true")
            settings.append(f"actor_rollout_ref.actor.ppo_max_token_len_per_gpu={budget}")
        config = self._driver.config = OmegaConf.merge(self._config, OmegaConf.from_dotlist(settings))
        self._actor.begin(config, Table(rows))
        batch = self._actor.table.batch()
        steps = [PPOTrainer._balance_batch, PPOTrainer._compute_old_log_prob]
        steps += [PPOTrainer._compute_ref_log_prob] if need_reference_policy(config) else []
        for step in [*steps, PPOTrainer._compute_advantage]:
            batch = self._call(step, batch)
        return batch

    def update(self, batch: KVBatchMeta, *, mini: int | None = None) -> list[Weights]:
        """The gradient of each update on ``batch``, in mini-batches of ``mini`` rows or in one."""
        self._driver.config.actor_rollout_ref.actor.ppo_mini_batch_size = mini or len(batch)
        self._actor.updates.clear()
        self._call(PPOTrainer._update_actor, batch)
        return list(self._actor.updates)

    def fields(self, batch: KVBatchMeta) -> TensorDict:
        """The fields of the rows of ``batch``."""
        return self._actor.table.kv_batch_get(batch.keys, PARTITION)

    def gradients(self, rows: Sequence[Row], algorithm: Algorithm, **batching: int) -> Weights:
        """The gradient of a step's last update, by parameter."""
        return self.update(self.prepare(rows, algorithm, **batching))[-1]

    def _call(self, step: Callable[..., KVBatchMeta], batch: KVBatchMeta) -> KVBatchMeta:
        with pytest.MonkeyPatch.context() as patch:
            for module in (trainer_base, padding_utils):
                patch.setattr(module, "tq", self._actor.table)
            return step(self._driver, batch, metrics={})


def _overrides(folder: Path) -> list[str]:
    actor = "actor_rollout_ref.actor"
    return [
        f"actor_rollout_ref.model.path={folder}",
        f"actor_rollout_ref.model.external_lib={ENGINE}",
        "actor_rollout_ref.model.use_remove_padding=false",
        "actor_rollout_ref.model.enable_gradient_checkpointing=false",
        "+actor_rollout_ref.model.override_config.attn_implementation=sdpa",
        f"{actor}.strategy=fsdp2",
        f"{actor}.use_torch_compile=false",
        f"{actor}.fsdp_config.use_torch_compile=false",
        f"+{actor}.fsdp_config.mixed_precision={{param_dtype: fp32, reduce_dtype: fp32, buffer_dtype: fp32}}",
        f"{actor}.ppo_micro_batch_size_per_gpu=1",
        "actor_rollout_ref.rollout.name=vllm",
        f"actor_rollout_ref.rollout.temperature={TEMPERATURE}",
        "actor_rollout_ref.rollout.calculate_log_probs=true",
        f"algorithm.adv_estimator={ESTIMATOR}",
    ]


def _settings(algorithm: Algorithm, *, trains_unsampled: bool) -> list[str]:
    """verl's settings for ``algorithm``. ``trains_unsampled``: whether there is a cross-entropy."""
    actor, correction = "actor_rollout_ref.actor", "algorithm.rollout_correction"
    found = {
        f"{actor}.policy_loss.loss_mode": loss_mode(algorithm.loss, algorithm.sequence, ce=trains_unsampled),
        f"{actor}.clip_ratio_low": algorithm.clip_low,
        f"{actor}.clip_ratio_high": algorithm.clip_high,
        f"{actor}.clip_ratio_c": algorithm.clip_dual,
        f"{actor}.entropy_coeff": algorithm.entropy_weight,
        f"{actor}.ppo_epochs": algorithm.updates_per_step,
        f"algorithm.{SETTINGS}.aggregation": algorithm.aggregation,
        f"algorithm.{SETTINGS}.sequence": algorithm.sequence or "null",
        f"algorithm.{SETTINGS}.constant_tokens": algorithm.constant_tokens or "null",
        f"algorithm.{SETTINGS}.mini_batches": 1,
        f"algorithm.{SETTINGS}.cross_entropy": trains_unsampled,
        "actor_rollout_ref.rollout.temperature": 1.0 if trains_unsampled else TEMPERATURE,
        # The ratio is to the sampling policy; the logprobs are not computed again.
        f"{correction}.bypass_mode": algorithm.importance is None,
    }
    if (importance := algorithm.importance) is not None:
        level = {"token": "token", "row": "sequence"}[importance.level]
        masked = importance.kind == "mask"
        found[f"{correction}.rollout_is"] = level
        found[f"{correction}.rollout_is_threshold"] = (
            f"'{importance.low}_{importance.high}'" if masked else importance.high
        )
    if (kl := algorithm.kl) is not None:
        found[f"{actor}.use_kl_loss"] = True
        found[f"{actor}.kl_loss_coef"] = kl.weight
        found[f"{actor}.kl_loss_type"] = {"k1": "k1+", "k3": "low_var_kl"}[kl.estimator]
    return [f"{name}={value}" for name, value in found.items()]
