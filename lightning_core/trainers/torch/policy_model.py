"""A policy's model: its weights, which of them are trained, and how it is computed."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from lightning_core.backends.torch.engine import SampledModel
from lightning_core.chat.chat import Chat
from lightning_core.config.algorithm import Algorithm
from lightning_core.config.resolve import PolicySettings
from lightning_core.config.trainer import TrainerSection
from lightning_core.model.compute import ComputePlan
from lightning_core.model.load import LoadedModel
from lightning_core.model.source import number_of_weights
from lightning_core.trace import POLICY
from lightning_core.trainers.learning_rate import learning_rate
from lightning_core.trainers.torch.build import load_policy, notes, plan_memory, tune_policy
from lightning_core.trainers.torch.forward import Forward, Reference
from lightning_core.trainers.torch.packing import PackedBatch, pack
from lightning_core.trainers.torch.saving import write_merged, write_weights
from lightning_core.transitions import Row


class PolicyModel:
    """A Hugging Face model on the CPU or one GPU, or an adapter of one."""

    def __init__(
        self,
        policy: PolicySettings,
        algorithm: Algorithm,
        settings: TrainerSection,
        *,
        seed: int,
        name: str = POLICY,
        loaded: LoadedModel | None = None,
        share: int | None = None,
        samples: bool = True,
    ) -> None:
        """Load the model, choose its trained weights, and plan the memory for passes and the engine's cache.

        ``name``: the name that it is served under. ``loaded``: a model to share; None loads one. ``share``: how many sampled models
        share the memory; None: this one, and its copy of the initial weights if it has one. ``samples``: whether the engine in this
        process samples it, and not another sampler.
        """
        if settings.threads is not None:
            torch.set_num_threads(settings.threads)
        self.settings = policy
        self.name = name
        self.loaded = loaded or load_policy(policy, deterministic=settings.deterministic)
        self.network = self.loaded.model
        """The neural network."""
        self.tokenizer = self.loaded.tokenizer
        self.path: ComputePlan = self.loaded.path
        """The path on which the model is computed."""
        self.device: torch.device = self.loaded.device
        """The device of the weights."""
        self.learning_rate = learning_rate(policy.learning_rate, number_of_weights(self.network), policy.tuning)
        """After warm-up."""
        self.tuning = tune_policy(self.loaded, policy, name=name, seed=seed, keep_base=algorithm.kl is not None)
        with self.tuning.active():
            self.forward = Forward(self.network, self.path, self.loaded.constraints)
            """Forward passes through the current weights; inside ``tuning.active()``."""
            models = 1 + self._has_copy if share is None else share
            self.memory = plan_memory(
                self.loaded, self.tuning, settings,
                share=models, samples=samples, entropy=algorithm.entropy_weight > 0,
            )  # fmt: skip
            self.sampler_bytes = models * (self.memory.cache_bytes + self.memory.row_bytes)
            """Bytes that the engine may hold for all models which share the memory: each plans for an equal part."""
            self.notes: Sequence[str] = notes(policy, self.loaded, self.tuning, self.memory)
            """See `Trainer.notes`."""

    @cached_property
    def reference(self) -> Reference:
        """Forward passes through the initial weights; with an adapter these are the same model without it."""
        assert self.tuning.base is not None, "the initial weights are kept for those who name them in the configuration"
        network, context = self.tuning.base
        forward = Forward(network, self.path, self.loaded.constraints) if self._has_copy else self.forward
        return Reference(forward, context)

    @property
    def _has_copy(self) -> bool:
        """Whether the initial weights are their own model."""
        return self.tuning.base is not None and self.tuning.base[0] is not self.network

    @property
    def sampled(self) -> SampledModel:
        """The current weights, for the engine."""
        return self._for_engine(self.network, self.tuning.adapter)

    @property
    def base(self) -> SampledModel | None:
        """The initial weights, for the engine; None if they are not kept."""
        return None if self.tuning.base is None else self._for_engine(self.tuning.base[0])

    def _for_engine(self, network: Any, adapter: str | None = None) -> SampledModel:
        return SampledModel(
            model=network,
            path=self.path,
            adapters=self.tuning.adapters,
            adapter=adapter,
            constraints=self.loaded.constraints,
        )

    @cached_property
    def chat(self) -> Chat:
        """The chat format."""
        variables = self.settings.chat_template_kwargs
        return Chat(self.tokenizer, stop_token_ids=self.loaded.stop_token_ids, template_kwargs=variables)

    @property
    def vocabulary(self) -> int:
        """Number of tokens that the model has logits for."""
        return self.network.get_output_embeddings().weight.shape[0]

    @property
    def fingerprint(self) -> dict[str, Any]:
        """The properties that a checkpoint must share with this model."""
        return {
            "model_type": self.network.config.model_type,
            "tuning": self.settings.tuning,
            "lora_alpha": None if self.settings.lora is None else self.settings.lora.alpha,
            "weights": {name: list(tensor.shape) for name, tensor in self.tuning.masters.items()},
        }

    def pack(self, rows: Sequence[Row], chosen: Sequence[int]) -> Sequence[PackedBatch]:
        """The micro-batches of the rows ``chosen``."""
        return pack(self.path, rows, chosen, budget=self.memory.micro_batch_tokens)

    def write(self, folder: Path, *, earlier: Path | None) -> str:
        """See `write_weights`."""
        return write_weights(folder, self.loaded, self.tuning, self.settings, earlier=earlier)

    def write_merged(self, folder: Path, *, untied: bool = False) -> None:
        """See `write_merged`."""
        write_merged(folder, self.loaded, self.tuning, self.settings, untied=untied)
