"""Makes the passes of long rows, and the sampler after them, fit the memory."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

from lightning_core.model.recompute import recomputing
from lightning_core.trainers.torch.machine import free_memory, release_freed_memory
from lightning_core.trainers.torch.packing import PackedBatch, pass_tokens
from lightning_core.trainers.torch.policy_model import PolicyModel
from lightning_core.transitions import Row


def fitting(model: PolicyModel, batch: PackedBatch) -> AbstractContextManager[None]:
    """For the forward pass of ``batch``: its layers are recomputed in the backward pass if it does not fit the memory otherwise.

    Releases freed memory first if little is free.
    """
    tokens = pass_tokens(model.path, batch)
    release_freed_memory(model.device, needed=_pass_bytes(model, tokens))
    return recomputing(model.network) if tokens > model.memory.most_tokens else nullcontext()


def fits(model: PolicyModel, rows: Sequence[Row], also: int) -> bool:
    """Whether the largest pass over ``rows`` and ``also`` bytes fit the free memory of a CPU. A GPU has an allocator of its own, which
    keeps what is free, and is not examined. Releases freed memory first if little is free."""
    lengths = [len(row.token_ids) for row in rows]
    tokens = min(sum(lengths), max([*lengths, model.memory.micro_batch_tokens]))
    needed = _pass_bytes(model, tokens) + also
    release_freed_memory(model.device, needed=needed)
    return model.device.type != "cpu" or free_memory(model.device) >= needed


def release_for_sampler(model: PolicyModel) -> None:
    """Release freed memory if less is free than the engine may hold."""
    release_freed_memory(model.device, needed=model.sampler_bytes)


def _pass_bytes(model: PolicyModel, tokens: int) -> int:
    """Bytes that a training pass of ``tokens`` tokens may need: what it keeps, and as much again for temporary tensors."""
    return 2 * min(tokens, model.memory.most_tokens) * model.memory.trained_token_bytes
