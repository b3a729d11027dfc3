"""The embedded trainer, with the policy sampled by a vLLM server instead of in this process."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from lightning_core.backends.vllm.api import CPU_ARGS
from lightning_core.backends.vllm.backend import VllmBackend
from lightning_core.backends.vllm.server import serve_vllm
from lightning_core.chat.chat import Chat
from lightning_core.errors import ConfigError
from lightning_core.model.source import resolve_model
from lightning_core.trainers.torch.trainer import TorchTrainer
from lightning_core.transitions import Row, Transition


class VllmTrainer:
    """A `Trainer`: ``trainer`` updates the weights, and after each update the server gets them.

    ``url``: a running server; None starts one with the further arguments ``args``. Weights travel as a folder under the system's
    temporary folder (``TMPDIR``), which a server elsewhere must see under the same path. Closes ``trainer`` with itself.
    """

    def __init__(self, trainer: TorchTrainer, *, url: str | None = None, args: Sequence[str] = ()) -> None:
        self._trainer = trainer
        self._untied = False
        with ExitStack() as stack:
            stack.callback(trainer.close)
            limit = trainer.backend.max_context
            server = url or stack.enter_context(self._serve(limit, args))
            self._backend = VllmBackend(server, max_context=limit)
            stack.callback(self._backend.close)
            if self._backend.served.device == "cpu" and trainer.tied and not self._untied:
                raise ConfigError(
                    f"the vLLM server {server} runs on a CPU, where it cannot take new weights for an output layer that is tied to "
                    f"the embeddings, as that of {trainer.config.model!r} is; leave policy.vllm.url out, to have it served untied"
                )
            if url is not None:
                self._push()  # whatever that server was started with, or another run has left there
            self._open = stack.pop_all()

    @contextmanager
    def _serve(self, max_context: int, args: Sequence[str]) -> Generator[str]:
        """A server of our own; yields its URL."""
        trainer = self._trainer
        with tempfile.TemporaryDirectory(prefix="lightning-model-") as folder:
            model = resolve_model(trainer.config.model)
            if trainer.device == "cpu":
                args = (*CPU_ARGS, *args)
                if trainer.tied:
                    self._untied = True
                    model = folder
                    trainer.save_pretrained(Path(folder), untied=True)
            with serve_vllm(model, dtype=trainer.dtype, max_context=max_context, args=args) as url:
                yield url

    @property
    def steps(self) -> int:
        return self._trainer.steps

    @property
    def backend(self) -> VllmBackend:
        return self._backend

    @property
    def chats(self) -> Mapping[str, Chat]:
        return {name: self._trainer.chats[name] for name in self._backend.models}

    def step(self, rows: Sequence[Row]) -> Mapping[str, float]:
        """See `Trainer.step`. Raises `InfrastructureError` if the server does not take the new weights."""
        metrics = self._trainer.step(rows)
        started = time.monotonic()
        self._push()
        return {**metrics, "seconds_push": time.monotonic() - started}

    def expected(self, transitions: Sequence[Transition]) -> Mapping[str, float]:
        """See `Trainer.expected`."""
        return self._trainer.expected(transitions)

    def learn_expected(self, targets: Mapping[str, float]) -> Mapping[str, float]:
        """See `Trainer.learn_expected`."""
        return self._trainer.learn_expected(targets)

    def save(self, folder: Path) -> None:
        """See `Trainer.save`."""
        self._trainer.save(folder)

    def load(self, folder: Path, *, weights_only: bool = False) -> None:
        """See `Trainer.load`."""
        self._trainer.load(folder, weights_only=weights_only)
        self._push()

    def save_pretrained(self, folder: Path) -> None:
        """See `TorchTrainer.save_pretrained`."""
        self._trainer.save_pretrained(folder)

    def close(self) -> None:
        """See `Trainer.close`. Stops the server, if it was started here."""
        self._open.close()

    def _push(self) -> None:
        with tempfile.TemporaryDirectory(prefix="lightning-weights-") as folder:
            self._trainer.save_pretrained(Path(folder), untied=self._untied)
            self._backend.push(Path(folder), self._trainer.version)
