"""Products of few rows: they give the results of `torch.nn.functional.linear`, with and without a bias."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from lightning_core.model import products
from lightning_core.model.precision import exact_products
from lightning_core.model.products import LayerOfFewRows, OutputOfFewRows, multiply_few_rows
from lightning_core.trainers.torch.build import load_policy
from tests.trainers.sections import parts

pytestmark = pytest.mark.numeric

SHAPES = {"layer": (96, 64), "narrow": (32, 96), "output": (1024, 64)}


class Model(torch.nn.Module):
    """A layer, and an output layer that counts as large."""

    def __init__(self, *, bias: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        for name, (outputs, inputs) in SHAPES.items():
            setattr(self, name, torch.nn.Linear(inputs, outputs, bias=bias))

    def get_output_embeddings(self) -> Any:
        return self.output


@pytest.fixture(autouse=True)
def mkl_multiplies(monkeypatch: pytest.MonkeyPatch) -> Generator[None]:
    """As on a CPU without instructions for bfloat16."""
    monkeypatch.setattr(products, "bfloat16_unit", lambda: None)
    monkeypatch.setattr(products, "_LARGE", 1024 * 64)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    with exact_products():
        yield


def changed(*, bias: bool = False) -> Model:
    model = Model(bias=bias)
    multiply_few_rows(model)
    return model


def classes(model: Model) -> list[type]:
    return [type(getattr(model, name)) for name in SHAPES]


def test_layers_and_a_large_output_layer_have_their_own_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert classes(changed()) == [LayerOfFewRows, LayerOfFewRows, OutputOfFewRows]
    monkeypatch.setattr(products, "_LARGE", 1024 * 64 + 1)
    assert classes(changed()) == [LayerOfFewRows, LayerOfFewRows, torch.nn.Linear]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rows", [0, 1, 2, 7, 64, 65, 300])
def test_results_are_those_of_linear(shape: str, rows: int, bias: bool) -> None:
    layer = getattr(changed(bias=bias), shape)
    for input in (
        torch.randn(rows, layer.in_features),
        torch.randn(1, rows, layer.in_features),
        torch.randn(layer.in_features, rows).t(),
    ):
        with torch.inference_mode():
            found = layer(input)
        assert found.is_contiguous()
        assert found.layout == torch.strided
        torch.testing.assert_close(found, F.linear(input, layer.weight, layer.bias), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", SHAPES)
def test_passes_with_gradients_are_unchanged(shape: str) -> None:
    layer = getattr(changed(bias=True), shape)
    input = torch.randn(5, layer.in_features, requires_grad=True)
    assert torch.equal(layer(input), F.linear(input, layer.weight, layer.bias))
    (gradient,) = torch.autograd.grad(layer(input).sum(), layer.weight)
    assert gradient.shape == layer.weight.shape


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
@torch.no_grad()
def test_a_copy_multiplies_with_its_own_weights(copied: Callable[[Model], Model]) -> None:
    model = changed()
    other = copied(model)
    assert classes(other) == classes(model)
    for shape in SHAPES:
        layer, copied_layer = getattr(model, shape), getattr(other, shape)
        copied_layer.weight.zero_()
        input = torch.randn(3, layer.in_features)
        assert not copied_layer(input).any()
        assert layer(input).any()


@pytest.mark.parametrize("missing", ["mkl", "mkldnn", "AMX"])
def test_nothing_is_changed_where_other_libraries_multiply(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    if missing == "AMX":
        monkeypatch.setattr(products, "bfloat16_unit", lambda: "AMX")
    else:
        monkeypatch.setattr(getattr(torch.backends, missing), "is_available", lambda: False)
    assert set(classes(changed())) == {torch.nn.Linear}


def test_only_plain_layers_in_float32_are_changed() -> None:
    class Own(torch.nn.Linear):
        pass

    model = Model()
    model.layer, model.narrow = Own(64, 96), torch.nn.Linear(96, 32, dtype=torch.bfloat16)
    multiply_few_rows(model)
    assert classes(model) == [Own, torch.nn.Linear, OutputOfFewRows]


@pytest.mark.parametrize(
    ("dtype", "deterministic", "expected"),
    [("auto", False, LayerOfFewRows), ("float32", False, torch.nn.Linear), ("auto", True, torch.nn.Linear)],
)
def test_float32_and_deterministic_sampling_use_the_order_of_torch(
    dtype: str, deterministic: bool, expected: type, tiny_llama: Path
) -> None:
    loaded = load_policy(parts(model=str(tiny_llama), dtype=dtype)["policy"], deterministic=deterministic)
    assert type(loaded.model.model.layers[0].mlp.up_proj) is expected
