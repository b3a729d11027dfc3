"""The configuration's sections ``trainer`` and ``ray``."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from annotated_types import Ge, Le
from pydantic import Field

from lightning_core.config.types import Beta, Count, CountOrZero, NotNegative, Positive, PositiveOrAuto, Section


class TrainerSection(Section):
    """The trainer, which updates the weights."""

    name: Literal["torch", "verl"] = "torch"
    """`torch`: the embedded trainer, for a CPU or one GPU. `verl`: verl's trainer on a Ray cluster. See
    docs/trainers.md."""
    steps: Count = 50
    """Number of training steps. Each samples tasks_per_step · group_size rollouts."""
    token_budget: Count | None = None
    """End the run after the step in which its rollouts and forks have sampled this many tokens in all, evaluations not
    counted. null: no limit. For comparing credit rules at equal cost."""
    minutes: Positive | None = None
    """End the run after the step in which its steps have taken this long in all, evaluations not counted, also before it was
    resumed. null: no limit."""
    learning_rate: PositiveOrAuto = "auto"
    """Learning rate of AdamW after warm-up. `auto`: 2e-5 for models of up to 135 million weights, for larger ones
    inversely proportional to their number, but at least 1e-6; 1e-4 with `tuning: lora`. The start of a run prints it."""
    warmup_steps: CountOrZero = 0
    """Number of steps over which the learning rate rises linearly."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """The learning rate after warm-up. `linear`, `cosine`: it falls to `min_learning_rate_ratio` until step `steps`."""
    min_learning_rate_ratio: Annotated[float, Ge(0), Le(1)] = 0.0
    """With `linear` and `cosine`: the lowest learning rate, as a fraction of `learning_rate`."""
    weight_decay: NotNegative = 0.0
    """Weight decay of AdamW, for matrices only: norms, biases and other vectors are not decayed."""
    betas: Annotated[tuple[Beta, Beta], Field(strict=False)] = (0.9, 0.999)
    """Betas of AdamW."""
    grad_clip: Positive = 1.0
    """Maximum norm of the gradient; larger gradients are scaled down."""
    max_logprob_difference: Positive | None = 0.3
    """Mean difference in nats between the logprobs of sampler and trainer on the same weights that stops the run: larger
    ones are not rounding. null: no limit."""
    micro_batch_tokens: Count | None = None
    """Maximum number of tokens per forward and backward pass. Gradients accumulate over them, so it affects memory, not
    the result. null: as many as a part of the free memory holds, at most 4096; with `verl`, verl's own default of 16384, or
    `policy.max_context` if that is larger."""
    cache_gb: Positive | None = None
    """Memory in GiB for the prefix cache of the sampler in this process, which keeps the keys and values of past prompts
    and responses. null: a quarter of the free memory."""
    measure_change: CountOrZero = 4
    """Number of rollouts per step whose sampled tokens are scored once more after the update, to see in the viewer how it
    changed them. Each costs about as much as a forward pass of the update over its tokens."""
    max_batch: Count = 64
    """Maximum number of responses sampled at the same time."""
    gather_ms: NotNegative = 5.0
    """Time in milliseconds that the sampler waits for more requests to join a batch."""
    deterministic: bool = False
    """Sample responses whose bits do not depend on the requests that are sampled at the same time, so a run with the same
    seed has the same weights on the same machine, also after a crash and with another `rollouts.concurrency`. The embedded
    sampler only. See docs/reproducibility.md for limits and costs."""
    threads: Count | None = None
    """CPU threads of torch; null: torch's default."""
    checkpoint_every: CountOrZero = 10
    """Write a checkpoint every `checkpoint_every` steps and after the last; 0: only after the last."""
    keep_checkpoints: Count = 2
    """Number of newest checkpoints to keep. Only the two newest have the optimizer's state, from which a run resumes."""
    keep_best: bool = False
    """Also keep the checkpoint with the best held-out reward, linked as `checkpoints/best`. It is written at each
    evaluation with a new best. Requires `eval.every`."""
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
    """With `verl`: average number of training rows per rollout that the updates of a step hold. A step with more rows
    makes more updates, and the last is padded with empty rows. null: the number of agents in `agents.train`, or 1."""
    verl: dict[str, Any] = {}
    """With `verl`: verl's own settings, by its own keys, nested or dotted. The prefix `+` adds a key that verl does not
    have."""


class Ray(Section):
    """The Ray cluster for `trainer.name: verl`."""

    address: str | None = None
    """Address of a running cluster: `auto`, or the head's `host:port`; null: a cluster is started on this machine for
    the run."""
