"""The number of kernels and of reads from the device, which a GPU waits for, in each part of a step."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_core.backends.backend import SamplingParams
from lightning_core.backends.torch.rows import ActiveRow
from lightning_core.backends.torch.tree_lane import TreeLane
from lightning_core.model.compute import choose_path
from lightning_core.model.source import load_model
from lightning_core.trainers.micro_batches import ignore_batches
from lightning_core.trainers.torch.factory import open_trainer
from tests.trainers.rows import make_row
from tests.trainers.sections import parts

PREFILL, STEP = 185, 230
"""Kernels of four prompts and of a step with two layers in torch 2.13: 177, and 208 to 222. Raise a limit only for something that is
worth its launches."""
_READS = {"aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero", "aten::equal", "aten::masked_select"}
_METHODS = ("tolist", "numpy", "cpu")
_VIEWS = (
    "view",
    "transpose",
    "permute",
    "slice",
    "select",
    "unsqueeze",
    "squeeze",
    "expand",
    "t",
    "detach",
    "alias",
    "split",
    "as_strided",
)


class Counting(TorchDispatchMode):
    """Counts what torch computes, without views of tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels = self.reads = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        self.reads += name in _READS
        self.kernels += name not in _READS and name.removeprefix("aten::").strip("_") not in _VIEWS
        return func(*args, **(kwargs or {}))


@contextmanager
def counting(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counting]:
    mode = Counting()
    with monkeypatch.context() as patched:
        for name in _METHODS:
            own = getattr(torch.Tensor, name)

            def counted(self: Any, *args: Any, _own: Any = own, **kwargs: Any) -> Any:
                mode.reads += 1
                return _own(self, *args, **kwargs)

            patched.setattr(torch.Tensor, name, counted)
        with mode:
            yield mode


def row(number: int, **params: Any) -> ActiveRow:
    prompt = np.arange(20, dtype=np.int64) + 3 * (number % 2)
    return ActiveRow(prompt=prompt, params=SamplingParams(max_tokens=9, **params), random=random.Random(number))


@pytest.mark.parametrize("params", [{}, {"temperature": 0.0}, {"top_p": 0.9}])
def test_sampling_reads_the_device_once_a_step(
    params: dict[str, Any], tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model: Any = load_model(tiny_llama, torch.float32)
    geometry = choose_path(model).geometry
    assert geometry is not None
    lane = TreeLane(model, geometry)
    with torch.inference_mode():
        lane.waiting.extend(row(number, **params) for number in range(4))
        with counting(monkeypatch) as prefill:
            lane.admit(rows=4, tokens=1000)
        lane.step()
        with counting(monkeypatch) as step:
            lane.step()
    assert (prefill.reads, step.reads) == (0, 1)
    assert prefill.kernels <= PREFILL
    assert step.kernels <= STEP


def test_an_update_reads_the_device_once_a_micro_batch(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For its loss, before the backward pass; and once for all metrics, and for the gradient's norm."""
    rows = [
        make_row(([1, 2, number], False), ([3, 4, 5], True), advantage=1.0, rollout=f"r{number}") for number in range(3)
    ]
    found: dict[int, Counting] = {}
    for budget in (100, 6):
        trainer = open_trainer(
            **parts(model=str(tiny_llama), dtype="float32", micro_batch_tokens=budget, max_logprob_difference=None)
        )
        try:
            batches = trainer._updater.mini_batches(rows, 0)
            with trainer.paused():
                trainer._updater.step(batches, 0, ignore_batches)
                with counting(monkeypatch) as work:
                    trainer._updater.step(batches, 0, ignore_batches)
            found[len(batches[0].batches)] = work
        finally:
            trainer.close()
    assert {number: work.reads - number for number, work in found.items()} == {1: 2, 3: 2}
