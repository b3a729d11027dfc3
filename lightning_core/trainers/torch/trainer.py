"""The embedded trainer: one model, sampled and trained in this process.

The model is a Hugging Face model on the CPU or one GPU.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_core.backends.torch.engine import SampledModel, TorchBackend
from lightning_core.chat.chat import Chat
from lightning_core.config.algorithm import Algorithm
from lightning_core.config.build_rules import checked_loss
from lightning_core.config.resolve import PolicySettings
from lightning_core.config.trainer import TrainerSection
from lightning_core.errors import TrainingError
from lightning_core.model.compute import ComputePlan
from lightning_core.model.folders import whole
from lightning_core.model.load import LoadedModel
from lightning_core.model.merge import layers_of, unmergeable
from lightning_core.model.untied import is_tied
from lightning_core.rollouts.signal import Critic
from lightning_core.trace import BASE, POLICY
from lightning_core.trainers.torch import checkpoint
from lightning_core.trainers.torch.build import load_policy, notes, open_backend, plan_memory, tune_policy
from lightning_core.trainers.torch.forward import Forward, Reference
from lightning_core.trainers.torch.mini_batches import MiniBatch, Update, split_rollouts, step_metrics
from lightning_core.trainers.torch.objective import Objective, rows_to_train
from lightning_core.trainers.torch.packing import PackedBatch, pack_rows, pad_rows
from lightning_core.trainers.torch.proof import check_rows, prove_once
from lightning_core.trainers.torch.saving import write_merged, write_weights
from lightning_core.trainers.torch.scorer import RowScorer, load_other
from lightning_core.trainers.torch.update import Updater
from lightning_core.trainers.torch.value_head import ValueHead, prompt_states
from lightning_core.transitions import Row, Transition, transitions_to_rows


class TorchTrainer:
    """A `Learner` that holds model, optimizer and sampling engine in this process."""

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
        policies: int = 1,
        samples: bool = True,
    ) -> None:
        """The trainer of one policy.

        ``policy`` has the learning rate; ``settings`` has everything else that policies share. ``name``: the name that
        the policy is served under. ``loaded`` and ``backend``: a model and an engine to share; None creates them.
        ``policies``: how many share the memory. ``samples``: whether the engine is used, and not another sampler.
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
        self._seed = seed
        self._updater = Updater(self._loaded, self._tuning, settings, learning_rate=policy.learning_rate)
        width: int = self._model.get_output_embeddings().weight.shape[1]
        critic = policy.critic
        self._value_head = None if critic is None else ValueHead(width, critic, self._loaded.device)
        self._version = 0
        self.saved_in: Path | None = None
        """The last checkpoint, whose frozen weights the next one links."""
        self._backend = backend or open_backend(settings, self._loaded.max_context, seed=seed)
        apart = self.base is not None and self.base.model is not self._model
        with self._tuning.active():
            self._memory = plan_memory(
                self._loaded, self._tuning, settings,
                share=policies + apart, samples=samples, entropy=algorithm.entropy_weight > 0,
            )  # fmt: skip
            self.notes = notes(self._loaded, self._tuning, self._memory)
        cached = self._memory.cache_tokens
        self._backend.add(name, self._sampled(self._model, self._tuning.adapter), live=True, cached_tokens=cached)
        if backend is None and self.base is not None:
            self._backend.add(BASE, self.base, live=False, cached_tokens=cached)

    @property
    def base(self) -> SampledModel | None:
        """The initial weights; None if they are not kept."""
        return None if self._tuning.base is None else self._sampled(self._tuning.base[0])

    def _sampled(self, model: Any, adapter: str | None = None) -> SampledModel:
        return SampledModel(
            model=model,
            path=self._loaded.path,
            adapters=self._tuning.adapters,
            adapter=adapter,
            constraints=self._loaded.constraints,
        )

    @property
    def steps(self) -> int:
        """Number of completed steps."""
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
        variables = self.policy.chat_template_kwargs
        return Chat(self.tokenizer, stop_token_ids=self.stop_token_ids, template_kwargs=variables)

    @property
    def model(self) -> Any:
        """The neural network."""
        return self._model

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
    def unmergeable(self) -> str | None:
        """The reason the policy cannot be written as one model, or None. See `unmergeable`."""
        return unmergeable(self._model, layers_of(self._tuning.parameters)) if self.policy.lora else None

    @property
    def cached_tokens(self) -> int:
        """Tokens that the engine keeps for later prompts."""
        return self._memory.cache_tokens

    @property
    def path(self) -> ComputePlan:
        """The path on which the model is computed."""
        return self._loaded.path

    @property
    def device(self) -> str:
        """``cpu`` or ``cuda``."""
        return self._loaded.device.type

    @property
    def dtype(self) -> str:
        """The dtype of the weights, such as ``bfloat16``."""
        return str(self._model.dtype).removeprefix("torch.")

    def step(self, rows: Sequence[Row]) -> Mapping[str, float]:
        """See `Learner.step`.

        Rows whose advantages are all 0 cost nothing, but count in the means of the loss.
        """
        self.check(rows)
        parts = self._mini_batches(rows)
        updates: list[Update] = []
        with self._backend.pause(), self._tuning.active(), ExitStack() as undo:
            self._backend.forget(self.name)
            total = self.algorithm.updates_per_step * len(parts)
            if total > 1:
                # A later update can fail after earlier ones have changed the weights.
                undo.callback(self.restore, self.state().copy())
            if self.algorithm.importance is not None:
                for part in parts[1:]:  # the proximal policy is the policy at the start of the step
                    self._updater.precompute_logprobs(part)
            for number in range(total):
                part = parts[number % len(parts)]
                updates.append(self._updater.update(part, self._version, compare=number == 0))
            undo.pop_all()
            self._version += 1
            self._backend.versions[self.name] = self._version
        return step_metrics(parts, updates)

    def scorer(self, model: str) -> RowScorer:
        """See `Learner.scorer`."""
        path: ComputePlan = self._loaded.path
        forward: Forward | Reference
        if model == POLICY:
            forward = self._updater.forward
        elif model == BASE:
            assert self.base is not None, "the initial weights are kept for those who name them in the configuration"
            forward = self._updater.reference
        else:
            forward, path = load_other(model, self.policy, self._loaded)
        return RowScorer(
            forward=forward,
            path=path,
            budget=self._memory.micro_batch_tokens,
            vocabulary=self.vocabulary,
            prepared=self._paused,
        )

    @property
    def vocabulary(self) -> int:
        """Number of tokens that the model has logits for."""
        return self._model.get_output_embeddings().weight.shape[0]

    @contextmanager
    def _paused(self) -> Generator[None]:
        """Pause sampling, with the trained weights active."""
        with self._backend.pause(), self._tuning.active():
            yield

    @property
    def critic(self) -> Critic | None:
        """The critic; None if the credit rule needs none."""
        return None if self._value_head is None else self

    def values(self, transitions: Sequence[Transition]) -> Mapping[str, float]:
        """See `Critic.values`."""
        value_head = self._require_value_head()
        rows = transitions_to_rows(transitions)
        states: dict[str, Tensor] = {}
        with self._paused(), torch.no_grad():
            for batch in self._pack(rows, range(len(rows))):
                states |= prompt_states(batch, rows, self._updater.forward.hidden(batch))
        return value_head.expected(states)

    def fit_values(self, targets: Mapping[str, float]) -> Mapping[str, float]:
        """See `Critic.fit_values`."""
        return self._require_value_head().learn(targets)

    def _pack(self, rows: Sequence[Row], chosen: Sequence[int]) -> Sequence[PackedBatch]:
        """The micro-batches of the rows ``chosen``."""
        pack = pad_rows if self._loaded.path.geometry is None else pack_rows
        return pack(rows, chosen, budget=self._memory.micro_batch_tokens)

    def _require_value_head(self) -> ValueHead:
        if self._value_head is None:
            raise TrainingError("this trainer has no critic; set credit.rewards: gae to get one")
        return self._value_head

    def check(self, rows: Sequence[Row]) -> None:
        """Raise `TrainingError` for rows that cannot be trained on."""
        check_rows(rows, max_context=self._backend.max_context)
        prove_once(rows)

    def _mini_batches(self, rows: Sequence[Row]) -> list[MiniBatch]:
        """The mini-batches of a step that have a gradient, in the order of their updates."""
        parts = split_rollouts(rows, self.algorithm.mini_batches, seed=f"{self._seed}:{self._version}")
        found: list[MiniBatch] = []
        for part in parts:
            batches = self._pack(part, rows_to_train(part, self.algorithm))
            if batches:
                objective = Objective(self.algorithm, part, batches, self._loaded.device)
                found.append(MiniBatch(rows=part, batches=batches, objective=objective))
        return found

    def save(self, folder: Path) -> None:
        """See `Learner.save`."""
        with self._backend.pause(), whole(folder) as scratch:
            file = write_weights(scratch, self._loaded, self._tuning, self.policy, earlier=self.saved_in)
            checkpoint.write(scratch, self.state(), weights=file)
        self.saved_in = folder

    def load(self, folder: Path, *, weights_only: bool = False) -> int:
        """See `Learner.load`."""
        state = checkpoint.read(folder, self._fingerprint(), weights_only=weights_only)
        with self._backend.pause():
            self._backend.forget(self.name)
            self.restore(state)
        self.saved_in = folder
        return self._version

    def save_pretrained(self, folder: Path, *, untied: bool = False) -> None:
        """See `write_merged`."""
        with self._backend.pause():
            write_merged(folder, self._loaded, self._tuning, self.policy, untied=untied)

    def close(self) -> None:
        """See `Learner.close`."""
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
            moments=self._updater.optimizer.moments(),
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
        self._updater.optimizer.restore(state.moments)
        if self._value_head is not None and state.critic:
            self._value_head.restore(state.critic)
        self._version = self._backend.versions[self.name] = state.version
        self._backend.submitted = state.submitted
