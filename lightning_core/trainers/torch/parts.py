"""The parts of a trainer, from config sections: model, trained weights, engine."""

from __future__ import annotations

from lightning_core.backends.torch.engine import TorchBackend
from lightning_core.config.resolve import PolicySettings
from lightning_core.config.trainer import TrainerSection
from lightning_core.model.load import LoadedModel, load
from lightning_core.model.tuning import Tuning, tune_adapter, tune_weights


def load_policy(policy: PolicySettings) -> LoadedModel:
    """Load the model of ``policy``; see `load`."""
    return load(
        policy.model,
        device=policy.device,
        dtype=policy.dtype,
        max_context=policy.max_context,
        gradient_checkpointing=policy.gradient_checkpointing,
    )


def open_backend(settings: TrainerSection, max_context: int, *, seed: int) -> TorchBackend:
    """A sampling engine without models."""
    return TorchBackend(
        {}, max_context=max_context, max_batch=settings.max_batch, gather_ms=settings.gather_ms, seed=seed
    )


def tune_policy(loaded: LoadedModel, policy: PolicySettings, *, name: str, seed: int, keep_base: bool) -> Tuning:
    """The trained weights of ``policy``.

    ``keep_base``: keep the initial weights even if they are not served.
    """
    lora = policy.lora
    if lora is None:
        return tune_weights(loaded.model, layers=policy.train_layers, keep_base=keep_base or policy.keep_base)
    return tune_adapter(
        loaded.model,
        loaded.adapters,
        name=name,
        rank=lora.rank,
        alpha=lora.alpha,
        targets=lora.target_modules,
        seed=seed,
    )
