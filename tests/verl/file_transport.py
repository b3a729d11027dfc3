"""Transfers weights from verl's trainer to separate servers through a file, in place of NCCL on GPUs. For tests only."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncGenerator, Iterable
from pathlib import Path
from typing import Any

import torch
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry
from verl.workers.rollout.utils import ensure_async_iterator


@CheckpointEngineRegistry.register("files")
class FileTransport(CheckpointEngine):
    """The first rank of the trainer writes all weights, every rank of the servers reads them."""

    def __init__(self, bucket_size: int, is_master: bool = False) -> None:
        del bucket_size
        self._is_master = is_master
        self._file = Path()

    def prepare(self) -> dict[str, Any]:
        if not self._is_master:
            return {}
        return {"file": str(Path(tempfile.mkdtemp(prefix="lightning-weights-")) / "weights.pt")}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        file = next(m["file"] for m in metadata if m)
        return {"file": [file] * actor_wg_world_size}, {"file": [file] * rollout_world_size}

    def init_process_group(self, file: str) -> None:
        self._file = Path(file)

    def finalize(self) -> None:
        self._file.unlink(missing_ok=True)

    async def send_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], global_steps: int | None = None
    ) -> dict[str, Any]:
        # All ranks take part in making each tensor whole.
        sent = [(name, tensor.detach().clone()) async for name, tensor in ensure_async_iterator(weights)]
        if self._is_master:
            scratch = self._file.with_suffix(".new")
            torch.save(sent, scratch)
            scratch.rename(self._file)
        return {}

    async def receive_weights(self, global_steps: int | None = None) -> AsyncGenerator[tuple[str, torch.Tensor]]:
        while not self._file.exists():
            await asyncio.sleep(0.05)
        for name, tensor in torch.load(self._file):
            yield name, tensor
