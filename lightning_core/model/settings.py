"""Everything that determines a `TorchTrainer`, as plain data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from lightning_core.config.algorithm import Algorithm
from lightning_core.config.credit import Critic


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchTrainerConfig:
    """Everything that determines a `TorchTrainer`."""

    model: str
    """A Hugging Face folder, a Hub name, or ``smollm2-135m-instruct``."""
    tuning: Literal["full", "lora"] = "full"
    train_layers: int | None = None
    """With ``full``: only the top so many decoder layers and the final norm; embeddings and head are then frozen."""
    lora_rank: int = 16
    lora_alpha: float = 32.0
    lora_target_modules: tuple[str, ...] | None = None
    """None: every linear layer but the head."""
    keep_base: bool = False
    """Also serve the initial weights as the model ``base``. Free with LoRA, which always does; else a copy of what is trained."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """``auto``: bfloat16 on a GPU; on a CPU float32, with matrix products in bfloat16 where the CPU has AMX or AVX512_BF16."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    gradient_checkpointing: bool = False
    """Keep only the inputs of the layers for the backward pass, and compute the layers again in it."""
    learning_rate: float = 1e-5
    warmup_steps: int = 0
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.0
    grad_clip: float = 1.0
    algorithm: Algorithm = field(default_factory=Algorithm)
    """The loss. With ``algorithm.kl`` the initial weights are kept, as with ``keep_base``."""
    critic: Critic | None = None
    """The value head beside the model; None: there is none."""
    micro_batch_tokens: int = 4096
    """Most packed tokens in one forward and backward pass. Memory depends on it, the result does not."""
    max_context: int | None = None
    """None: what the model allows."""
    max_batch: int = 64
    gather_ms: float = 10.0
    cached_tokens: int = 16384
    threads: int | None = None
    seed: int = 0
