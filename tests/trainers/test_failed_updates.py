"""Updates that do not fit the memory: repeated with smaller micro-batches, or undone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_core import Row
from lightning_core.errors import NonFiniteError, OutOfMemoryError
from lightning_core.model.compute import plain_path
from lightning_core.trainers.torch.factory import open_trainer
from lightning_core.trainers.torch.forward import Forward
from lightning_core.trainers.torch.trainer import TorchTrainer
from tests.trainers.rows import make_row
from tests.trainers.sections import parts


class Full(TorchDispatchMode):
    """Raises `torch.OutOfMemoryError` once, in the first call of ``operator``, for a tensor of ``shape`` if that is given."""

    def __init__(self, operator: Any, shape: tuple[int, ...] | None = None) -> None:
        super().__init__()
        self._operator = operator
        self._shape = shape
        self.raised = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is self._operator and self._shape in (None, args[0].shape) and not self.raised:
            self.raised = True
            raise torch.OutOfMemoryError("CUDA out of memory")
        return func(*args, **(kwargs or {}))


@pytest.fixture
def opened(tiny_llama: Path) -> Iterator[Callable[[], TorchTrainer]]:
    with ExitStack() as stack:

        def make() -> TorchTrainer:
            trainer = open_trainer(**parts(model=str(tiny_llama), dtype="float32", learning_rate=1e-3))
            stack.callback(trainer.close)
            return trainer

        yield make


def row(number: int) -> Row:
    return make_row(([number, 5, 6], False), ([7, 8], True), rollout=f"r{number}", advantage=-1.0, logprobs=[-6.0] * 2)


def test_a_first_update_without_memory_for_all_moments_leaves_the_weights(opened: Callable[[], TorchTrainer]) -> None:
    """AdamW updates the matrices before the vectors."""
    trainer = opened()
    norm = trainer.model.tuning.masters["model.norm.weight"]
    before = {name: tensor.detach().clone() for name, tensor in trainer.model.tuning.masters.items()}
    with (
        pytest.raises(OutOfMemoryError, match="the weights are unchanged"),
        Full(torch.ops.aten.zeros_like.default, norm.shape),
    ):
        trainer.step([row(1)])
    assert all(torch.equal(tensor, before[name]) for name, tensor in trainer.model.tuning.masters.items())
    assert not trainer.state().moments


def test_smaller_micro_batches_and_skipped_steps_are_kept_over_a_resume(
    opened: Callable[[], TorchTrainer], tmp_path: Path
) -> None:
    trainer = opened()
    with Full(torch.ops.aten.mm.default):
        assert trainer.step([row(1), row(2)])["updates_repeated"] == 1
    far = make_row(([1, 2], False), ([3], True), advantage=-1.0, logprobs=[-200.0])  # the ratio overflows
    trainer.step([far])
    trainer.save(tmp_path / "saved")
    resumed = opened()
    resumed.load(tmp_path / "saved")
    assert resumed.model.memory.micro_batch_tokens == trainer.model.memory.micro_batch_tokens < 10
    resumed.step([far])
    with pytest.raises(NonFiniteError, match="the third such step in a row"):
        resumed.step([far])


def test_on_the_plain_path_micro_batches_are_halved_with_their_padding(opened: Callable[[], TorchTrainer]) -> None:
    """Eight rows that share 20 of 24 input tokens."""
    trainer = opened()
    model = trainer.model
    model.path = plain_path(model.network, "it is a test", attention="sdpa")
    model.forward = Forward(model.network, model.path, model.loaded.constraints)
    rows = [
        make_row(([*range(20), 30 + number, 5, 6], False), ([7, 8], True), rollout=f"r{number}", logprobs=[-6.0] * 2)
        for number in range(8)
    ]
    with Full(torch.ops.aten.mm.default):
        assert trainer.step(rows)["updates_repeated"] == 1
    assert model.memory.micro_batch_tokens == 8 * 24 // 2
    assert [len(batch.rows) for batch in model.pack(rows, range(8))] == [4, 4]


LIMITED = """
import json, random, resource, sys
from contextlib import contextmanager
from pathlib import Path
import torch
from lightning_core.errors import OutOfMemoryError
from lightning_core.trainers.torch.factory import open_trainer
from tests.trainers.rows import make_row
from tests.trainers.sections import parts

random.seed(0)
trainer = open_trainer(**parts(model=sys.argv[1], dtype="float32", learning_rate=1e-3, micro_batch_tokens=8192))

def row(tokens):
    prompt, response = (random.choices(range(256), k=count) for count in (tokens - 16, 16))
    return make_row((prompt, False), (response, True), advantage=1.0, logprobs=[-5.5] * 16)

@contextmanager
def little_memory(megabytes=40):
    before = resource.getrlimit(resource.RLIMIT_AS)
    limit(before, 0)
    filling = []  # what the C library holds and does not use, which differs between machines
    try:
        while True:
            filling.append(torch.ones(2**14))
    except (RuntimeError, MemoryError):
        limit(before, megabytes * 2**20)
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)

def limit(before, more):
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + more, before[1]))

def weights():
    return {name: tensor.detach().clone() for name, tensor in trainer.model.tuning.masters.items()}

initial, state = weights(), trainer.state().copy()
try:
    with little_memory():
        trainer.step([row(4000)])
except OutOfMemoryError as error:
    print(json.dumps({"error": str(error), "same": all(torch.equal(t, initial[n]) for n, t in weights().items()),
                      "moments": len(trainer.state().moments), "version": trainer.version}))
rows = [row(256) for _ in range(32)]
with little_memory():
    limited = trainer.step(rows)
updated = weights()
trainer.restore(state)
trainer.model.memory = type(trainer.model.memory)(cache_tokens=0, micro_batch_tokens=8192, most_tokens=8192,
                                                  cache_bytes=0, row_bytes=0, row_tokens=0,
                                                  trained_token_bytes=0)
free = trainer.step(rows)
print(json.dumps({"repeated": limited["updates_repeated"], "batches": [limited["micro_batches"], free["micro_batches"]],
                  "norms": [limited["grad_norm"], free["grad_norm"]],
                  "close": all(torch.allclose(t, updated[n], atol=1e-4) for n, t in weights().items())}))
trainer.close()
"""


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="limits the address space")
def test_an_update_that_does_not_fit_the_memory_is_repeated_with_smaller_micro_batches(tiny_llama: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(tiny_llama)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1"},  # each thread has buffers of its own
    )
    assert done.returncode == 0, done.stderr
    single, several = map(json.loads, done.stdout.splitlines())
    assert "which cannot be smaller; the weights are unchanged. Free memory" in single["error"]
    assert (single["same"], single["moments"], single["version"]) == (True, 0, 0)
    assert several["repeated"] >= 1
    assert several["batches"][0] > several["batches"][1] == 1
    assert several["norms"][0] == pytest.approx(several["norms"][1], rel=1e-4)
    assert several["close"], "equal up to the order of the sums"
    assert "which the run keeps" in done.stderr
