"""The logits that a model's own code computes from given hidden states, and whether it needs no more than these."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from lightning_core.errors import TrainingError
from lightning_core.model.attention import NAME, Geometry, causal
from lightning_core.model.compute import decoder_name


@torch.no_grad()
def check_logits(model: Any, geometry: Geometry | None) -> Tensor:
    """Check on a few tokens that the logits of ``model`` depend on hidden states alone.

    ``geometry``: see `ComputePlan`. Returns the hidden states [1, S, H]. Raises `TrainingError` if they do not.
    """
    inputs = _inputs(model, geometry)
    expected = model(**inputs).logits
    hidden_1SH = getattr(model, decoder_name(model))(**inputs).last_hidden_state
    try:
        actual = own_logits(model, hidden_1SH)
    except (AttributeError, TypeError) as error:  # its code needs other outputs of the decoder
        raise _more_than_hidden_states(model) from error
    if not torch.allclose(actual.float(), expected.float(), rtol=1e-3, atol=1e-3 * expected.float().std().item()):
        raise _more_than_hidden_states(model)
    return hidden_1SH


def _inputs(model: Any, geometry: Geometry | None) -> dict[str, Any]:
    """The arguments of ``model`` for eight tokens."""
    device = model.get_input_embeddings().weight.device
    tokens = torch.arange(8, device=device)[None] * 7 % model.config.get_text_config().vocab_size
    inputs: dict[str, Any] = {"input_ids": tokens, "use_cache": False}
    if geometry is not None:
        inputs["position_ids"] = torch.arange(8, device=device)[None]
        inputs[NAME] = causal(8, groups=geometry.groups, device=device)
    return inputs


def has_weights_beside(model: Any, layer: Any, geometry: Geometry | None, hidden_1SH: Tensor) -> bool:
    """Whether the logits depend on trained weights that are neither the decoder's nor those of the output ``layer``.

    ``hidden_1SH``: what `check_logits` returned for ``geometry``.
    Raises `TrainingError` if their gradients depend on more than the hidden states.
    """
    known = {id(p) for part in (getattr(model, decoder_name(model)), layer) for p in part.parameters()}
    beside = {name: p for name, p in model.named_parameters() if p.requires_grad and id(p) not in known}
    if not beside:
        return False
    found: list[tuple[Tensor | None, ...]] = []
    with torch.inference_mode(False), torch.enable_grad():
        inputs, given_1SH = _inputs(model, geometry), hidden_1SH.clone()  # tensors of inference mode have no gradients
        for compute in (lambda: model(**inputs).logits, lambda: own_logits(model, given_1SH)):
            logits_1SV = compute().float()
            weights = torch.randn(logits_1SV.shape, generator=torch.Generator().manual_seed(0)).to(logits_1SV.device)
            loss = (logits_1SV * weights).sum()
            frozen = (None,) * len(beside)
            found.append(
                torch.autograd.grad(loss, [*beside.values()], allow_unused=True) if loss.requires_grad else frozen
            )
    for name, expected, actual in zip(beside, *found, strict=True):
        if expected is not None and (actual is None or _differ(expected, actual)):
            raise _more_than_hidden_states(model, f"; the gradient of {name!r} would be wrong")
    return any(expected is not None for expected in found[0])


def _more_than_hidden_states(model: Any, which: str = "") -> TrainingError:
    return TrainingError(
        f"{type(model).__name__} computes its logits from more than the last hidden states of its {decoder_name(model)!r}: the embedded "
        f"engine cannot train it{which}"
    )


def _differ(expected: Tensor, actual: Tensor) -> bool:
    """Whether two gradients differ by more than rounding."""
    size = float(expected.float().norm())
    return not float((actual - expected).float().norm()) <= (1e-3 if expected.dtype == torch.float32 else 0.05) * size


def own_logits(model: Any, hidden_1SH: Tensor) -> Tensor:
    """Logits [1, S, V] that the model's own code computes from given hidden states."""
    other = copy.copy(model)  # the same weights; only its decoder is replaced
    name = decoder_name(model)
    other._modules = {**model._modules, name: _Ready(hidden_1SH, model._modules[name])}
    unused = torch.zeros(
        hidden_1SH.shape[:2], dtype=torch.int64, device=hidden_1SH.device
    )  # some models read its shape
    return type(model).forward(other, input_ids=unused, use_cache=False).logits


class _Ready(torch.nn.Module):
    """Replaces the decoder and returns given hidden states. Other attributes are taken from ``decoder``."""

    def __init__(self, hidden_1SH: Tensor, decoder: torch.nn.Module) -> None:
        super().__init__()
        self._hidden_1SH = hidden_1SH
        self._replaced = (decoder,)  # in a tuple, so it is not registered as a part

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_replaced"][0], name)

    @property
    def decoder(self) -> _Ready:
        """OPT and similar models call this part of their base model."""
        return self

    def forward(self, *_: Any, **__: Any) -> Any:
        return _DecoderOutput(self._hidden_1SH)


class _DecoderOutput:
    """The output of a decoder, with the hidden states only.

    All else that a model copies to its own output (a cache, router logits, a state) is None.
    """

    def __init__(self, hidden_1SH: Tensor) -> None:
        self.last_hidden_state = hidden_1SH

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)

    def __getitem__(self, index: int | slice) -> Any:
        return (self.last_hidden_state,)[index]
