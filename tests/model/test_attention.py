"""What the embedded engine takes over from transformers, and what it rejects."""

from __future__ import annotations

import weakref
from pathlib import Path

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from lightning_core.errors import TrainingError
from lightning_core.model import attention
from lightning_core.model.attention import NAME, TreeAttention
from lightning_core.model.compute import choose_path
from lightning_core.model.forest import Forest, plan_blocks
from lightning_core.model.source import load_model

pytestmark = pytest.mark.numeric

SMALL = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def test_geometry(tiny_model: Path) -> None:
    geometry = choose_path(load_model(tiny_model, torch.float32)).geometry
    assert geometry is not None
    assert (geometry.kv_heads, geometry.groups, geometry.width) == (2, 2, 16)
    assert geometry.layers in (2, 3)


def test_bfloat16_passes_the_self_check(tiny_model: Path) -> None:
    assert choose_path(load_model(tiny_model, torch.bfloat16)).geometry is not None


def test_attention_that_computes_something_else_is_found_out() -> None:
    model = Qwen2ForCausalLM(Qwen2Config(**SMALL, initializer_range=0.5))
    switch = model.set_attn_implementation

    def switch_and_twist(name: str) -> None:
        """A stand-in for attention with an undeclared change: another scaling in our implementation."""
        switch(name)
        for layer in model.model.layers:
            layer.self_attn.scaling *= 5 if name == NAME else 1 / 5

    model.set_attn_implementation = switch_and_twist
    path = choose_path(model)
    assert path.geometry is None
    assert "other logits with tree attention" in path.reason
    assert model.config._attn_implementation != NAME


def test_a_forgotten_state_is_an_error_and_not_attention_to_the_future(tiny_llama: Path) -> None:
    model = load_model(tiny_llama, torch.float32)
    choose_path(model)
    with pytest.raises(TrainingError, match="without the keyword"):
        model(torch.tensor([[1, 2, 3]]))


def test_prefixes_of_several_roots() -> None:
    """Two roots with different cached prefixes see their own and not each other."""
    generator = torch.Generator().manual_seed(0)
    layers, kv_heads, groups, width = 1, 2, 2, 4

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    prefixes = [[(random(layers, kv_heads, 3, width), random(layers, kv_heads, 3, width))], []]
    forest = Forest(lengths=[4, 2, 5], parents=[-1, 0, -1], prefixes=[0, 1])
    query, key, value = random(4, 11, width), random(2, 11, width), random(2, 11, width)
    found = TreeAttention(plan_blocks(forest), groups=groups, device=torch.device("cpu"), prefixes=prefixes).attend(
        0, query, key, value, 0.5, None
    )
    for start, stop, cached in ((0, 6, prefixes[0]), (6, 11, prefixes[1])):
        keys = torch.cat([*(k[0] for k, _ in cached), key[:, start:stop]], dim=1).repeat_interleave(groups, 0)
        values = torch.cat([*(v[0] for _, v in cached), value[:, start:stop]], dim=1).repeat_interleave(groups, 0)
        mask = torch.ones(stop - start, keys.shape[1], dtype=torch.bool).tril(keys.shape[1] - (stop - start))
        expected = torch.nn.functional.scaled_dot_product_attention(
            query[:, start:stop], keys, values, attn_mask=mask, scale=0.5
        )
        torch.testing.assert_close(found[start:stop], expected.transpose(0, 1), atol=1e-5, rtol=0)


LINEAR = Forest(lengths=[300], parents=[-1])
BRANCHED = Forest(lengths=[300, 20, 270, 10, 300], parents=[-1, 0, 0, 2, -1])


@pytest.mark.parametrize("window", [None, 100, 280])
@pytest.mark.parametrize("forest", [LINEAR, BRANCHED])
@pytest.mark.parametrize("elements", [None, 30_000])
def test_attention_and_its_gradients_are_those_of_a_dense_mask(
    forest: Forest, window: int | None, elements: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``elements``: the limit of a mask, below which blocks are cut."""
    if elements is not None:
        monkeypatch.setattr(attention, "MASK_ELEMENTS", elements)
    size, groups = sum(forest.lengths), 2
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(heads, size, 8, generator=generator, requires_grad=True) for heads in (4, 2, 2))
    gradient = torch.randn(size, 4, 8, generator=generator)
    tree = TreeAttention(plan_blocks(forest), groups=groups, device=torch.device("cpu"))
    found = tree.attend(0, query, key, value, 0.5, window)
    keys, values = (tensor.repeat_interleave(groups, 0) for tensor in (key, value))
    mask = _dense(forest, window)
    expected = torch.nn.functional.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=0.5)
    torch.testing.assert_close(found, expected.transpose(0, 1), atol=2e-6, rtol=0)
    inputs = (query, key, value)
    for own, dense in zip(
        torch.autograd.grad(found, inputs, gradient),
        torch.autograd.grad(expected.transpose(0, 1), inputs, gradient),
        strict=True,
    ):
        torch.testing.assert_close(own, dense, atol=1e-5, rtol=0)


def _dense(forest: Forest, window: int | None) -> torch.Tensor:
    """bool [S, S], from the ancestors of each token."""
    mask = torch.zeros(sum(forest.lengths), sum(forest.lengths), dtype=torch.bool)
    stops: list[int] = []
    for length, parent in zip(forest.lengths, forest.parents, strict=True):
        start = stops[-1] if stops else 0
        stops.append(start + length)
        if parent >= 0:
            mask[start : start + length] = mask[stops[parent] - 1]
        mask[start : start + length, start : start + length] = torch.ones(length, length).tril().bool()
    position = mask.sum(dim=1)
    return mask if window is None else mask & (position[:, None] - position[None, :] < window)


def test_a_long_row_needs_no_mask_and_a_long_tree_no_large_masks() -> None:
    groups, tokens = 7, 32_768
    assert _masks([tokens], [-1], groups, window=None) == [0]
    assert max(_masks([tokens], [-1], groups, window=4096)) <= 16 * 2**20
    largest = _masks([tokens - 600, 300, 300], [-1, 0, 0], groups, window=None)
    assert 0 < max(largest) <= 16 * 2**20


def _masks(lengths: list[int], parents: list[int], groups: int, *, window: int | None) -> list[int]:
    """The bytes of the masks of a forest's pieces, one head of two numbers; the memory that all keep is small."""
    tree = TreeAttention(
        plan_blocks(Forest(lengths=lengths, parents=parents)), groups=groups, device=torch.device("cpu")
    )
    query, key = torch.zeros(groups, sum(lengths), 2), torch.zeros(1, sum(lengths), 2)
    sizes: list[int] = []
    kept: list[weakref.ref[torch.Tensor]] = []
    for _, mask, *_ in tree.pieces(0, window, query, key, key):
        sizes.append(0 if mask is None else mask.nbytes)
        kept += [] if mask is None else [weakref.ref(mask)]
        mask = None
    alive = [mask for reference in kept if (mask := reference()) is not None]
    assert sum(mask.nbytes for mask in alive) <= 16 * 2**20
    return sizes
