"""Logprobs of trained tokens from hidden states, without storing all logits.

Logits would be by far the largest tensor of a training step: places x vocabulary in float32. A plain output layer is
computed for a part of the vocabulary at a time, with one buffer for the part's logits and a running maximum and sum
(Milakov & Gimelshein 2018, arXiv 1805.02867). With softmax probabilities p, and logits W h + b divided by the temperature T,

    d logprob(v) / d h = (W[v] - sum_u p_u W[u]) / T

For a frozen layer the forward pass accumulates the expected row (the sum over u), so its backward pass needs no logits. For
a trained layer the backward pass recomputes the logits of each part, for the gradient of its rows. Models that transform
their logits (soft caps, scales, adapters on the output layer) compute them with their own code, for a part of the places at
a time.

Dimensions: E trained tokens, P places, H hidden width, V vocabulary, C columns of a vocabulary part, N constrained places.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lightning_core.model.attention import Geometry
from lightning_core.model.own_logits import check_logits, has_weights_beside, own_logits
from lightning_core.model.products import PLAIN

PART = {"cpu": 2**21, "cuda": 2**26}
"""Logits computed at a time. On a CPU 8 MiB in float32, which fits caches: larger parts measured slower. GPUs want more."""

ROWS_PER_COPY = 2**13
"""Rows that are copied at a time, for the gradients of chosen tokens."""

Forbidden = Iterable[tuple[int, Tensor]]
"""Places with bool [V]: the tokens that are excluded from the softmax there."""


class OutputHead:
    """Computes logprobs from a model's last hidden states."""

    def __init__(self, model: Any, geometry: Geometry | None) -> None:
        """``model``: as it is trained, with adapters. ``geometry``: see `ComputePlan`.

        Raises `TrainingError` if its logits depend on more than the last hidden states.
        """
        self._model = model
        layer: Any = model.get_output_embeddings()
        hidden_1SH = check_logits(model, geometry)
        # Much larger than real hidden states, so a soft cap, which hardly changes small logits, is detected.
        large_1SH = 100 * hidden_1SH
        with torch.no_grad():
            plain = _is_plain(layer) and torch.equal(own_logits(model, large_1SH), layer(large_1SH))
        # A weight that has no effect yet, such as a scale of 1, changes no logits.
        plain = not has_weights_beside(model, layer, geometry, hidden_1SH) and plain
        self._layer: torch.nn.Linear | None = layer if plain else None

    @property
    def plain(self) -> bool:
        """Whether the logits are the output layer's, unchanged."""
        return self._layer is not None

    def logprobs(
        self,
        hidden_PH: Tensor,
        temperatures_P: Tensor,
        source_E: Tensor,
        targets_E: Tensor,
        forbidden: Forbidden = (),
    ) -> Tensor:
        """Logprobs [E] (float32) of ``targets_E`` at the places ``source_E``.

        They are computed under softmax(logits / temperature).
        ``temperatures_P`` is float32, ``source_E`` and ``targets_E`` are int64; differentiable in ``hidden_PH`` and the weights.
        """
        if self._layer is not None:
            return linear_logprobs(
                hidden_PH, self._layer.weight, self._layer.bias, temperatures_P, source_E, targets_E, forbidden
            )
        masks = _Masks(forbidden, hidden_PH.device)
        return self._own_logprobs(hidden_PH, temperatures_P, source_E, targets_E, masks)

    def logits(self, hidden_PH: Tensor) -> Tensor:
        """Logits [P, V] of all places at once; differentiable in ``hidden_PH`` and the weights."""
        return own_logits(self._model, hidden_PH[None])[0] if self._layer is None else self._layer(hidden_PH)

    @torch.no_grad()
    def top(
        self,
        hidden_PH: Tensor,
        temperatures_P: Tensor,
        count: int,
        forbidden: Forbidden = (),
        *,
        vocabulary: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The ``count`` most likely tokens of each place: ids, int64 [P, K], and logprobs, float32 [P, K].

        ``vocabulary``: tokens from this id on are forbidden too. K is at most the number of tokens.
        """
        masks = _Masks(forbidden, hidden_PH.device)
        size = self._places_per_part(hidden_PH)
        parts: list[tuple[Tensor, Tensor]] = []
        for first in range(0, len(hidden_PH), size):
            scaled_CV = self.logits(hidden_PH[first : first + size]).float()
            scaled_CV /= temperatures_P[first : first + size, None]
            masks.apply(scaled_CV, place=first)
            best = scaled_CV[:, :vocabulary].log_softmax(dim=-1)
            top = best.topk(min(count, best.shape[-1]), dim=-1)
            parts.append((top.indices, top.values))
        ids_PK, logprobs_PK = (torch.cat(part) for part in zip(*parts, strict=True))
        return ids_PK, logprobs_PK

    def _places_per_part(self, hidden_PH: Tensor) -> int:
        return max(16, PART[hidden_PH.device.type] // self._model.get_output_embeddings().weight.shape[0])

    def _own_logprobs(
        self, hidden_PH: Tensor, temperatures_P: Tensor, source_E: Tensor, targets_E: Tensor, masks: _Masks
    ) -> Tensor:
        size = self._places_per_part(hidden_PH)

        def part(first: int, hidden_CH: Tensor, source_C: Tensor, targets_C: Tensor) -> Tensor:
            logits_CV = own_logits(self._model, hidden_CH[None])[0].float()
            scaled_CV = logits_CV / temperatures_P[first : first + size, None]
            masks.apply(scaled_CV, place=first)
            return scaled_CV.log_softmax(dim=-1)[source_C - first, targets_C]

        order_E = source_E.argsort(stable=True)
        starts = range(0, len(hidden_PH), size)
        ends = torch.searchsorted(source_E[order_E], torch.tensor([s + size for s in starts], device=source_E.device))
        parts: list[Tensor] = []
        stop = 0
        for first, end in zip(starts, ends.tolist(), strict=True):
            own_C = order_E[stop:end]
            stop = end
            arguments = (first, hidden_PH[first : first + size], source_E[own_C], targets_E[own_C])
            parts.append(checkpoint(part, *arguments, use_reentrant=False, preserve_rng_state=False))  # type: ignore[arg-type]
        return torch.cat(parts)[order_E.argsort()]


def _is_plain(layer: Any) -> bool:
    """Whether the layer is a bare `Linear`, without hooks that change its output."""
    return not (layer._forward_hooks or layer._forward_pre_hooks) and type(layer) in PLAIN


def linear_logprobs(
    hidden_PH: Tensor,
    weight_VH: Tensor,
    bias_V: Tensor | None,
    temperatures_P: Tensor,
    source_E: Tensor,
    targets_E: Tensor,
    forbidden: Forbidden = (),
    *,
    part: int | None = None,
) -> Tensor:
    """`OutputHead.logprobs` for the logits ``hidden_PH @ weight_VH.T + bias_V``.

    ``part``: how many logits are computed at a time.
    Products are made in the type of the weights, all else is float32.
    """
    part = PART[hidden_PH.device.type] if part is None else part
    columns = max(256, part // max(1, len(hidden_PH)) // 8 * 8)  # whole bytes of packed masks
    packed = _Masks(forbidden, hidden_PH.device)
    return _LinearLogprobs.apply(  # type: ignore[no-any-return]
        hidden_PH, weight_VH, bias_V, temperatures_P, source_E, targets_E, packed, columns
    )


class _Masks:
    """The forbidden tokens of all constrained places, one bit each."""

    def __init__(self, forbidden: Forbidden, device: torch.device) -> None:
        places: list[int] = []
        packed: list[np.ndarray[Any, Any]] = []
        for place, forbidden_V in forbidden:
            places.append(place)
            packed.append(np.packbits(forbidden_V.cpu().numpy(), bitorder="little"))
        self._places_N = torch.tensor(places, dtype=torch.int64, device=device)
        self._packed_NB = torch.from_numpy(np.stack(packed)).to(device) if packed else None
        self._bits = torch.arange(8, dtype=torch.uint8, device=device)

    def apply(self, logits_PC: Tensor, *, place: int = 0, token: int = 0) -> None:
        """Set forbidden logits to -inf.

        ``place`` and ``token`` (a multiple of 8): the position of the first logit.
        """
        if self._packed_NB is None:
            return
        places, columns = logits_PC.shape
        inside_N = (self._places_N >= place) & (self._places_N < place + places)
        rows_N = self._places_N[inside_N] - place
        packed_NB = self._packed_NB[inside_N, token // 8 : (token + columns + 7) // 8]
        forbidden_NC = ((packed_NB[:, :, None] >> self._bits) & 1).flatten(1)[:, :columns].bool()
        logits_PC[rows_N] = logits_PC[rows_N].masked_fill_(forbidden_NC, -torch.inf)


class _LinearLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_PH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        temperatures_P: Tensor,
        source_E: Tensor,
        targets_E: Tensor,
        masks: _Masks,
        columns: int,
    ) -> Tensor:
        trained = weight_VH.requires_grad or (bias_V is not None and bias_V.requires_grad)
        expected_PH = (
            torch.zeros_like(hidden_PH, dtype=torch.float32) if ctx.needs_input_grad[0] and not trained else None
        )
        # Not -inf: a part in which all tokens are forbidden would then subtract infinity from itself.
        top_P = torch.full_like(temperatures_P, torch.finfo(torch.float32).min)
        total_P = torch.zeros_like(temperatures_P)
        selected_E = torch.zeros_like(targets_E, dtype=torch.float32)
        for first, rows_CH, scaled_PC in _parts(hidden_PH, weight_VH, bias_V, temperatures_P, masks, columns):
            inside_E, column_E = _columns_of(targets_E, first, scaled_PC)
            selected_E = torch.where(inside_E, scaled_PC[source_E, column_E], selected_E)
            before_P, top_P = top_P, torch.maximum(top_P, scaled_PC.amax(dim=-1))
            rescale_P = (before_P - top_P).exp_()
            masses_PC = scaled_PC.sub_(top_P[:, None]).exp_()
            total_P = total_P.mul_(rescale_P).add_(masses_PC.sum(dim=-1))
            if expected_PH is not None:
                expected_PH.mul_(rescale_P[:, None])
                _add_product(expected_PH, masses_PC, rows_CH)
        normaliser_P = top_P + total_P.log()
        if expected_PH is not None:
            expected_PH.div_(total_P[:, None])
        ctx.save_for_backward(
            hidden_PH, weight_VH, bias_V, temperatures_P, source_E, targets_E, normaliser_P, expected_PH
        )
        ctx.masks, ctx.columns, ctx.trained = masks, columns, trained
        return selected_E - normaliser_P[source_E]

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (grad_E,) = grad_outputs
        hidden_PH, weight_VH, bias_V, temperatures_P, source_E, targets_E, normaliser_P, expected_PH = ctx.saved_tensors
        share_E = grad_E / temperatures_P[source_E]
        share_P = torch.zeros_like(temperatures_P).index_add_(0, source_E, share_E)
        grad_PH = grad_VH = grad_V = None
        if ctx.trained:
            expected_PH = torch.zeros_like(hidden_PH, dtype=torch.float32) if ctx.needs_input_grad[0] else None
            grad_VH = torch.empty_like(weight_VH, dtype=torch.float32) if ctx.needs_input_grad[1] else None
            grad_V = torch.empty_like(bias_V, dtype=torch.float32) if ctx.needs_input_grad[2] else None
            weighted_PH = (hidden_PH.float() * -share_P[:, None]).to(hidden_PH.dtype)
            for first, rows_CH, scaled_PC in _parts(
                hidden_PH, weight_VH, bias_V, temperatures_P, ctx.masks, ctx.columns
            ):
                softmax_PC = scaled_PC.sub_(normaliser_P[:, None]).exp_()
                last = first + len(rows_CH)
                if expected_PH is not None:
                    _add_product(expected_PH, softmax_PC, rows_CH)
                if grad_VH is not None:
                    grad_VH[first:last] = softmax_PC.t().to(hidden_PH.dtype) @ weighted_PH
                if grad_V is not None:
                    grad_V[first:last] = -(share_P @ softmax_PC)
        if expected_PH is not None:
            grad_PH = expected_PH * -share_P[:, None]
            _add_rows(grad_PH, source_E, weight_VH, targets_E, share_E)
        if grad_VH is not None:
            _add_rows(grad_VH, targets_E, hidden_PH, source_E, share_E)
        if grad_V is not None:
            grad_V.index_add_(0, targets_E, share_E)
        gradients = zip((grad_PH, grad_VH, grad_V), (hidden_PH, weight_VH, bias_V), strict=True)
        return *(None if grad is None else grad.to(tensor.dtype) for grad, tensor in gradients), *(None,) * 5


def _parts(
    hidden_PH: Tensor,
    weight_VH: Tensor,
    bias_V: Tensor | None,
    temperatures_P: Tensor,
    masks: _Masks,
    columns: int,
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """First token, output-layer rows [C, H] and scaled logits [P, C] of each part.

    The logits are float32; the next part overwrites them.
    """
    places = len(hidden_PH)
    buffer = torch.empty(places * columns, dtype=torch.float32, device=hidden_PH.device)
    # In less than float32 the logits are rounded before they are scaled, as the model's own are when it samples.
    product = buffer if weight_VH.dtype == torch.float32 else torch.empty_like(buffer, dtype=weight_VH.dtype)
    for first, rows_CH in zip(range(0, len(weight_VH), columns), weight_VH.split(columns), strict=True):
        size = places * len(rows_CH)
        scaled_PC = buffer[:size].view(places, -1)
        product_PC = product[:size].view(places, -1)
        if bias_V is None:
            torch.mm(hidden_PH, rows_CH.t(), out=product_PC)
        else:
            torch.addmm(bias_V[first : first + columns], hidden_PH, rows_CH.t(), out=product_PC)
        if product is not buffer:
            scaled_PC.copy_(product_PC)
        scaled_PC.div_(temperatures_P[:, None])
        masks.apply(scaled_PC, token=first)
        yield first, rows_CH, scaled_PC


def _columns_of(targets_E: Tensor, first: int, scaled_PC: Tensor) -> tuple[Tensor, Tensor]:
    """Whether each target is in the part, and its column there; an arbitrary column if not."""
    columns = scaled_PC.shape[1]
    column_E = targets_E - first
    return (column_E >= 0) & (column_E < columns), column_E.clamp(0, columns - 1)


def _add_rows(sums: Tensor, to_E: Tensor, rows: Tensor, from_E: Tensor, scale_E: Tensor) -> None:
    """sums[to] += scale · rows[from], a part of the tokens at a time: there can be many for each place."""
    for to, source, scale in zip(*(tensor.split(ROWS_PER_COPY) for tensor in (to_E, from_E, scale_E)), strict=True):
        sums.index_add_(0, to, rows[source].float().mul_(scale[:, None]))


def _add_product(sum_PH: Tensor, left_PC: Tensor, rows_CH: Tensor) -> None:
    """sum += left @ rows, the product in the type of the rows."""
    if rows_CH.dtype == torch.float32:
        sum_PH.addmm_(left_PC, rows_CH)
    else:
        sum_PH.add_(left_PC.to(rows_CH.dtype) @ rows_CH)
