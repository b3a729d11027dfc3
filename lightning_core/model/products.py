"""Products of few rows with the weights of linear layers, on CPUs where MKL makes them.

A decoding step multiplies all weights with one row per response. With few rows, MKL takes longer for ``x Wᵀ``, as torch calls it,
than for ``W xᵀ``, and oneDNN is faster than both with a large output layer (decision 0014). A layer's way depends on its shapes and on
whether gradients are computed, not on a measurement, so a resumed run computes as before.

The layers get another class. A `TorchFunctionMode` would leave them alone, but costs up to 30 ms of a decoding step.

Dimensions: R rows, I inputs, O outputs of a layer.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Linear

from lightning_core.model.precision import bfloat16_unit

_FEW = 64
"""Rows up to which ``W xᵀ`` is faster. A single row is multiplied as a vector, in either way."""
_OUTPUT_ROWS = 256
"""Rows up to which an output layer is multiplied by oneDNN, whose result is copied."""
_LARGE = 1 << 24
"""Weights from which an output layer is."""


class LayerOfFewRows(Linear):
    """A linear layer that computes few rows as ``W xᵀ``, in passes without gradients."""

    def forward(self, input: Tensor) -> Tensor:
        """See `Linear`."""
        rows = _rows(input)
        if not 1 < rows <= _FEW or not _is_own_product(self, input):
            return F.linear(input, self.weight, self.bias)
        output_RO = torch.mm(self.weight, input.reshape(rows, -1).t()).t().contiguous()
        bias_O: Any = self.bias
        return (output_RO if bias_O is None else output_RO.add_(bias_O)).view(*input.shape[:-1], len(self.weight))


class OutputOfFewRows(Linear):
    """An output layer that oneDNN multiplies with few rows, in passes without gradients."""

    def forward(self, input: Tensor) -> Tensor:
        """See `Linear`."""
        if not 0 < _rows(input) <= _OUTPUT_ROWS or not _is_own_product(self, input):
            return F.linear(input, self.weight, self.bias)
        return F.linear(input.to_mkldnn(), self.weight, self.bias).to_dense()


PLAIN = (Linear, LayerOfFewRows, OutputOfFewRows)
"""The classes of layers that are a product and nothing else."""


def multiply_few_rows(model: Any) -> None:
    """Let the float32 linear layers of ``model`` choose their product by the number of rows, in passes without gradients.

    Results differ in rounding. Nothing is changed on CPUs with instructions for bfloat16, where `set_product_precision` lets oneDNN
    make all products, and where torch has no MKL or no oneDNN.
    """
    if bfloat16_unit() is not None or not torch.backends.mkl.is_available() or not torch.backends.mkldnn.is_available():
        return
    output = model.get_output_embeddings()
    for module in model.modules():
        if type(module) is not Linear or module.weight.device.type != "cpu" or module.weight.dtype != torch.float32:
            continue
        if module is not output:
            module.__class__ = LayerOfFewRows
        elif module.weight.numel() >= _LARGE:
            module.__class__ = OutputOfFewRows


def _rows(input: Tensor) -> int:
    return input.shape[:-1].numel()


def _is_own_product(layer: Linear, input: Tensor) -> bool:
    """Whether the product may be made in another way: `torch.autograd` knows only that of torch."""
    return not torch.is_grad_enabled() and input.dtype == layer.weight.dtype == torch.float32
