"""Low-rank adapters on one frozen model; each token of a pass may use another.

LoRA: arXiv 2106.09685.
An adapter adds ``scale · B A x`` to a linear layer's output for ``x``. Forward hooks add it, so the model remains an
unmodified Hugging Face model with its own weight names, and without an active adapter its output is unchanged.

Consecutive tokens with the same adapter, as in prompts, are computed run by run. In a decoding step the adapter changes
from token to token. There the matrices of all adapters are concatenated to one pair of rank K, every token is multiplied
with all of them, and a mask between the two products zeroes the columns of the other adapters. This costs K instead of R
columns, but only three operations per layer for any number of adapters, and with few tokens the number of operations
dominates. (Punica, arXiv 2310.18547, and S-LoRA, arXiv 2311.03285, use custom kernels instead.)

Dimensions: S tokens, I inputs and O outputs of a layer, R rank of an adapter, K sum of the ranks of all N adapters.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import Any, Final, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Linear, Parameter

from lightning_core.errors import ConfigError, TrainingError

_UNDECIDED: Final = object()
_LONG = 32
"""Minimum average run length, in tokens, to compute adapters run by run."""


_Runs = list[tuple[str | None, slice]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Adapter:
    rank: int
    scale: float
    weights: Mapping[str, tuple[Parameter, Parameter]]
    """A [R, I] and B [O, R] by layer."""


class Adapters:
    """The adapters of ``model``, by name. Their weights are not among the model's parameters.

    `use` or `mix` selects the adapters of a pass. Training must keep the selection during the backward pass too, because
    gradient checkpointing recomputes layers there. Not thread-safe: sampling must be paused while training.
    """

    def __init__(self, model: Any) -> None:
        head = model.get_output_embeddings()
        self._layers = {name: module for name, module in linear_layers(model).items() if module is not head}
        self._kind = type(model).__name__
        matrices = (
            m for m in model.modules() if m is not head and any(p.ndim > 1 for p in m.parameters(recurse=False))
        )
        self._others = sorted({type(module).__name__ for module in matrices})
        self._hooked: set[str] = set()
        self._adapters: dict[str, _Adapter] = {}
        # One adapter's name for all tokens, None for the base, runs of tokens, or the mask [S, K] of a mixture.
        self._chosen: Any = _UNDECIDED
        self._masks_NK: Tensor | None = None
        self._joined: dict[str, tuple[Tensor, Tensor]] = {}

    def add(
        self, name: str, *, rank: int, alpha: float, targets: Sequence[str] | None, seed: int
    ) -> dict[str, Parameter]:
        """Add an adapter scaled by alpha / rank; returns its weights by name.

        The weights have the dtype of the model's.

        ``targets``: names of layers, or their last parts; None for every linear layer except the output layer. B is
        initialized to 0, so the output equals the base model's until the first update. Raises `ConfigError` for a name that
        matches no layer.
        """
        if name in self._adapters:
            raise ConfigError(f"the model already has an adapter {name!r}")
        generator = torch.Generator().manual_seed(seed)
        weights: dict[str, tuple[Parameter, Parameter]] = {}
        for layer in self._find(targets):
            weight = self._layers[layer].weight
            outputs, inputs = weight.shape
            bound = 1 / math.sqrt(inputs)
            down_RI = torch.empty(rank, inputs).uniform_(-bound, bound, generator=generator)
            weights[layer] = (Parameter(down_RI.to(weight)), Parameter(weight.new_zeros(outputs, rank)))
            if layer not in self._hooked:
                self._layers[layer].register_forward_hook(partial(self._adapt, layer))
                self._hooked.add(layer)
        self._adapters[name] = _Adapter(rank=rank, scale=alpha / rank, weights=weights)
        self._masks_NK = None
        self.changed()
        return {
            f"{layer}.lora_{ab}": matrix
            for layer, pair in weights.items()
            for ab, matrix in zip("AB", pair, strict=True)
        }

    @property
    def names(self) -> Sequence[str]:
        """The names of the adapters."""
        return [*self._adapters]

    def layers(self, name: str) -> Sequence[str]:
        """The layers that the adapter ``name`` changes."""
        return [*self._adapters[name].weights]

    def _find(self, targets: Sequence[str] | None) -> list[str]:
        """The names of the layers that ``targets`` match. Raises `ConfigError` if there are none."""
        if not self._layers:
            raise ConfigError(
                f"policy.tuning: lora adapts linear layers, and {self._kind} has none below its output layer; its weights are in "
                f"layers of the types {self._others}. Set policy.tuning: full"
            )
        if targets is not None and not targets:
            raise ConfigError(
                "lora.target_modules is an empty list: name the layers to adapt, or leave it out to adapt all linear layers"
            )

        def is_meant(layer: str, target: str) -> bool:
            return f".{layer}".endswith(f".{target}")

        for target in targets or ():
            if not any(is_meant(layer, target) for layer in self._layers):
                known = sorted({layer.rpartition(".")[2] for layer in self._layers})
                raise ConfigError(
                    f"lora.target_modules: {target!r} matches no layer; the linear layers of this model are {known!r} "
                    "(adapters on the output layer are not supported)"
                )
        return [layer for layer in self._layers if targets is None or any(is_meant(layer, t) for t in targets)]

    @contextmanager
    def use(self, name: str | None) -> Generator[None]:
        """Use the adapter ``name`` for all tokens; None for no adapter."""
        before, self._chosen = self._chosen, name
        try:
            yield
        finally:
            self._chosen = before

    @contextmanager
    def mix(self, names: Sequence[str | None], lengths: Sequence[int], *, uniform: bool = False) -> Generator[None]:
        """Use the adapter ``names[i]`` (None for none) for the i-th run of ``lengths[i]`` tokens.

        ``uniform``: multiply every token with all adapters, so its bits do not depend on the other tokens' adapters.
        For sampling only: gradients are not supported.
        """
        with self.use(names[0]):
            if uniform and self._adapters:
                self._chosen = self._mask(names, lengths)
            elif len(set(names)) > 1:
                runs = _runs(names, lengths)
                self._chosen = runs if sum(lengths) >= _LONG * len(runs) else self._mask(names, lengths)
            yield

    def changed(self) -> None:
        """Drop the copies that mixtures compute with; call it after every weight update."""
        self._joined.clear()

    def _adapt(self, layer: str, module: Linear, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
        """Forward hook: the output with the selected adapters; None leaves it unchanged."""
        chosen = self._chosen
        if chosen is None:
            return None
        if isinstance(chosen, list):
            output_SO, inputs_SI = output.flatten(0, -2), inputs[0].flatten(0, -2)
            for name, part in cast("_Runs", chosen):
                if name is not None and layer in self._adapters[name].weights:
                    down_RI, up_OR = self._adapters[name].weights[layer]
                    hidden_SR = F.linear(inputs_SI[part], down_RI)
                    output_SO[part].addmm_(hidden_SR, up_OR.t(), alpha=self._adapters[name].scale)
            return output
        if isinstance(chosen, Tensor):
            down_KI, up_OK = self._joined.get(layer) or self._join(layer)
            hidden_SK = F.linear(inputs[0].flatten(0, -2), down_KI) * chosen
            return output + F.linear(hidden_SK, up_OK).view_as(output)
        if chosen is _UNDECIDED:
            if len(self._adapters) > 1:
                raise TrainingError(
                    f"the model has the adapters {list(self._adapters)!r} and was called outside of Adapters.use and Adapters.mix"
                )
            (chosen,) = self._adapters
        adapter = self._adapters[chosen]
        if layer not in adapter.weights:
            return None
        down_RI, up_OR = adapter.weights[layer]
        hidden_SR = F.linear(inputs[0].flatten(0, -2), down_RI)
        return torch.addmm(output.flatten(0, -2), hidden_SR, up_OR.t(), alpha=adapter.scale).view_as(output)

    def _join(self, layer: str) -> tuple[Tensor, Tensor]:
        """A [K, I] and B [O, K] of all adapters; 0 for adapters without this layer."""
        weight = self._layers[layer].weight
        outputs, inputs = weight.shape
        none = {
            a.rank: (weight.new_zeros(a.rank, inputs), weight.new_zeros(outputs, a.rank))
            for a in self._adapters.values()
        }
        pairs = [a.weights.get(layer, none[a.rank]) for a in self._adapters.values()]
        joined = torch.cat([down for down, _ in pairs]).detach(), torch.cat([up for _, up in pairs], dim=1).detach()
        self._joined[layer] = joined
        return joined

    def _mask(self, names: Sequence[str | None], lengths: Sequence[int]) -> Tensor:
        """Mask [S, K]: each token has its adapter's scale in that adapter's columns, else 0."""
        if self._masks_NK is None:  # row 0 is the base, row i the i-th adapter
            adapters = self._adapters.values()
            scales = torch.block_diag(*(torch.full((1, a.rank), a.scale) for a in adapters))
            weight = next(iter(self._layers.values())).weight
            self._masks_NK = torch.cat([torch.zeros(1, scales.shape[1]), scales]).to(weight)
        number = {None: 0, **{name: i for i, name in enumerate(self._adapters, start=1)}}
        index_S = torch.tensor([number[name] for name in names]).repeat_interleave(torch.tensor(lengths))
        return self._masks_NK[index_S.to(self._masks_NK.device)]


def linear_layers(model: Any) -> dict[str, Linear]:
    """The linear layers of ``model`` by name, its output layer included. Without routers that return more than a product."""
    return {
        name: module for name, module in model.named_modules() if isinstance(module, Linear) and _is_product(module)
    }


@torch.no_grad()
def _is_product(module: Linear) -> bool:
    """Whether ``module`` computes what `Linear` does; a class with its own forward pass, as Falcon's, is tried out."""
    if type(module).forward is Linear.forward:
        return True
    if module.weight.is_meta:  # a model without its weights
        module = copy.deepcopy(module).to_empty(device="cpu")
        for parameter in module.parameters():
            torch.nn.init.normal_(parameter)
    inputs_SI = torch.randn(3, module.in_features).to(module.weight)
    expected_SO = F.linear(inputs_SI, module.weight, module.bias)
    try:
        output: Any = module.forward(inputs_SI)  # without the hooks of adapters
        return bool((output - expected_SO).norm() <= 0.01 * expected_SO.norm())
    except (RuntimeError, TypeError, ValueError, IndexError, AttributeError):
        return False


def _runs(names: Sequence[str | None], lengths: Sequence[int]) -> _Runs:
    """The runs of consecutive tokens with the same adapter."""
    runs: _Runs = []
    stop = 0
    for name, group in groupby(zip(names, lengths, strict=True), key=itemgetter(0)):
        start, stop = stop, stop + sum(length for _, length in group)
        runs.append((name, slice(start, stop)))
    return runs
