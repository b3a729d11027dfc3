"""The configuration's sections ``trainer`` and ``ray``."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from lightning_core.config.types import Beta, Count, CountOrZero, NotNegative, Positive, Section


class TrainerSection(Section):
    """The trainer, which updates the weights."""

    name: Literal["torch", "verl"] = "torch"
    """`torch`: the embedded trainer, for a CPU or one GPU. `verl`: verl's trainer on a Ray cluster. See
    docs/trainers.md."""
    steps: Count = 50
    """Number of training steps. Each samples tasks_per_step · group_size rollouts."""
    learning_rate: Positive = 1e-5
    """Learning rate of AdamW after warm-up."""
    warmup_steps: CountOrZero = 0
    """Number of steps over which the learning rate rises linearly."""
    weight_decay: NotNegative = 0.0
    """Weight decay of AdamW."""
    betas: Annotated[tuple[Beta, Beta], Field(strict=False)] = (0.9, 0.999)
    """Betas of AdamW."""
    grad_clip: Positive = 1.0
    """Maximum norm of the gradient; larger gradients are scaled down."""
    micro_batch_tokens: Count = 4096
    """Maximum number of tokens per forward and backward pass. It affects memory, not the result."""
    max_batch: Count = 64
    """Maximum number of responses sampled at the same time."""
    gather_ms: NotNegative = 5.0
    """Time in milliseconds that the sampler waits for more requests to join a batch."""
    threads: Count | None = None
    """CPU threads of torch; null: torch's default."""
    checkpoint_every: CountOrZero = 10
    """Write a checkpoint every `checkpoint_every` steps and after the last; 0: only after the last."""
    keep_checkpoints: Count = 2
    """Number of newest checkpoints to keep."""
    mode: Literal["sync", "colocate_async", "separate_async"] = "sync"
    """With `verl`. `sync`: rollouts and updates alternate on the same GPUs. `colocate_async`: as `sync`, but unfinished
    rollouts continue after the update. `separate_async`: rollouts and updates run at the same time on different
    GPUs."""
    nodes: Count = 1
    """With `verl`: number of machines that train. Except with `separate_async` they also sample."""
    gpus_per_node: Count = 1
    """With `verl`: GPUs per training machine."""
    rollout_nodes: CountOrZero = 0
    """With `verl` and `separate_async`: number of machines that only sample."""
    rollout_gpus_per_node: Count = 1
    """With `verl` and `separate_async`: GPUs per sampling machine."""
    rollout_workers: Count | None = None
    """With `verl`: number of processes that run agents, spread over the cluster; null: four per node."""
    rows_per_rollout: Count | None = None
    """With `verl`: average number of training rows per rollout that one update holds. A step with more rows makes
    several updates, and the last is padded with empty rows. null: the number of agents in `agents.train`, or 1."""
    verl: dict[str, Any] = {}
    """With `verl`: verl's own settings, by its own keys, nested or dotted. The prefix `+` adds a key that verl does not
    have."""


class Ray(Section):
    """The Ray cluster for `trainer.name: verl`."""

    address: str | None = None
    """Address of a running cluster: `auto`, or the head's `host:port`; null: a cluster is started on this machine for
    the run."""
