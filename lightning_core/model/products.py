"""Products of few rows with the weights of linear layers, on CPUs where MKL makes them.

A decoding step multiplies all weights with one row per response. MKL first copies the operand on the right of a product to an
order of its own. `torch.nn.functional.linear` puts the weights there: with few rows, the copy takes longer than the product.
As ``W xᵀ`` the weights are the operand on the left, which is not copied. For the output layer, whose result is large, oneDNN is faster.

Which way is taken depends on the shapes alone, so a resumed run computes as before.

Dimensions: R rows, I inputs, O outputs of a layer.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Linear

from lightning_core.model.precision import bfloat16_unit

_FEW = 64
"""Rows up to which ``W xᵀ`` is faster; of a single row, whose product copies nothing, it is not."""
_WIDE = 16
"""Layers with so many times as many outputs as inputs are multiplied by oneDNN."""


def multiply_few_rows(model: Any) -> None:
    """Let the linear layers of ``model`` choose their product by the number of rows, in passes without gradients.

    Results differ in rounding. Nothing is changed where MKL does not make the products, or for weights of another type than float32.
    """
    if bfloat16_unit() is not None or not torch.backends.mkl.is_available():
        return
    for module in model.modules():
        if type(module) is Linear and module.weight.device.type == "cpu" and module.weight.dtype == torch.float32:
            module.forward = MethodType(_forward, module)


def _forward(layer: Any, input: Tensor) -> Tensor:
    """The forward pass of ``layer``, a `Linear`."""
    weight_OI: Tensor = layer.weight
    bias_O: Tensor | None = layer.bias
    if torch.is_grad_enabled() or input.dtype != torch.float32 or not input.numel():
        return F.linear(input, weight_OI, bias_O)
    outputs, inputs = weight_OI.shape
    if outputs >= _WIDE * inputs:
        return F.linear(input.to_mkldnn(), weight_OI, bias_O).to_dense()
    rows = input.numel() // inputs
    if not 1 < rows <= _FEW:
        return F.linear(input, weight_OI, bias_O)
    output_RO = torch.mm(weight_OI, input.reshape(rows, inputs).t()).t().contiguous()
    return (output_RO if bias_O is None else output_RO.add_(bias_O)).view(*input.shape[:-1], outputs)
