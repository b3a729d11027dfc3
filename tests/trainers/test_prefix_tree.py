"""The tree of a group's calls trained once: the gradient of the flat batch, from a fraction of its tokens.

The shape is that of tests/bench/prefix_tree.py, ten turns of eight branches, with fewer tokens in each.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from lightning_core import Row
from lightning_core.model.source import load_model
from lightning_core.trainers.torch.packing import pack_rows
from lightning_core.trainers.torch.trainer import TorchTrainer
from tests.bench.prefix_tree import calls_of_a_group, difference, pack_apart, plain_gradients, step_gradients
from tests.trainers.test_torch_trainer import make

pytestmark = pytest.mark.numeric


@pytest.fixture
def rows() -> list[Row]:
    return calls_of_a_group(10, 8, prompt=20, observation=3, response=4, vocabulary=256)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # these products are too small for more
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("budget", [300, *(pytest.param(budget, marks=pytest.mark.long) for budget in (100, 4096))])
def test_gradients_are_those_of_the_flat_batch(
    tiny_model: Path, trainers: list[TorchTrainer], rows: list[Row], budget: int
) -> None:
    trainer = make(trainers, tiny_model, grad_clip=1e9, micro_batch_tokens=budget)
    flat, flat_tokens = step_gradients(trainer, rows, pack_apart)
    tree, tree_tokens = step_gradients(trainer, rows, pack_rows)
    assert difference(tree, flat) < 1e-6
    assert flat_tokens > 5 * tree_tokens


def test_gradients_are_those_of_the_plain_model(
    tiny_model: Path, trainers: list[TorchTrainer], rows: list[Row]
) -> None:
    trainer = make(trainers, tiny_model, grad_clip=1e9)
    tree, _ = step_gradients(trainer, rows, pack_rows)
    plain, _ = plain_gradients(load_model(tiny_model, torch.float32), rows)
    assert difference(tree, plain) < 1e-6
