"""The sections `trainer` and `ray`: what updates the weights, and where."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from lightning_core.config.types import Beta, Count, CountOrZero, NotNegative, Positive, Section


class Trainer(Section):
    """The engine that updates the weights."""

    name: Literal["torch", "verl"] = "torch"
    """`torch`: embedded, one machine, CPU or one GPU. `verl`: verl's trainer on a Ray cluster, one GPU or many; docs/trainers.md."""
    steps: Count = 50
    """Training steps; each samples tasks_per_step x group_size rollouts."""
    learning_rate: Positive = 1e-5
    """AdamW's learning rate after warm-up."""
    warmup_steps: CountOrZero = 0
    """The learning rate rises linearly over so many steps."""
    weight_decay: NotNegative = 0.0
    """AdamW's weight decay."""
    betas: Annotated[tuple[Beta, Beta], Field(strict=False)] = (0.9, 0.999)
    """AdamW's betas."""
    grad_clip: Positive = 1.0
    """The gradient's norm is clipped to this."""
    micro_batch_tokens: Count = 4096
    """Most tokens in one forward and backward pass; memory, not the result, depends on it."""
    max_batch: Count = 64
    """Most responses sampled at the same time."""
    gather_ms: NotNegative = 5.0
    """How long sampling waits for more requests to join a batch, in milliseconds."""
    threads: Count | None = None
    """CPU threads for torch; null: torch's own choice."""
    checkpoint_every: CountOrZero = 10
    """Write a checkpoint after every so many steps, and after the last; 0: only after the last."""
    keep_checkpoints: Count = 2
    """How many of the newest checkpoints are kept."""
    mode: Literal["sync", "colocate_async", "separate_async"] = "sync"
    """With `verl`: `sync`: rollouts and updates take turns on the same GPUs. `colocate_async`: the same, and rollouts that are under
    way go on after the update. `separate_async`: on different GPUs, at the same time."""
    nodes: Count = 1
    """With `verl`: machines that train (and, but for `separate_async`, sample)."""
    gpus_per_node: Count = 1
    """With `verl`: GPUs of each of them."""
    rollout_nodes: CountOrZero = 0
    """With `verl` and `separate_async`: machines that only sample."""
    rollout_gpus_per_node: Count = 1
    """With `verl` and `separate_async`: GPUs of each of them."""
    rollout_workers: Count | None = None
    """With `verl`: processes that run agents, spread over the cluster; null: four for each node."""
    rows_per_rollout: Count | None = None
    """With `verl`: as many training rows of each rollout, on average, fit into one update; a step that has more of them makes several
    updates, and what is left over is filled with empty rows. null: as many as `agents.train` names, or 1."""
    verl: dict[str, Any] = {}
    """With `verl`: settings of verl's own, by its own keys, nested or dotted. A key that verl does not have is added if it begins
    with `+`."""


class Ray(Section):
    """The Ray cluster, with `trainer.name: verl`."""

    address: str | None = None
    """A running cluster to join: `auto`, or its head's `host:port`; null: one is started on this machine, and stopped after the run."""
