"""The embedded trainer: one model, sampled and trained in this process.

The model is a Hugging Face model on the CPU or one GPU.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_core.backends.torch.engine import SampledModel, TorchBackend
from lightning_core.chat.chat import Chat
from lightning_core.config.algorithm import Algorithm
from lightning_core.config.credit_rules import checked_loss
from lightning_core.config.resolve import PolicySettings
from lightning_core.config.trainer import TrainerSection
from lightning_core.errors import TrainingError
from lightning_core.model.load import LoadedModel
from lightning_core.model.untied import is_tied, untie_saved
from lightning_core.trace import BASE, POLICY
from lightning_core.trainers.torch import checkpoint
from lightning_core.trainers.torch.forward import Forward, Reference
from lightning_core.trainers.torch.objective import Objective, rows_to_train
from lightning_core.trainers.torch.packing import PackedBatch, pack_rows
from lightning_core.trainers.torch.parts import load_policy, open_backend, tune_policy
from lightning_core.trainers.torch.proof import prove_batch, prove_once
from lightning_core.trainers.torch.value_head import ValueHead, prompt_states
from lightning_core.transitions import Row, Transition, transitions_to_rows


class TorchTrainer:
    """A `Trainer` that holds model, optimiser and sampling engine in this process."""

    def __init__(
        self,
        policy: PolicySettings,
        algorithm: Algorithm,
        settings: TrainerSection,
        *,
        seed: int,
        name: str = POLICY,
        loaded: LoadedModel | None = None,
        backend: TorchBackend | None = None,
    ) -> None:
        """The trainer of one policy.

        ``policy`` has the learning rate; ``settings`` has everything else that policies share. ``name``: the name that
        the policy is served under. ``loaded`` and ``backend``: a model and an engine to share; None creates them.
        Raises `ConfigError` for settings that cannot be combined.
        """
        checked_loss(algorithm)
        if settings.threads is not None:
            torch.set_num_threads(settings.threads)
        self.policy = policy
        self.algorithm = algorithm
        self.settings = settings
        self.name = name
        self._loaded = loaded or load_policy(policy)
        self._model = self._loaded.model
        self._tuning = tune_policy(self._loaded, policy, name=name, seed=seed, keep_base=algorithm.kl is not None)
        with self._tuning.active():
            self._forward = Forward(self._model, self._loaded.geometry, self._loaded.constraints)
        self._optimizer = torch.optim.AdamW(
            list(self._tuning.masters.values()),
            lr=policy.learning_rate,
            betas=settings.betas,
            weight_decay=settings.weight_decay,
            fused=True,
        )
        width: int = self._model.get_output_embeddings().weight.shape[1]
        critic = policy.critic
        self._value_head = None if critic is None else ValueHead(width, critic, self._loaded.device)
        self._version = 0
        self._backend = backend or open_backend(settings, self._loaded.max_context, seed=seed)
        self._backend.add(name, self._sampled(self._model, self._tuning.adapter), live=True)
        if backend is None and self.base is not None:
            self._backend.add(BASE, self.base, live=False)

    @property
    def base(self) -> SampledModel | None:
        """The initial weights; None if they are not kept."""
        return None if self._tuning.base is None else self._sampled(self._tuning.base[0])

    def _sampled(self, model: Any, adapter: str | None = None) -> SampledModel:
        return SampledModel(
            model=model,
            geometry=self._loaded.geometry,
            adapters=self._tuning.adapters,
            adapter=adapter,
            constraints=self._loaded.constraints,
        )

    @property
    def steps(self) -> int:
        """See `Trainer.steps`."""
        return self._version

    @property
    def version(self) -> int:
        """Number of updates; the backend stamps it on each response."""
        return self._version

    @property
    def chats(self) -> Mapping[str, Chat]:
        """See `Trainer.chats`."""
        return dict.fromkeys(self._backend.models, self._chat)

    @cached_property
    def _chat(self) -> Chat:
        return Chat(self.tokenizer, stop_token_ids=self.stop_token_ids)

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer."""
        return self._loaded.tokenizer

    @property
    def stop_token_ids(self) -> frozenset[int]:
        """The tokens that end a response, from the model's generation config."""
        return self._loaded.stop_token_ids

    @property
    def backend(self) -> TorchBackend:
        """See `Trainer.backend`."""
        return self._backend

    @property
    def tied(self) -> bool:
        """Whether the output layer shares its weights with the embeddings."""
        return is_tied(self._model)

    @property
    def device(self) -> str:
        """``cpu`` or ``cuda``."""
        return self._loaded.device.type

    @property
    def dtype(self) -> str:
        """The dtype of the weights, such as ``bfloat16``."""
        return str(self._model.dtype).removeprefix("torch.")

    def step(self, rows: Sequence[Row]) -> Mapping[str, float]:
        """See `Trainer.step`.

        Rows whose advantages are all 0 cost nothing, but count in the means of the loss.
        """
        self.check(rows)
        updates = self.algorithm.updates_per_step
        chosen = rows_to_train(rows, self.algorithm)
        batches = pack_rows(rows, chosen, budget=self.settings.micro_batch_tokens)
        objective = Objective(self.algorithm, rows, batches, self._loaded.device)
        metrics: dict[str, float] = {"rows_trained": len(chosen), "packed_tokens": 0, "micro_batches": len(batches)}
        with self._backend.pause(), self._tuning.active(), ExitStack() as undo:
            self._backend.forget(self.name)
            if updates > 1:
                # A later update can fail after earlier ones have changed the weights.
                undo.callback(self.restore, copy.deepcopy(self.state()))
            for update in range(updates if chosen else 0):
                found = self._update(rows, batches, objective)
                # Only the first update compares sampler and trainer on the same weights.
                first = {name: value for name, value in found.items() if name.startswith("logprob_difference")}
                metrics |= found if update == 0 else {n: v for n, v in found.items() if n not in first}
            undo.pop_all()
            self._version += 1
            self._backend.versions[self.name] = self._version
        return metrics

    def expected(self, transitions: Sequence[Transition]) -> Mapping[str, float]:
        """See `Trainer.expected`."""
        value_head = self._require_value_head()
        rows = transitions_to_rows(transitions)
        states: dict[str, Tensor] = {}
        with self._backend.pause(), self._tuning.active(), torch.no_grad():
            for batch in pack_rows(rows, range(len(rows)), budget=self.settings.micro_batch_tokens):
                states |= prompt_states(batch, rows, self._forward.hidden(batch))
        return value_head.expected(states)

    def learn_expected(self, targets: Mapping[str, float]) -> Mapping[str, float]:
        """See `Trainer.learn_expected`."""
        return self._require_value_head().learn(targets)

    def _require_value_head(self) -> ValueHead:
        if self._value_head is None:
            raise TrainingError("this trainer has no critic; set credit.rewards: gae to get one")
        return self._value_head

    def check(self, rows: Sequence[Row]) -> None:
        """Raise `TrainingError` for rows that cannot be trained on."""
        if not rows:
            raise TrainingError("step() got no rows")
        for row in rows:
            if row.advantages is None:
                raise TrainingError(f"a row of rollout {row.rollout!r} has no advantages: assign credit first")
            for name, values in (("advantages", row.advantages), ("logprobs", row.logprobs)):
                if not np.isfinite(values).all():
                    raise TrainingError(f"a row of rollout {row.rollout!r} has {name} that are not finite")
            if len(row.token_ids) > self._backend.max_context:
                raise TrainingError(
                    f"a row of rollout {row.rollout!r} has {len(row.token_ids)} tokens, more than max_context="
                    f"{self._backend.max_context}"
                )
        prove_once(rows)

    def _update(self, rows: Sequence[Row], batches: Sequence[PackedBatch], objective: Objective) -> dict[str, float]:
        """One optimiser update on all micro-batches; returns its metrics."""
        self._tuning.zero_grad()
        if objective.needs_survey():
            with torch.no_grad():
                objective.survey([self._forward.logprobs(batch, rows)[0] for batch in batches])
        loss, sums, maxima = 0.0, Counter[str](), dict[str, float]()
        for number, batch in enumerate(batches):
            prove_batch(rows, batch, objective.sampled[number])
            if self.algorithm.kl is not None and number not in objective.references:
                objective.references[number] = self._reference.logprobs(batch, rows)
            logprobs_E, entropy_E = self._forward.logprobs(batch, rows, entropy=self.algorithm.entropy_weight > 0)
            found = objective.loss(number, logprobs_E, entropy_E)
            found.loss.backward()
            self._tuning.collect_grad()
            loss += float(found.loss.detach())
            sums.update(found.sums)
            maxima = {name: max(value, maxima.get(name, -math.inf)) for name, value in found.maxima.items()}
        norm = self._apply_gradient(loss)
        tokens = sum(len(batch.targets_E) for batch in batches)
        return {
            "loss": loss,
            "grad_norm": norm,
            "learning_rate": self._learning_rate(),
            "packed_tokens": sum(len(batch.token_ids_S) for batch in batches),
            **{name: value / tokens for name, value in sums.items()},
            **maxima,
        }

    def _apply_gradient(self, loss: float) -> float:
        """Clip the gradient and update the weights; returns the gradient's norm before clipping.

        Raises `TrainingError`, and leaves the weights as they are, if ``loss`` or the gradient is not finite.
        """
        masters = list(self._tuning.masters.values())
        norm = float(torch.nn.utils.clip_grad_norm_(masters, self.settings.grad_clip))
        if not math.isfinite(loss) or not math.isfinite(norm):
            self._tuning.zero_grad()
            raise TrainingError(
                f"step {self._version + 1}: the loss is {loss} and the gradient norm {norm}; the weights are unchanged"
            )
        for group in self._optimizer.param_groups:
            group["lr"] = self._learning_rate()
        self._optimizer.step()
        self._tuning.publish()
        self._tuning.zero_grad()
        return norm

    def _learning_rate(self) -> float:
        warmup = self.settings.warmup_steps
        return self.policy.learning_rate * (min(1.0, (self._version + 1) / warmup) if warmup else 1.0)

    @cached_property
    def _reference(self) -> Reference:
        """Passes through the initial weights; with an adapter these are the same model without it."""
        assert self._tuning.base is not None
        model, context = self._tuning.base
        if model is self._model:
            return Reference(self._forward, context)
        return Reference(Forward(model, self._loaded.geometry, self._loaded.constraints), context)

    def save(self, folder: Path) -> None:
        """See `Trainer.save`."""
        with self._backend.pause():
            checkpoint.write(folder, self.state())

    def load(self, folder: Path, *, weights_only: bool = False) -> None:
        """See `Trainer.load`."""
        state = checkpoint.read(folder, self._fingerprint(), weights_only=weights_only)
        with self._backend.pause():
            self._backend.forget(self.name)
            self.restore(state)

    def save_pretrained(self, folder: Path, *, untied: bool = False) -> None:
        """Write the policy as a Hugging Face folder, with adapters merged into the weights.

        ``untied``: write the output layer separately, even if the model shares it with the embeddings.
        """
        with self._backend.pause():
            weights = self._model.state_dict()
            if self._tuning.adapters is not None:
                weights |= self._tuning.adapters.merged(self.name)
            self._model.save_pretrained(folder, state_dict=weights)
            self.tokenizer.save_pretrained(folder)
            if untied and self.tied:
                untie_saved(folder, self._model)

    def close(self) -> None:
        """See `Trainer.close`."""
        self._backend.close()

    def _fingerprint(self) -> dict[str, Any]:
        """The properties that a checkpoint must share with this trainer."""
        return {
            "model_type": self._model.config.model_type,
            "tuning": self.policy.tuning,
            "lora_alpha": None if self.policy.lora is None else self.policy.lora.alpha,
            "weights": {name: list(tensor.shape) for name, tensor in self._tuning.masters.items()},
        }

    def state(self) -> checkpoint.Checkpoint:
        """The state that `restore` continues from. Its tensors are the trained ones, not copies."""
        masters = self._tuning.masters
        return checkpoint.Checkpoint(
            fingerprint=self._fingerprint(),
            version=self._version,
            submitted=self._backend.submitted,
            weights=masters,
            moments=checkpoint.optimizer_moments(self._optimizer, masters),
            critic={} if self._value_head is None else self._value_head.state(),
        )

    @torch.no_grad()
    def restore(self, state: checkpoint.Checkpoint) -> None:
        """Continue from ``state``.

        Sampling must be paused, and the backend must have forgotten this policy.
        """
        for name, master in self._tuning.masters.items():
            master.copy_(state.weights[name])
        self._tuning.publish()
        checkpoint.restore_moments(self._optimizer, self._tuning.masters, state.moments)
        if self._value_head is not None and state.critic:
            self._value_head.restore(state.critic)
        self._version = self._backend.versions[self.name] = state.version
        self._backend.submitted = state.submitted
