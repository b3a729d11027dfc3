"""The embedded trainer, with the policy sampled by a vLLM server instead of in this process."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from lightning_core.policy.vllm_backend import VllmBackend
from lightning_core.policy.vllm_server import serve_vllm
from lightning_core.trainers.model import resolve_model
from lightning_core.trainers.torch_trainer import TorchTrainer
from lightning_core.transitions import Row


class VllmTrainer:
    """A `Trainer`: ``trainer`` updates the weights, and after each update the server gets them.

    ``url``: a running server; None starts one with the further arguments ``args``. Weights travel as a folder under the system's
    temporary folder (``TMPDIR``), which a server elsewhere must see under the same path. Closes ``trainer`` with itself.
    """

    def __init__(self, trainer: TorchTrainer, *, url: str | None = None, args: Sequence[str] = ()) -> None:
        self._trainer = trainer
        with ExitStack() as stack:
            stack.callback(trainer.close)
            limit = trainer.backend.max_context
            server = url
            if server is None:
                model = resolve_model(trainer.config.model)
                server = stack.enter_context(serve_vllm(model, dtype=trainer.dtype, max_context=limit, args=args))
            self._backend = VllmBackend(server, max_context=limit)
            stack.callback(self._backend.close)
            if url is not None:
                self._push()  # whatever that server was started with, or another run has left there
            self._open = stack.pop_all()

    @property
    def version(self) -> int:
        return self._trainer.version

    @property
    def backend(self) -> VllmBackend:
        return self._backend

    @property
    def tokenizer(self) -> Any:
        return self._trainer.tokenizer

    def step(self, rows: Sequence[Row]) -> Mapping[str, float]:
        """See `Trainer.step`. Raises `InfrastructureError` if the server does not take the new weights."""
        metrics = self._trainer.step(rows)
        started = time.monotonic()
        self._push()
        return {**metrics, "seconds_push": time.monotonic() - started}

    def save(self, folder: Path) -> None:
        """See `Trainer.save`."""
        self._trainer.save(folder)

    def load(self, folder: Path) -> None:
        """See `Trainer.load`."""
        self._trainer.load(folder)
        self._push()

    def save_pretrained(self, folder: Path) -> None:
        """See `TorchTrainer.save_pretrained`."""
        self._trainer.save_pretrained(folder)

    def close(self) -> None:
        """See `Trainer.close`. Stops the server, if it was started here."""
        self._open.close()

    def _push(self) -> None:
        with tempfile.TemporaryDirectory(prefix="lightning-weights-") as folder:
            self._trainer.save_pretrained(Path(folder))
            self._backend.push(Path(folder), self._trainer.version)
