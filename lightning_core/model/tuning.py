"""The trained weights of a model, and the frozen initial weights."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_core.errors import ConfigError, TrainingError
from lightning_core.model.adapters import Adapters
from lightning_core.model.compute import decoder_name


def choose_device(name: str) -> torch.device:
    """The device ``cpu`` or ``cuda``; ``auto`` is the GPU if torch sees one, else the CPU."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device 'cuda' is configured, but torch sees no GPU; use 'auto' or 'cpu'")
    return torch.device("cuda" if name == "cuda" or (name == "auto" and torch.cuda.is_available()) else "cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """The trained weights of a model, by name."""

    parameters: Mapping[str, torch.nn.Parameter]
    """The weights that the model computes with."""
    masters: Mapping[str, Tensor]
    """The weights that the optimizer updates: the same tensors, or float32 copies if the model's dtype is smaller.
    (At a learning rate of 1e-5 most updates of bfloat16 weights are smaller than their rounding.)"""
    base: tuple[Any, Callable[[], AbstractContextManager[Any]]] | None
    """The initial model and the context manager to enter while it runs; None if it is not kept."""
    layers: int | None = None
    """Number of trained layers, counted from the top; None: all weights, or an adapter."""
    adapters: Adapters | None = None
    """The model's adapters with LoRA; `adapter` is trained."""
    adapter: str | None = None

    def active(self) -> AbstractContextManager[None]:
        """Context manager around forward and backward passes: selects the adapter."""
        return nullcontext() if self.adapters is None else self.adapters.use(self.adapter)

    def zero_grad(self) -> None:
        """Clear all gradients."""
        for tensor in (*self.parameters.values(), *self.masters.values()):
            tensor.grad = None

    def collect_grad(self) -> None:
        """Add a micro-batch's gradient to the gradients of the masters, in float32."""
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


def tune_adapter(
    model: Any, adapters: Adapters, *, name: str, rank: int, alpha: float, targets: Sequence[str] | None, seed: int
) -> Tuning:
    """Freeze ``model`` and add the adapter ``name`` to train; see `Adapters.add`.

    The initial weights are kept: they are the model without an adapter.
    """
    model.requires_grad_(False)
    parameters = adapters.add(name, rank=rank, alpha=alpha, targets=targets, seed=seed)
    return Tuning(
        parameters=parameters,
        masters=_masters(parameters),
        base=(model, partial(adapters.use, None)),
        adapters=adapters,
        adapter=name,
    )


def tune_weights(model: Any, *, layers: int | Literal["auto"] | None, keep_base: bool) -> Tuning:
    """Train the model's own weights.

    ``layers``: train the top so many decoder layers and the final norm; None: all weights; ``auto``: half of the layers of a model
    on the CPU, rounded up, else all weights.
    ``keep_base``: keep a copy of the initial weights. Raises `TrainingError` if the model has fewer layers.
    """
    model.requires_grad_(False)
    if layers == "auto":
        layers = (
            None if model.device.type == "cuda" or (stack := decoder_layers(model)) is None else (len(stack) + 1) // 2
        )
    for parameter in _full_parameters(model, layers):
        parameter.requires_grad_(True)
    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    base = None
    if keep_base:
        # Frozen weights are shared; trained ones are copied now, before the first update.
        frozen = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers()) if not tensor.requires_grad}
        base = (copy.deepcopy(model, frozen).requires_grad_(False), nullcontext)
    return Tuning(parameters=parameters, masters=_masters(parameters), base=base, layers=layers)


def _masters(parameters: Mapping[str, torch.nn.Parameter]) -> dict[str, Tensor]:
    return {
        name: parameter if parameter.dtype == torch.float32 else parameter.detach().float().requires_grad_(True)
        for name, parameter in parameters.items()
    }


def decoder_layers(model: Any) -> torch.nn.ModuleList | None:
    """The decoder layers of ``model``; None if they are not one list."""
    decoder, count = getattr(model, decoder_name(model)), model.config.get_text_config().num_hidden_layers
    stacks = (part for part in decoder.children() if isinstance(part, torch.nn.ModuleList) and len(part) == count)
    return next(stacks, None)


def _full_parameters(model: Any, train_layers: int | None) -> list[torch.nn.Parameter]:
    if train_layers is None:
        return list(model.parameters())
    decoder = getattr(model, decoder_name(model))
    count: int = model.config.get_text_config().num_hidden_layers
    layers = decoder_layers(model)
    if layers is None:
        raise TrainingError(
            f"train_layers: no list of {count} decoder layers was found in {type(model).__name__}; leave train_layers out"
        )
    if not 1 <= train_layers <= count:
        raise ConfigError(
            f"policy.train_layers is {train_layers}, but {type(model).__name__} has {count} layers; lower it, or leave it out to train "
            "all weights"
        )
    top = [parameter for layer in list(layers)[-train_layers:] for parameter in layer.parameters()]
    # The final norm is small and follows the trained layers; embeddings and head, often one matrix, stay frozen.
    norms = (part for name, part in decoder.named_children() if "norm" in name or name.startswith("ln_"))
    return top + [parameter for norm in norms for parameter in norm.parameters() if parameter.ndim == 1]
