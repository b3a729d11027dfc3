"""Products of few rows: they give the results of `torch.nn.functional.linear`, with and without a bias."""

from __future__ import annotations

import copy
from collections.abc import Generator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from lightning_core.model import products
from lightning_core.model.precision import exact_products
from lightning_core.model.products import multiply_few_rows

pytestmark = pytest.mark.numeric

SHAPES = {"layer": (96, 64), "narrow": (32, 96), "output layer": (1024, 64)}


@pytest.fixture(autouse=True)
def mkl_multiplies(monkeypatch: pytest.MonkeyPatch) -> Generator[None]:
    """As on a CPU without instructions for bfloat16."""
    monkeypatch.setattr(products, "bfloat16_unit", lambda: None)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    with exact_products():
        yield


def linear(shape: str, *, bias: bool = False) -> torch.nn.Linear:
    torch.manual_seed(0)
    outputs, inputs = SHAPES[shape]
    layer = torch.nn.Linear(inputs, outputs, bias=bias)
    multiply_few_rows(layer)
    return layer


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rows", [0, 1, 2, 7, 64, 65, 200])
def test_results_are_those_of_linear(shape: str, rows: int, bias: bool) -> None:
    layer = linear(shape, bias=bias)
    for input in (torch.randn(rows, layer.in_features), torch.randn(1, rows, layer.in_features)):
        with torch.inference_mode():
            found = layer(input)
        assert found.is_contiguous()
        assert found.layout == torch.strided
        torch.testing.assert_close(found, F.linear(input, layer.weight, layer.bias), rtol=1e-5, atol=1e-5)


def test_inputs_need_not_be_contiguous() -> None:
    for shape in SHAPES:
        layer = linear(shape)
        input = torch.randn(layer.in_features, 5).t()
        with torch.no_grad():
            torch.testing.assert_close(layer(input), F.linear(input, layer.weight), rtol=1e-5, atol=1e-5)


def test_passes_with_gradients_are_unchanged() -> None:
    for shape in SHAPES:
        layer = linear(shape, bias=True)
        input = torch.randn(5, layer.in_features, requires_grad=True)
        assert torch.equal(layer(input), F.linear(input, layer.weight, layer.bias))
        (gradient,) = torch.autograd.grad(layer(input).sum(), layer.weight)
        assert gradient.shape == layer.weight.shape


def test_a_copy_multiplies_with_its_own_weights() -> None:
    layer = linear("layer")
    other = copy.deepcopy(layer)
    with torch.no_grad():
        other.weight.zero_()
        assert not other(torch.randn(3, layer.in_features)).any()
        assert layer(torch.randn(3, layer.in_features)).any()


@pytest.mark.parametrize("change", [{"bfloat16_unit": lambda: "AMX"}, {}])
def test_nothing_is_changed_where_other_libraries_multiply(
    monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]
) -> None:
    for name, value in change.items():
        monkeypatch.setattr(products, name, value)
    if not change:
        monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: False)
    assert "forward" not in vars(linear("layer"))


def test_only_plain_layers_in_float32_are_changed() -> None:
    class Own(torch.nn.Linear):
        pass

    model = torch.nn.ModuleList([Own(4, 4), torch.nn.Linear(4, 4, dtype=torch.bfloat16), torch.nn.Linear(4, 4)])
    multiply_few_rows(model)
    assert ["forward" in vars(module) for module in model] == [False, False, True]
