"""The parts of a trainer, from config sections: model, trained weights, engine."""

from __future__ import annotations

from functools import partial

from lightning_core.backends.torch.cache_check import bytes_per_token
from lightning_core.backends.torch.engine import TorchBackend
from lightning_core.chat.chat import Chat
from lightning_core.config.resolve import PolicySettings
from lightning_core.config.trainer import TrainerSection
from lightning_core.errors import ConfigError
from lightning_core.model.adapter_coverage import reach
from lightning_core.model.load import LoadedModel, load
from lightning_core.model.memory import MOST_TOKENS, MemoryPlan, cached_bytes, plan, trained_bytes
from lightning_core.model.merge import unmergeable
from lightning_core.model.peft import unloadable
from lightning_core.model.products import multiply_few_rows
from lightning_core.model.source import number_of_weights
from lightning_core.model.tuning import Tuning, tune_adapter, tune_weights
from lightning_core.trainers.learning_rate import learning_rate
from lightning_core.trainers.torch.load_check import checked
from lightning_core.trainers.torch.machine import free_memory


def load_policy(policy: PolicySettings, *, deterministic: bool = False) -> LoadedModel:
    """Load the model of ``policy``; see `load` and `checked`."""
    loaded = load(
        policy.model,
        device=policy.device,
        dtype=policy.dtype,
        max_context=policy.max_context,
        gradient_checkpointing=policy.gradient_checkpointing,
        check_tokenizer=partial(Chat, template_kwargs=policy.chat_template_kwargs),
    )
    if policy.dtype == "auto" and not deterministic:  # a deterministic row does not depend on the number of rows
        multiply_few_rows(loaded.model)
    return checked(loaded, deterministic=deterministic)


def open_backend(settings: TrainerSection, max_context: int, *, seed: int) -> TorchBackend:
    """A sampling engine without models."""
    return TorchBackend(
        {}, max_context=max_context, max_batch=settings.max_batch, gather_ms=settings.gather_ms, seed=seed,
        deterministic=settings.deterministic,
    )  # fmt: skip


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


def plan_memory(
    loaded: LoadedModel, tuning: Tuning, settings: TrainerSection, *, share: int, samples: bool, entropy: bool
) -> MemoryPlan:
    """The use of the free memory, of which ``share`` models get equal parts. Call it while the adapter is active.

    ``samples``: whether the engine in this process samples the policy. ``entropy``: see `trained_bytes`. Raises `ConfigError`
    if the size of micro-batches must be fixed.
    """
    memory = plan(
        free_memory(loaded.device) // share,
        weights=sum(3 * master.nbytes for master in tuning.masters.values()),
        cached=_cached_bytes(loaded, settings) if samples else 0,
        trained=trained_bytes(loaded.model, loaded.path, tuning.parameters.values(), entropy=entropy),
        cache_bytes=None if settings.cache_gb is None else int(settings.cache_gb * 2**30) // share,
        micro_batch_tokens=settings.micro_batch_tokens,
    )
    if settings.deterministic and settings.micro_batch_tokens is None and memory.micro_batch_tokens < MOST_TOKENS:
        fitting = 1 << (memory.micro_batch_tokens.bit_length() - 1)
        raise ConfigError(
            f"trainer.deterministic needs a fixed trainer.micro_batch_tokens on this machine, where free memory would decide and "
            f"{memory.micro_batch_tokens:,} tokens fit now; set trainer.micro_batch_tokens: {fitting}"
        )
    return memory


def _cached_bytes(loaded: LoadedModel, settings: TrainerSection) -> int:
    """Bytes of a token that the sampler keeps for later prompts; 0 if it keeps none."""
    if loaded.path.geometry is not None:
        return cached_bytes(loaded.path.geometry, loaded.model.dtype)
    return 0 if settings.deterministic else bytes_per_token(loaded.model, loaded.path.cache)


def notes(policy: PolicySettings, loaded: LoadedModel, tuning: Tuning, memory: MemoryPlan) -> list[str]:
    """The decisions for this model on this machine. Call it while the adapter is active."""
    found = [f"{type(loaded.model).__name__}: {loaded.path}"]
    if tuning.adapter is not None:
        layers = loaded.adapters.layers(tuning.adapter)
        found.append(reach(loaded.model, loaded.path, layers))
        if reason := unloadable(loaded.model, layers):
            found.append(f"checkpoints have no adapter_config.json, since {reason}: export with --format hf")
        if reason := unmergeable(loaded.model, layers):
            found.append(f"the adapter cannot be merged, since {reason}: export with --format peft")
    cache = f"a prefix cache of {memory.cache_tokens:,} tokens" if memory.cache_tokens else "no prefix cache"
    cache += f" ({_gib(memory.cache_bytes)})" if memory.cache_tokens else ""
    micro_batch = _gib(memory.micro_batch_tokens * memory.trained_token_bytes)
    passes = f"micro-batches of up to {memory.micro_batch_tokens:,} tokens ({micro_batch})"
    rows = (
        f"running responses of up to {memory.row_tokens:,} tokens ({_gib(memory.row_bytes)}), "
        if memory.row_bytes
        else ""
    )
    return [*found, *_automatic(policy, loaded, tuning), f"memory: {cache}, {rows}{passes}"]


def _automatic(policy: PolicySettings, loaded: LoadedModel, tuning: Tuning) -> list[str]:
    found: list[str] = []
    if policy.learning_rate == "auto":
        weights = number_of_weights(loaded.model)
        rate, adapters = learning_rate("auto", weights, policy.tuning), " with adapters" * (policy.tuning == "lora")
        found.append(f"trainer.learning_rate is {rate:.2g} for {weights / 1e6:,.3g} million weights{adapters}")
    if policy.train_layers == "auto":
        trained = "all weights" if tuning.layers is None else f"the top {tuning.layers} layers"
        found.append(f"policy.train_layers is {trained} on {loaded.device.type}")
    return [f"auto: {', '.join(found)}"] if found else []


def _gib(number: int) -> str:
    return f"{number / 2**30:.1f} GiB"
