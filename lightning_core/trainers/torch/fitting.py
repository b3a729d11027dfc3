"""Makes the passes of long rows, and the sampler after them, fit the memory."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

from lightning_core.model.recompute import recomputing
from lightning_core.trainers.torch.machine import release_freed_memory
from lightning_core.trainers.torch.packing import PackedBatch
from lightning_core.trainers.torch.policy_model import PolicyModel
from lightning_core.transitions import Row


def fitting(model: PolicyModel, batch: PackedBatch) -> AbstractContextManager[None]:
    """For the forward pass of ``batch``: its layers are recomputed in the backward pass if it does not fit the memory otherwise.

    Releases freed memory first if little is free.
    """
    padded = len(batch.places) * max(len(places) for places in batch.places)
    tokens = padded if model.path.geometry is None else len(batch.token_ids_S)
    release_freed_memory(model.device, needed=_pass_bytes(model, tokens))
    return recomputing(model.network) if tokens > model.memory.most_tokens else nullcontext()


def fits(model: PolicyModel, rows: Sequence[Row], also: int) -> bool:
    """Whether the largest pass over ``rows`` and ``also`` bytes fit the free memory. Releases freed memory first if little is free."""
    lengths = [len(row.token_ids) for row in rows]
    tokens = min(sum(lengths), max([*lengths, model.memory.micro_batch_tokens]))
    return release_freed_memory(model.device, needed=_pass_bytes(model, tokens) + also)


def release_for_sampler(model: PolicyModel) -> None:
    """Release freed memory if less is free than the engine may hold."""
    release_freed_memory(model.device, needed=model.sampler_bytes)


def _pass_bytes(model: PolicyModel, tokens: int) -> int:
    """Bytes that a training pass of ``tokens`` tokens may need: what it keeps, and as much again for temporary tensors."""
    return 2 * min(tokens, model.memory.most_tokens) * model.memory.trained_token_bytes
