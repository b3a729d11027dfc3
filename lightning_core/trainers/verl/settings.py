"""Translates the configuration to verl's keys. Pure; docs/trainers.md has the table.

`translate` returns the keys that the configuration determines; they are refused under ``trainer.verl``. All other keys keep verl's
defaults, except those that `defaults` replaces.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_core.config import Config
from lightning_core.config.build_rules import loss_rule
from lightning_core.config.policies import Lora
from lightning_core.config.rule_names import importable
from lightning_core.config.signal_sections import stream_kinds
from lightning_core.config.types import is_callable_name
from lightning_core.credit import LOSSES
from lightning_core.records.run_folder.checkpoints import checkpoint_step
from lightning_core.trainers.learning_rate import learning_rate
from lightning_core.trainers.verl.constrained_rows import ENGINE
from lightning_core.trainers.verl.estimator import ESTIMATOR, SETTINGS
from lightning_core.trainers.verl.policy_loss import OWN_LOSS, loss_mode
from lightning_core.trainers.verl.rows import SIGNAL
from lightning_core.trainers.verl.supports import rows_per_rollout

MANAGER = "lightning_core.trainers.verl.manager.LightningManager"
OPTIMIZER = "lightning_core.trainers.verl.optimizer"
_NO_CLIP = 1e9
_TOKENS = 16_384
"""verl's default of `ppo_max_token_len_per_gpu`, which its other limits of tokens refer to."""
_MODEL, _ACTOR, _ROLLOUT = "actor_rollout_ref.model", "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Where verl's trainer starts."""

    checkpoint: Path | None = None
    """None: from the initial weights."""
    evaluate: bool = True
    """Whether the weights are evaluated first, if there are held-out tasks."""

    @property
    def step(self) -> int:
        """Number of updates before it."""
        return 0 if self.checkpoint is None else checkpoint_step(self.checkpoint)


def translate(
    c: Config,
    *,
    model: str,
    max_context: int,
    weights: int,
    folder: Path,
    working_dir: Path,
    start: Start | None = None,
) -> dict[str, Any]:
    """The settings that ``c`` determines, by verl's dotted keys.

    A key that verl does not have begins with ``+``.

    ``model``: folder or name on the Hub; ``max_context``: maximum tokens of prompt and response; ``weights``: the model's number of
    weights; ``folder``: the run's.
    ``start``: of the training; None: of a new run.
    """
    return {
        **_data(c, folder, max_context),
        **_model(c, model),
        **_sampling(c, max_context),
        **_updates(c, max_context, learning_rate(c.trainer.learning_rate, weights, c.policy.tuning)),
        **_algorithm(c),
        **_run(c, folder, start or Start()),
        f"+{_ROLLOUT}.agent.agent_loop_manager_class": MANAGER,
        f"+{_ROLLOUT}.custom": {"lightning": {"folder": str(folder), "working_dir": str(working_dir)}},
    }


def defaults(c: Config, *, max_context: int) -> dict[str, Any]:
    """Replacements for verl's defaults. ``trainer.verl`` takes precedence over them.

    ``max_context``: maximum tokens of prompt and response.
    """
    chosen: dict[str, Any] = {
        f"{_ROLLOUT}.name": "vllm",
        f"{_ROLLOUT}.tensor_model_parallel_size": 1,
        f"{_ROLLOUT}.engine_kwargs.vllm.structured_outputs_config": {"backend": "guidance"},
        f"{_MODEL}.external_lib": ENGINE,
        "data.dataloader_num_workers": 0,  # tasks are in memory
        "reward.num_workers": 1,  # rewards come from the agents
        "trainer.logger": ["console", "file"],
        "trainer.project_name": "lightning",
    }
    if _engine(c) == "dp":
        chosen |= {f"{_ACTOR}.strategy": "fsdp2", "actor_rollout_ref.ref.strategy": "fsdp2"}
        if c.trainer.weight_decay:  # others have their own optimizers
            chosen |= {f"{_ACTOR}.optim.optimizer_impl": OPTIMIZER, f"{_ACTOR}.optim.optimizer": "AdamW"}
    if c.trainer.micro_batch_tokens is None and max_context > _TOKENS:
        chosen[f"{_ACTOR}.ppo_max_token_len_per_gpu"] = max_context  # a row is never cut
    if c.trainer.mode == "separate_async":
        chosen[f"{_ROLLOUT}.checkpoint_engine.backend"] = "nccl"
        chosen["trainer.v1.separate_async.parameter_sync_step"] = 1
    return chosen


def rows_per_update(c: Config) -> int:
    """The number of rows in one update. A step with more rows makes more than ``mini_batches`` updates."""
    rows = c.rollouts.tasks_per_step * c.rollouts.group_size * rows_per_rollout(c)
    return rows // c.algorithm.mini_batches


def _data(c: Config, folder: Path, max_context: int) -> dict[str, Any]:
    has_eval = (folder / "tasks_eval.jsonl").is_file()
    return {
        "data.train_files": str(folder / "tasks_train.jsonl"),
        "data.val_files": str(folder / ("tasks_eval.jsonl" if has_eval else "tasks_train.jsonl")),
        "data.custom_cls.path": "pkg://lightning_core.trainers.verl.dataset",
        "data.custom_cls.name": "TaskDataset",
        "data.train_batch_size": c.rollouts.tasks_per_step,
        "data.shuffle": False,  # the file has the order
        "data.validation_shuffle": False,
        "data.max_prompt_length": max_context - c.rollouts.max_tokens,
        "data.max_response_length": c.rollouts.max_tokens,
    }


def _model(c: Config, model: str) -> dict[str, Any]:
    found: dict[str, Any] = {f"{_MODEL}.path": model}
    if c.policy.gradient_checkpointing is not None:
        found[f"{_MODEL}.enable_gradient_checkpointing"] = c.policy.gradient_checkpointing
    if c.policy.tuning == "lora":
        lora = c.policy.lora or Lora()
        found |= {
            f"{_MODEL}.lora_rank": lora.rank,
            f"{_MODEL}.lora_alpha": lora.alpha,
            f"{_MODEL}.target_modules": "all-linear" if lora.target_modules is None else list(lora.target_modules),
            f"{_ROLLOUT}.load_format": "safetensors",  # only adapters are pushed, not the base
        }
    if c.policy.dtype != "auto":
        short = {"float32": "fp32", "bfloat16": "bf16"}[c.policy.dtype]
        precision = {"param_dtype": short, "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
        found |= {
            f"{_ROLLOUT}.dtype": c.policy.dtype,
            f"+{_ACTOR}.fsdp_config.mixed_precision": precision,
            "+actor_rollout_ref.ref.fsdp_config.mixed_precision": precision,
        }
    return found


def _sampling(c: Config, max_context: int) -> dict[str, Any]:
    temperature = c.rollouts.temperature if c.eval.temperature is None else c.eval.temperature
    return {
        f"{_ROLLOUT}.n": c.rollouts.group_size,
        f"{_ROLLOUT}.temperature": c.rollouts.temperature,
        f"{_ROLLOUT}.top_p": 1.0,
        f"{_ROLLOUT}.top_k": -1,
        f"{_ROLLOUT}.max_model_len": max_context,
        f"{_ROLLOUT}.calculate_log_probs": True,
        f"{_ROLLOUT}.seed": c.run.seed,
        f"{_ROLLOUT}.val_kwargs.n": c.eval.samples,
        f"{_ROLLOUT}.val_kwargs.temperature": temperature,
        f"{_ROLLOUT}.val_kwargs.do_sample": temperature > 0,
        f"{_ROLLOUT}.agent.num_workers": c.trainer.rollout_workers or 4 * c.trainer.nodes,
        f"{_ROLLOUT}.nnodes": c.trainer.rollout_nodes,
        f"{_ROLLOUT}.n_gpus_per_node": (
            c.trainer.rollout_gpus_per_node if c.trainer.rollout_nodes else c.trainer.gpus_per_node
        ),
    }


def _updates(c: Config, max_context: int, rate: float) -> dict[str, Any]:
    t = c.trainer
    found: dict[str, Any] = {}
    if t.micro_batch_tokens is not None:
        tokens = max(t.micro_batch_tokens, max_context)  # a row is never cut
        found = {
            f"{_ACTOR}.ppo_max_token_len_per_gpu": tokens,
            f"{_ROLLOUT}.log_prob_max_token_len_per_gpu": tokens,
            "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu": tokens,
        }
    return found | {
        f"{_ACTOR}.ppo_mini_batch_size": rows_per_update(c) // c.rollouts.group_size,
        f"{_ACTOR}.ppo_epochs": c.algorithm.updates_per_step,
        f"{_ACTOR}.use_dynamic_bsz": True,
        f"{_ROLLOUT}.log_prob_use_dynamic_bsz": True,
        "actor_rollout_ref.ref.log_prob_use_dynamic_bsz": True,
        f"{_ACTOR}.data_loader_seed": c.run.seed,
        f"{_ACTOR}.optim.lr": rate,
        f"{_ACTOR}.optim.lr_warmup_steps": t.warmup_steps,
        **_schedule(c, rate),
        f"{_ACTOR}.optim.weight_decay": t.weight_decay,
        f"{_ACTOR}.optim.betas": list(t.betas),
        f"{_ACTOR}.optim.clip_grad": t.grad_clip,
        **({f"{_ACTOR}.grad_clip": t.grad_clip} if _engine(c) == "dp" else {}),
    }


def _schedule(c: Config, rate: float) -> dict[str, Any]:
    """The schedule of the learning rate, by the keys of the training engine."""
    t = c.trainer
    minimum = t.min_learning_rate_ratio * rate
    kind, least, value = {
        "megatron": ("lr_decay_style", "min_lr", minimum),
        "veomni": ("lr_scheduler_type", "lr_min", minimum),
    }.get(_engine(c), ("lr_scheduler_type", "min_lr_ratio", t.min_learning_rate_ratio))
    found = {f"{_ACTOR}.optim.{kind}": t.schedule}
    return found if t.schedule == "constant" else {**found, f"{_ACTOR}.optim.{least}": value}


def _engine(c: Config) -> str:
    """verl's training engine; ``dp`` is FSDP."""
    return str(c.trainer.verl.get("model_engine", "dp"))


def _algorithm(c: Config) -> dict[str, Any]:
    a, trains_unsampled = c.algorithm, "cross_entropy" in stream_kinds(c.algorithm)
    loss = importable(LOSSES, a.loss, "algorithm.loss")
    found: dict[str, Any] = {
        "algorithm.adv_estimator": ESTIMATOR,
        "algorithm.use_kl_in_reward": False,  # it would change the advantages, which stand where rewards do
        f"+algorithm.{SETTINGS}": {
            "aggregation": a.aggregation, "sequence": a.sequence, "constant_tokens": a.constant_tokens,
            "mini_batches": a.mini_batches, "cross_entropy": trains_unsampled,
        },
        "algorithm.filter_groups.enable": c.rollouts.refill > 0,
        "algorithm.filter_groups.metric": SIGNAL,
        f"{_ACTOR}.policy_loss.loss_mode": loss_mode(loss, a.sequence, ce=trains_unsampled),
        f"{_ACTOR}.clip_ratio_low": a.clip_low,
        f"{_ACTOR}.clip_ratio_high": a.clip_high,
        f"{_ACTOR}.clip_ratio_c": a.clip_dual if "clip_dual" in loss_rule(a).parameters else _NO_CLIP,
        f"{_ACTOR}.loss_agg_mode": "token-mean",  # of KL and entropy; the policy's loss is a weighted sum
        f"{_ACTOR}.entropy_coeff": a.entropy_weight,
        f"{_ACTOR}.use_kl_loss": a.kl is not None,
        # Without correction the ratio is taken to the sampling logprobs, which verl calls bypassing its own.
        "algorithm.rollout_correction.bypass_mode": a.importance is None,
        "algorithm.rollout_correction.rollout_is": None,
    }  # fmt: skip
    if is_callable_name(loss):
        found[f"+ray_kwargs.ray_init.runtime_env.env_vars.{OWN_LOSS}"] = loss
    if a.kl is not None:
        found |= {
            f"{_ACTOR}.kl_loss_coef": a.kl.weight,
            f"{_ACTOR}.kl_loss_type": {"k1": "k1+", "k3": "low_var_kl"}[a.kl.estimator],
        }
    if trains_unsampled:
        # Rejection takes sampled tokens out of the response mask; the loss would read them as tokens of the cross-entropy.
        found["algorithm.rollout_correction.rollout_rs"] = None
    if (i := a.importance) is not None:
        found |= {
            "algorithm.rollout_correction.rollout_is": {"token": "token", "row": "sequence"}[i.level],
            "algorithm.rollout_correction.rollout_is_threshold": i.high if i.kind == "tis" else f"{i.low}_{i.high}",
        }
    return found


def _run(c: Config, folder: Path, start: Start) -> dict[str, Any]:
    t, has_eval = c.trainer, (folder / "tasks_eval.jsonl").is_file()
    return {
        "trainer.nnodes": t.nodes,
        "trainer.n_gpus_per_node": t.gpus_per_node,
        "trainer.v1.trainer_mode": t.mode,
        "trainer.total_training_steps": t.steps,
        "trainer.total_epochs": 1,
        "trainer.save_freq": t.checkpoint_every or t.steps,
        "trainer.max_actor_ckpt_to_keep": t.keep_checkpoints,
        f"{_ACTOR}.checkpoint.save_contents": ["model", "optimizer", "extra", "hf_model"],
        f"{_ACTOR}.checkpoint.load_contents": ["model", "optimizer", "extra"],
        "trainer.default_local_dir": str(folder / "checkpoints"),
        "trainer.resume_mode": "disable" if start.checkpoint is None else "resume_path",
        "trainer.resume_from_path": None if start.checkpoint is None else str(start.checkpoint.absolute()),
        "trainer.val_before_train": has_eval and start.evaluate,
        "trainer.test_freq": (c.eval.every or t.steps) if has_eval else -1,
        "trainer.experiment_name": folder.name,
        "+ray_kwargs.ray_init.runtime_env.env_vars.VERL_FILE_LOGGER_PATH": str(folder / "verl.jsonl"),
        # By default, Ray would join any cluster that runs on this machine.
        "+ray_kwargs.ray_init.address": c.ray.address or "local",
    }


def flatten(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Nested mappings as dotted keys. A ``+`` at any level goes to the front."""
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping) and value and not key.startswith("+"):
            for rest, leaf in flatten(value).items():
                added = "+" if rest.startswith("+") else ""
                flat[f"{added}{key}.{rest.removeprefix('+')}"] = leaf
        else:
            flat[key] = value
    return flat
