"""Sampling whose bits depend on a row's own context only, not on the rows that share its passes (``trainer.deterministic``).

Floating-point sums depend on their order, and libraries choose the order of a matrix product by its shape. Here every sum that reaches
a token has the same shape and order in each pass:

- Linear layers are computed in parts of the same number of rows, the last one padded (`FixedRows`): libraries choose the kernel of a
  product, and the parts of its sums, by its number of rows.
- A query attends to the keys of its context in the order of their positions, in chunks of constant width (`attend`), in prefill as
  in decoding. Masked columns add exact zeros.

So keys and values are the same whether a token was in a prompt, was sampled, or was computed again after its context was evicted.
`TreeLane` compares passes of the model to the bit before the first request.

Dimensions: B batch, M queries, N keys, a multiple of `WIDTH`; otherwise as in `Cascade`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Linear
from torch.overrides import TorchFunctionMode
from transformers.pytorch_utils import Conv1D

from lightning_core.backends.torch.decoding import Cascade
from lightning_core.backends.torch.kv_pool import Node
from lightning_core.errors import TrainingError
from lightning_core.model.attention import Geometry, TreeAttention
from lightning_core.model.forest import Block

WIDTH = 64
"""Contexts are padded to a multiple of so many keys."""
_CHUNK = 128
"""Keys per product with the values. Libraries cut longer sums into parts, by their length."""
_LIMITS = (1, 4, 8, 16, 32, 64, 128)
_PROBED = (1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 15, 16, 17, 23, 31, 32, 33, 48, 63, 64, 65, 127, 128, 129, 160)
_ROWS = (32, 64, 128)
"""Rows of a product. Fewer make prompts slow, more make single tokens slow."""
_SHIFTS = 8
"""Of layers with many outputs, where all shifts would take seconds."""
_LARGE = 1 << 23


@dataclass(frozen=True, slots=True, kw_only=True)
class RowLimits:
    """The numbers of rows with which the bits of a row do not depend on other rows."""

    rows: int
    """Of a product in a linear layer, exactly."""
    queries: int
    """In attention, at least."""


@torch.inference_mode()
def measure(model: Any, geometry: Geometry) -> RowLimits:
    """The limits of ``model`` on this machine, with its number of threads.

    Raises `TrainingError` if there are none.
    """
    layers: dict[tuple[Any, ...], Linear | Conv1D] = {}
    for module in model.modules():
        if isinstance(module, Linear | Conv1D):
            kind = (
                type(module),
                *module.weight.shape,
                module.weight.dtype,
                len(list(module.parameters(recurse=False))),
            )
            layers.setdefault(kind, module)
    weight: Tensor = model.get_input_embeddings().weight
    generator = torch.Generator(weight.device).manual_seed(0)
    rows = _fixed_rows(lambda rows: all(_same_at_every_place(layer, rows, generator) for layer in layers.values()))
    shape = (geometry.kv_heads, 2 * _CHUNK, geometry.width)
    keys, values = (torch.randn(shape, generator=generator, device=weight.device) for _ in "kv")
    query = torch.randn(geometry.kv_heads, _PROBED[-1], geometry.width, generator=generator, device=weight.device)
    visible = torch.zeros(1, 1, device=weight.device)
    queries = _limit(lambda n: attend(query[:, :n].contiguous(), keys, values, visible).transpose(0, 1), _PROBED)
    return RowLimits(rows=rows, queries=queries)


def _fixed_rows(holds: Callable[[int], bool]) -> int:
    """The least number of rows of a product for which ``holds`` is true."""
    found = next(filter(holds, _ROWS), None)
    if found is None:
        raise varies(f"in products of {', '.join(map(str, _ROWS))} rows, the bits of a row depend on its place")
    return found


def _same_at_every_place(layer: Linear | Conv1D, rows: int, generator: torch.Generator) -> bool:
    """Whether a row of a product of ``layer`` has the same bits wherever it is among ``rows`` rows."""
    width = layer.weight.shape[0 if isinstance(layer, Conv1D) else 1]
    inputs = torch.randn(rows, width, generator=generator, device=layer.weight.device).to(layer.weight)
    step = 1 if layer.weight.numel() < _LARGE else rows // _SHIFTS
    expected = _product(layer, inputs)
    return all(
        torch.equal(_product(layer, inputs.roll(shift, 0)), expected.roll(shift, 0)) for shift in range(1, rows, step)
    )


def _product(layer: Linear | Conv1D, input_RI: Tensor) -> Tensor:
    """The output [R, O] of ``layer``, without the hooks of adapters."""
    if isinstance(layer, Conv1D):
        return torch.addmm(layer.bias, input_RI, layer.weight)
    return F.linear(input_RI, layer.weight, layer.bias)


def _limit(product: Callable[[int], Tensor], counts: Sequence[int]) -> int:
    """The least number of rows from which the results of ``product``, [rows, ...], are those of many rows."""
    expected = product(counts[-1])
    different = [count for count in counts if not torch.equal(product(count), expected[:count])]
    limit = next((limit for limit in _LIMITS if not different or limit > different[-1]), None)
    if limit is None:
        raise varies(f"a matrix product depends on its number of rows up to {different[-1]} rows")
    return limit


def varies(reason: str) -> TrainingError:
    """The error for a model whose bits depend on the batch."""
    threads = torch.get_num_threads()
    found = f"{reason}, with {threads} threads of torch. Set trainer.threads: 1, or" if threads > 1 else f"{reason}."
    return TrainingError(
        f"trainer.deterministic cannot be kept on this machine: {found} {'remove' if threads > 1 else 'Remove'} trainer.deterministic and "
        "set rollouts.concurrency: 1"
    )


def attend(query_BMD: Tensor, keys_BND: Tensor, values_BND: Tensor, bias: Tensor) -> Tensor:
    """The attention output [B, M, D], float32. ``query_BMD`` is scaled and float32; ``bias`` is added to the scores [B, M, N]."""
    scores = torch.bmm(query_BMD, keys_BND.float().transpose(1, 2)).add_(bias)
    weights, values = scores.softmax(dim=-1), values_BND.float()
    parts = zip(weights.split(_CHUNK, dim=2), values.split(_CHUNK, dim=1), strict=True)
    output = torch.bmm(*next(parts))
    for part in parts:
        output += torch.bmm(*part)
    return output


class InvariantTree(TreeAttention):
    """Attention of a packed forest; each block is a part of one run."""

    def __init__(
        self,
        blocks: Sequence[Block],
        limits: RowLimits,
        *,
        groups: int,
        device: torch.device,
        prefixes: Sequence[Sequence[tuple[Tensor, Tensor]]],
    ) -> None:
        super().__init__(blocks, groups=groups, device=device, prefixes=prefixes)
        self._least = limits.queries

    def attend(
        self, layer: int, query_HSD: Tensor, key_KSD: Tensor, value_KSD: Tensor, scaling: float, window: int | None
    ) -> Tensor:
        heads, tokens, width = query_HSD.shape
        output_SHD = query_HSD.new_empty(tokens, heads, width)
        for piece, mask, query, keys, values in self.pieces(layer, window, query_HSD, key_KSD, value_KSD):
            assert mask is not None, "`plan_runs` makes no linear blocks"
            kv_heads, rows = len(keys), len(mask)
            more = (0, 0, 0, max(0, self._least - rows))
            columns = (0, 0, 0, -keys.shape[1] % WIDTH)
            bias = F.pad(mask, (0, columns[-1]), value=False)
            bias = F.pad(torch.zeros(bias.shape, device=mask.device).masked_fill_(~bias, -torch.inf), more)
            scaled = F.pad((query.float() * scaling).reshape(kv_heads, rows, width), more)
            output = attend(scaled, F.pad(keys, columns), F.pad(values, columns), bias)[:, :rows]
            output_SHD[piece.start : piece.stop] = output.reshape(heads, -1, width).transpose(0, 1)
        return output_SHD


class OwnContexts(Cascade):
    """A `Cascade` whose rows share no columns: each has its whole context in its own block, in the order of positions."""

    _unit = WIDTH

    def __init__(self, geometry: Geometry, limits: RowLimits, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(geometry, dtype=dtype, device=device)
        self._least = limits.queries

    def _splits(self, path: Sequence[Node], shared_by: Sequence[int], room: int) -> Sequence[int]:
        return [0]

    def _choices(self, path: Sequence[Node], new: int) -> Sequence[tuple[int, int]]:
        return [(sum(len(node.tokens) for node in path), 0)]

    def attend(
        self, layer: int, query_HSD: Tensor, key_KSD: Tensor, value_KSD: Tensor, scaling: float, window: int | None
    ) -> Tensor:
        heads, rows, width = query_HSD.shape
        kv_heads = key_KSD.shape[0]
        groups = heads // kv_heads
        keys, values = self._store(layer, key_KSD, value_KSD)
        query = (query_HSD.float() * scaling).view(kv_heads, groups, rows, width).permute(2, 0, 1, 3)
        query = F.pad(query.reshape(rows * kv_heads, groups, width), (0, 0, 0, max(0, self._least - groups)))
        bias = self._bias(window).expand(-1, kv_heads, -1, -1).flatten(0, 1)
        output = attend(query, keys, values, bias)[:, :groups].to(value_KSD.dtype)
        return output.reshape(rows, heads, width)


class FixedRows(TorchFunctionMode):
    """While it is entered, each linear layer is computed in products of ``rows`` rows, also a `Conv1D`, which calls `torch.addmm`."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self._rows = rows

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.linear:
            return self._linear(*args, **(kwargs or {}))
        if func is torch.addmm:
            return self._addmm(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        output_SO = self._in_parts(input.flatten(0, -2), lambda part_RI: F.linear(part_RI, weight, bias))
        return output_SO.view(*input.shape[:-1], len(weight))

    def _addmm(self, bias: Tensor, input_SI: Tensor, weight_IO: Tensor, **scales: Any) -> Tensor:
        return self._in_parts(input_SI, lambda part_RI: torch.addmm(bias, part_RI, weight_IO, **scales))

    def _in_parts(self, input_SI: Tensor, product: Callable[[Tensor], Tensor]) -> Tensor:
        padded_SI = F.pad(input_SI, (0, 0, 0, -len(input_SI) % self._rows))
        parts = [product(part_RI) for part_RI in padded_SI.split(self._rows)]
        return (parts[0] if len(parts) == 1 else torch.cat(parts))[: len(input_SI)]
