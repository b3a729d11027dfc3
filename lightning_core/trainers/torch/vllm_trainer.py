"""The embedded trainer with a vLLM server as the sampler."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from lightning_core.backends.vllm.api import CPU_ARGS
from lightning_core.backends.vllm.backend import VllmBackend
from lightning_core.backends.vllm.server import serve_vllm
from lightning_core.errors import ConfigError, InfrastructureError, describe
from lightning_core.model.merge import layers_of, unmergeable
from lightning_core.model.source import resolve_model
from lightning_core.model.untied import is_tied
from lightning_core.trace import POLICY
from lightning_core.trainers.micro_batches import OnBatch, ignore_batches
from lightning_core.trainers.torch.scorer import RowScorer
from lightning_core.trainers.torch.trainer import TorchTrainer
from lightning_core.transitions import Row


class VllmTrainer:
    """A `Learner` whose policy is sampled by a vLLM server.

    ``trainer`` updates the weights, which are pushed to the server after each step.
    """

    def __init__(self, trainer: TorchTrainer, *, url: str | None, args: Sequence[str]) -> None:
        """``url``: a running server; None starts one with the further arguments ``args``.

        Weights are passed as a folder under the system's temporary folder (``TMPDIR``), which a server on another
        machine must see under the same path. `close` closes ``trainer`` too. Raises `ConfigError` for a server on a
        CPU that cannot take new weights for a tied output layer, and for adapters that cannot be merged.
        """
        self._trainer = trainer
        self._untied = False
        with ExitStack() as stack:
            stack.callback(trainer.close)
            adapted = layers_of(trainer.model.tuning.parameters) if trainer.model.settings.lora else ()
            if adapted and (reason := unmergeable(trainer.model.network, adapted)):
                raise ConfigError(
                    f"policy.backend: vllm needs adapters merged into the weights, and {reason}; use policy.backend: torch, "
                    "policy.tuning: full, or other policy.lora.target_modules"
                )
            limit = trainer.backend.max_context
            server = url or stack.enter_context(self._serve(limit, args))
            constraints = trainer.model.loaded.constraints
            self._backend = VllmBackend(server, model=POLICY, max_context=limit, constraints=constraints)
            stack.callback(self._backend.close)
            if self._backend.served.device == "cpu" and is_tied(trainer.model.network) and not self._untied:
                raise ConfigError(
                    f"the vLLM server {server} runs on a CPU, where it cannot replace the weights of an output layer "
                    f"that is tied to the embeddings, as in {trainer.model.settings.model!r}; leave policy.vllm.url out: a "
                    "server that Lightning starts gets an untied copy of the model"
                )
            if url is not None:
                self._push()  # the server may hold the weights of another run
            self._open = stack.pop_all()

    @contextmanager
    def _serve(self, max_context: int, args: Sequence[str]) -> Generator[str]:
        """Start a server for the block; yields its URL."""
        trainer = self._trainer
        with tempfile.TemporaryDirectory(prefix="lightning-model-") as folder:
            model = resolve_model(trainer.model.settings.model)
            if trainer.model.device.type == "cpu":
                args = (*CPU_ARGS, *args)
                if is_tied(trainer.model.network):
                    self._untied = True
                    model = folder
                    trainer.save_pretrained(Path(folder), untied=True)
            dtype = str(trainer.model.network.dtype).removeprefix("torch.")
            with serve_vllm(model, dtype=dtype, max_context=max_context, args=args) as url:
                yield url

    @property
    def backend(self) -> VllmBackend:
        """See `Trainer.backend`."""
        return self._backend

    def step(self, rows: Sequence[Row], on_batch: OnBatch = ignore_batches) -> Mapping[str, float]:
        """See `Learner.step`. Raises `InfrastructureError` if the server does not get or rejects the new weights."""
        metrics = self._trainer.step(rows, on_batch)
        started = time.monotonic()
        try:
            self._push()
        except InfrastructureError:
            raise
        except Exception as error:
            raise InfrastructureError(f"the vLLM server did not get the new weights: {describe(error)}") from error
        return {**metrics, "seconds_push": time.monotonic() - started}

    def scorer(self, model: str) -> RowScorer:
        """See `Learner.scorer`."""
        return self._trainer.scorer(model)

    def save(self, folder: Path) -> None:
        """See `Learner.save`."""
        self._trainer.save(folder)

    def load(self, folder: Path, *, weights_only: bool = False) -> int:
        """See `Learner.load`."""
        steps = self._trainer.load(folder, weights_only=weights_only)
        self._push()
        return steps

    def save_pretrained(self, folder: Path) -> None:
        """See `TorchTrainer.save_pretrained`."""
        self._trainer.save_pretrained(folder)

    def close(self) -> None:
        """See `Learner.close`. Stops the server if this trainer started it."""
        self._open.close()

    def _push(self) -> None:
        with tempfile.TemporaryDirectory(prefix="lightning-weights-") as folder:
            self._trainer.save_pretrained(Path(folder), untied=self._untied)
            self._backend.push(Path(folder), self._trainer.version)
