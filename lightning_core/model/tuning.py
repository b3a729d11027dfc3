"""Which weights are trained, and what the frozen original is."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_core.errors import ConfigError, TrainingError
from lightning_core.model.adapters import Adapters
from lightning_core.model.settings import TorchTrainerConfig


def choose_device(name: str) -> torch.device:
    """``auto`` is the GPU if there is one."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device 'cuda' was asked for, but torch sees no GPU")
    return torch.device("cuda" if name == "cuda" or (name == "auto" and torch.cuda.is_available()) else "cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """The trained weights of a model, by name."""

    parameters: Mapping[str, torch.nn.Parameter]
    """What the model computes with."""
    masters: Mapping[str, Tensor]
    """What the optimiser changes: the same tensors, or float32 copies where the model computes in less. (A learning rate of
    1e-5 moves most bfloat16 weights by less than their rounding.)"""
    base: tuple[Any, Callable[[], AbstractContextManager[Any]]] | None
    """The initial model and what to enter while it runs, if it is kept."""
    adapters: Adapters | None = None
    """With LoRA: the model's adapters, one of which, `adapter`, is what is trained."""
    adapter: str | None = None

    def active(self) -> AbstractContextManager[None]:
        """Around passes through the model, forward and backward: it computes with these weights, whatever adapters it has."""
        return nullcontext() if self.adapters is None else self.adapters.use(self.adapter)

    def zero_grad(self) -> None:
        for tensor in (*self.parameters.values(), *self.masters.values()):
            tensor.grad = None

    def collect_grad(self) -> None:
        """Add the gradient of a micro-batch to the masters', in float32."""
        for name, parameter in self.parameters.items():
            master = self.masters[name]
            if master is not parameter and parameter.grad is not None:
                grad = parameter.grad.float()
                master.grad = grad if master.grad is None else master.grad.add_(grad)
                parameter.grad = None

    @torch.no_grad()
    def publish(self) -> None:
        """Copy the masters into the model."""
        for name, parameter in self.parameters.items():
            if self.masters[name] is not parameter:
                parameter.copy_(self.masters[name])
        if self.adapters is not None:
            self.adapters.changed()


def tune(model: Any, config: TorchTrainerConfig, *, name: str, adapters: Adapters) -> Tuning:
    """Freeze what ``config`` does not train, add an adapter ``name`` if it wants one, and keep the original if it must stay."""
    model.requires_grad_(False)
    if config.tuning == "lora":
        parameters = adapters.add(
            name,
            rank=config.lora_rank,
            alpha=config.lora_alpha,
            targets=config.lora_target_modules,
            seed=config.seed,
        )
        return Tuning(
            parameters=parameters,
            masters=_masters(parameters),
            base=(model, partial(adapters.use, None)),
            adapters=adapters,
            adapter=name,
        )
    for parameter in _full_parameters(model, config.train_layers):
        parameter.requires_grad_(True)
    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    base = None
    if config.keep_base or config.algorithm.kl is not None:
        # Frozen weights are shared; what is trained is copied now, while it is still the original.
        frozen = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers()) if not tensor.requires_grad}
        base = (copy.deepcopy(model, frozen).requires_grad_(False), nullcontext)
    return Tuning(parameters=parameters, masters=_masters(parameters), base=base)


def _masters(parameters: Mapping[str, torch.nn.Parameter]) -> dict[str, Tensor]:
    return {
        name: parameter if parameter.dtype == torch.float32 else parameter.detach().float().requires_grad_(True)
        for name, parameter in parameters.items()
    }


def _full_parameters(model: Any, train_layers: int | None) -> list[torch.nn.Parameter]:
    if train_layers is None:
        return list(model.parameters())
    decoder = model.base_model
    layers: Any = getattr(decoder, "layers", None)
    if not isinstance(layers, torch.nn.ModuleList):
        raise TrainingError(
            f"train_layers: {type(model).__name__} keeps its decoder layers elsewhere than in '.layers'"
        )
    if not 1 <= train_layers <= len(layers):
        raise TrainingError(f"train_layers={train_layers}, but {type(model).__name__} has {len(layers)} layers")
    top = [parameter for layer in list(layers)[-train_layers:] for parameter in layer.parameters()]
    # The final norm has few weights and sees the trained layers; embeddings and head, often one matrix, stay.
    return top + list(getattr(decoder, "norm", torch.nn.Module()).parameters())
