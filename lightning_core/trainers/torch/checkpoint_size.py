"""The size of a checkpoint before one is written."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_core.trainers import Learner
from lightning_core.trainers.torch.multi_policy import MultiPolicyTrainer
from lightning_core.trainers.torch.trainer import TorchTrainer


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSize:
    """Bytes of the parts of a checkpoint. Before the first step there is no optimizer's state."""

    trained: int
    frozen: int
    """Written once and linked afterwards. At most: weights that bfloat16 represents exactly take half."""
    optimizer: int
    """Only the two newest checkpoints have it."""


def checkpoint_size(trainer: Learner) -> CheckpointSize:
    """The size of the checkpoints of an embedded trainer."""
    if isinstance(trainer, MultiPolicyTrainer):
        parts = [checkpoint_size(own) for own in trainer.policies.values()]
        return CheckpointSize(
            trained=sum(part.trained for part in parts),
            frozen=sum(part.frozen for part in parts),
            optimizer=sum(part.optimizer for part in parts),
        )
    assert isinstance(trainer, TorchTrainer), "only embedded trainers write such checkpoints"
    state = trainer.state()
    trained = sum(tensor.nbytes for tensor in state.weights.values())
    frozen = 0
    if trainer.model.settings.lora is None:
        frozen = sum(p.nbytes for name, p in trainer.model.network.named_parameters() if name not in state.weights)
    learned = (state.moments, *state.also.values())
    optimizer = sum(tensor.nbytes for tensors in learned for tensor in tensors.values())
    return CheckpointSize(trained=trained, frozen=frozen, optimizer=optimizer)
