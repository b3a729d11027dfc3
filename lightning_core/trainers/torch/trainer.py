"""The embedded trainer: one Hugging Face model, sampled in process and trained by AdamW, on the CPU or one GPU."""

from __future__ import annotations

import copy
import logging
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_core.backends.torch.engine import SampledModel, TorchBackend
from lightning_core.chat.chat import Chat
from lightning_core.config.checks import impossible_algorithm
from lightning_core.config.credit_rules import loss_rule
from lightning_core.config.source import dotted
from lightning_core.errors import ConfigError, TrainingError
from lightning_core.model.attention import NAME, TreeAttention, plan_blocks
from lightning_core.model.head import OutputHead
from lightning_core.model.load import LoadedModel, load
from lightning_core.model.settings import TorchTrainerConfig
from lightning_core.model.tuning import Tuning, tune
from lightning_core.model.untied import is_tied, untie_saved
from lightning_core.trace import BASE, POLICY
from lightning_core.trainers.torch import checkpoint
from lightning_core.trainers.torch.critic import Critic, prompt_states
from lightning_core.trainers.torch.objective import Objective, rows_to_train
from lightning_core.trainers.torch.packing import PackedBatch, pack_rows
from lightning_core.trainers.torch.penalties import place_entropy
from lightning_core.trainers.torch.proof import prove_batch, prove_once
from lightning_core.transitions import Row, Transition, transitions_to_rows

logger = logging.getLogger(__name__)


class TorchTrainer:
    """A `Trainer` that holds model, optimiser and sampling engine in this process."""

    def __init__(
        self,
        config: TorchTrainerConfig,
        *,
        name: str = POLICY,
        loaded: LoadedModel | None = None,
        backend: TorchBackend | None = None,
    ) -> None:
        """``name``: the policy's. ``loaded`` and ``backend``: those of others to join; without, it has its own."""
        self.config = config
        self.name = name
        for path, text in impossible_algorithm(config.algorithm, loss_rule(config.algorithm)):
            raise ConfigError(f"{dotted(path)}: {text}")
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        loaded = loaded or load(config)
        self._loaded = loaded
        self._device = loaded.device
        self._geometry = loaded.geometry
        self._constraints = loaded.constraints
        self._model = loaded.model
        self._tuning: Tuning = tune(loaded.model, config, name=name, adapters=loaded.adapters)
        with self._tuning.active():
            self._head = OutputHead(loaded.model, self._geometry)
        self._optimizer = torch.optim.AdamW(
            list(self._tuning.masters.values()),
            lr=config.learning_rate,
            betas=config.betas,
            weight_decay=config.weight_decay,
            fused=True,
        )
        width: int = loaded.model.get_output_embeddings().weight.shape[1]
        self._critic = None if config.critic is None else Critic(width, config.critic, self._device)
        self._version = 0
        self._backend = backend or open_backend(config, loaded.max_context)
        self._backend.add(name, self._sampled(loaded.model, self._tuning.adapter), live=True)
        if backend is None and self.base is not None:
            self._backend.add(BASE, self.base, live=False)

    @property
    def base(self) -> SampledModel | None:
        """The initial weights, if they are kept."""
        return None if self._tuning.base is None else self._sampled(self._tuning.base[0])

    def _sampled(self, model: Any, adapter: str | None = None) -> SampledModel:
        return SampledModel(
            model=model,
            geometry=self._geometry,
            adapters=self._tuning.adapters,
            adapter=adapter,
            constraints=self._constraints,
        )

    @property
    def steps(self) -> int:
        return self._version

    @property
    def version(self) -> int:
        """Updates so far; what the backend stamps on what it samples."""
        return self._version

    @cached_property
    def chats(self) -> Mapping[str, Chat]:
        return dict.fromkeys(self._backend.models, Chat(self.tokenizer, stop_token_ids=self.stop_token_ids))

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of the weights."""
        return self._loaded.tokenizer

    @property
    def stop_token_ids(self) -> frozenset[int]:
        """Tokens that end a response, as the model's generation settings have them."""
        return self._loaded.stop_token_ids

    @property
    def backend(self) -> TorchBackend:
        return self._backend

    @property
    def tied(self) -> bool:
        """Whether the output layer is that of the embeddings."""
        return is_tied(self._model)

    @property
    def device(self) -> str:
        """``cpu`` or ``cuda``."""
        return self._device.type

    @property
    def dtype(self) -> str:
        """The type of the weights, such as ``bfloat16``."""
        return str(self._model.dtype).removeprefix("torch.")

    def step(self, rows: Sequence[Row]) -> Mapping[str, float]:
        """See `Trainer.step`. Rows without any advantage cost nothing, but count where the loss takes means."""
        self.check(rows)
        updates = self.config.algorithm.updates_per_step
        chosen = rows_to_train(rows, self.config.algorithm)
        batches = pack_rows(rows, chosen, budget=self.config.micro_batch_tokens)
        objective = Objective(self.config.algorithm, rows, batches, self._device)
        metrics: dict[str, float] = {"rows_trained": len(chosen), "packed_tokens": 0, "micro_batches": len(batches)}
        with self._backend.pause(), self._tuning.active(), ExitStack() as undo:
            self._backend.forget(self.name)
            if updates > 1:
                # A later update may fail when earlier ones have changed the weights already.
                undo.callback(self.restore, copy.deepcopy(self.state()))
            for update in range(updates if chosen else 0):
                found = self._update(rows, batches, objective)
                # The first pass compares sampler and trainer on the same weights; the last one tells how far it all went.
                first = {name: value for name, value in found.items() if name.startswith("logprob_difference")}
                metrics |= found if update == 0 else {n: v for n, v in found.items() if n not in first}
            undo.pop_all()
            self._version += 1
            self._backend.versions[self.name] = self._version
        return metrics

    def expected(self, transitions: Sequence[Transition]) -> Mapping[str, float]:
        """See `Trainer.expected`."""
        critic = self._need_critic()
        rows = transitions_to_rows(transitions)
        states: dict[str, Tensor] = {}
        with self._backend.pause(), self._tuning.active(), torch.no_grad():
            for batch in pack_rows(rows, range(len(rows)), budget=self.config.micro_batch_tokens):
                states |= prompt_states(batch, rows, self._hidden(batch))
        return critic.expected(states)

    def learn_expected(self, targets: Mapping[str, float]) -> Mapping[str, float]:
        """See `Trainer.learn_expected`."""
        return self._need_critic().learn(targets)

    def _need_critic(self) -> Critic:
        if self._critic is None:
            raise TrainingError("this trainer was made without a critic; credit.rewards: gae makes one")
        return self._critic

    def check(self, rows: Sequence[Row]) -> None:
        """Raise `TrainingError` for rows that no step can be made from."""
        if not rows:
            raise TrainingError("a step was given no rows")
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
        """One optimiser update on all micro-batches together; returns its metrics."""
        self._tuning.zero_grad()
        algorithm = self.config.algorithm
        if objective.needs_survey():
            with torch.no_grad():
                objective.survey([self._logprobs(batch, rows)[0] for batch in batches])
        loss, sums, maxima = 0.0, Counter[str](), dict[str, float]()
        for number, batch in enumerate(batches):
            prove_batch(rows, batch, objective.sampled[number])
            if algorithm.kl is not None and number not in objective.references:
                objective.references[number] = self._reference_logprobs(batch, rows)
            logprobs_E, entropy_E = self._logprobs(batch, rows, entropy=algorithm.entropy_weight > 0)
            found = objective.loss(number, logprobs_E, entropy_E)
            found.loss.backward()
            self._tuning.collect_grad()
            loss += float(found.loss.detach())
            sums.update(found.sums)
            maxima = {name: max(value, maxima.get(name, -math.inf)) for name, value in found.maxima.items()}
        masters = list(self._tuning.masters.values())
        norm = float(torch.nn.utils.clip_grad_norm_(masters, self.config.grad_clip))
        if not math.isfinite(loss) or not math.isfinite(norm):
            self._tuning.zero_grad()
            raise TrainingError(
                f"step {self._version + 1}: loss {loss} with gradient norm {norm}; the weights are as before"
            )
        rate = self._learning_rate()
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        self._tuning.publish()
        self._tuning.zero_grad()
        tokens = sum(len(batch.targets_E) for batch in batches)
        return {
            "loss": loss,
            "grad_norm": norm,
            "learning_rate": rate,
            "packed_tokens": sum(len(batch.token_ids_S) for batch in batches),
            **{name: value / tokens for name, value in sums.items()},
            **maxima,
        }

    @cached_property
    def _base_head(self) -> OutputHead:
        """The initial weights' output layer. With adapters it is the same model, which they have no part in."""
        assert self._tuning.base is not None
        model, context = self._tuning.base
        with context():
            return self._head if model is self._model else OutputHead(model, self._geometry)

    @torch.no_grad()
    def _reference_logprobs(self, batch: PackedBatch, rows: Sequence[Row]) -> Tensor:
        """Logprobs [E] of a micro-batch's trained tokens under the initial weights."""
        assert self._tuning.base is not None
        model, context = self._tuning.base
        with context():
            return self._logprobs(batch, rows, model=model, head=self._base_head)[0]

    def _hidden(self, batch: PackedBatch, model: Any = None) -> Tensor:
        """The last hidden states [P, H] at a micro-batch's places, in the type of the weights; differentiable."""
        tree = TreeAttention(plan_blocks(batch.forest), groups=self._geometry.groups, device=self._device)
        hidden_1SH = (
            (self._model if model is None else model)
            .base_model(
                input_ids=self._tensor(batch.token_ids_S[None]),
                position_ids=self._tensor(batch.position_ids_S[None]),
                use_cache=False,
                **{NAME: tree},
            )
            .last_hidden_state
        )
        return hidden_1SH[0].index_select(0, self._tensor(batch.places_P))

    def _logprobs(
        self,
        batch: PackedBatch,
        rows: Sequence[Row],
        *,
        model: Any = None,
        head: OutputHead | None = None,
        entropy: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Logprobs [E] of a micro-batch's trained tokens under the weights as they are, or those of ``model``.

        And with ``entropy`` that of the distributions that they are of, [E].
        """
        head = head or self._head
        hidden_PH = self._hidden(batch, model)
        temperatures_P, source_E = self._tensor(batch.temperatures_P), self._tensor(batch.source_E)
        entropy_P = (
            place_entropy(head.logits(hidden_PH), temperatures_P, self._forbidden(batch, rows)) if entropy else None
        )
        logprobs_E = head.logprobs(
            hidden_PH, temperatures_P, source_E, self._tensor(batch.targets_E), self._forbidden(batch, rows)
        )
        return logprobs_E, None if entropy_P is None else entropy_P[source_E]

    def _forbidden(self, batch: PackedBatch, rows: Sequence[Row]) -> Iterator[tuple[int, Tensor]]:
        """The places of constrained tokens, each with bool [V] of what was not allowed there."""
        allowed = (
            allowed_V
            for row in (rows[index] for index in batch.rows)
            for segment in row.segments
            if segment.constraint is not None
            for allowed_V in self._constraints.allowed(
                segment.constraint, row.token_ids[segment.start : segment.stop].tolist()
            )
        )
        places = np.argsort(batch.constrained_P)[np.count_nonzero(batch.constrained_P < 0) :]
        for place, allowed_V in zip(places.tolist(), allowed, strict=True):
            yield place, self._tensor(~allowed_V)

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
        """Write the policy as an ordinary Hugging Face folder, adapters merged into the weights they adapt.

        ``untied``: with an output layer of its own, if the model shares it with the embeddings.
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
        return {
            "model_type": self._model.config.model_type,
            "tuning": self.config.tuning,
            "lora_alpha": self.config.lora_alpha if self.config.tuning == "lora" else None,
            "weights": {name: list(tensor.shape) for name, tensor in self._tuning.masters.items()},
        }

    def state(self) -> checkpoint.Checkpoint:
        """All that `restore` needs to go on from here; its tensors are those that training changes."""
        masters = self._tuning.masters
        return checkpoint.Checkpoint(
            fingerprint=self._fingerprint(),
            version=self._version,
            submitted=self._backend.submitted,
            weights=masters,
            moments=checkpoint.optimizer_moments(self._optimizer, masters),
            critic={} if self._critic is None else self._critic.state(),
        )

    @torch.no_grad()
    def restore(self, state: checkpoint.Checkpoint) -> None:
        """Go on from ``state``; sampling is paused, and has forgotten what the weights of now computed."""
        for name, master in self._tuning.masters.items():
            master.copy_(state.weights[name])
        self._tuning.publish()
        checkpoint.restore_moments(self._optimizer, self._tuning.masters, state.moments)
        if self._critic is not None and state.critic:
            self._critic.restore(state.critic)
        self._version = self._backend.versions[self.name] = state.version
        self._backend.submitted = state.submitted

    def _learning_rate(self) -> float:
        warmup = self.config.warmup_steps
        return self.config.learning_rate * (min(1.0, (self._version + 1) / warmup) if warmup else 1.0)

    def _tensor(self, array: np.ndarray[Any, Any]) -> Tensor:
        return torch.from_numpy(array).to(self._device)


def open_backend(config: TorchTrainerConfig, max_context: int) -> TorchBackend:
    """A sampling engine as ``config`` has it, without a model yet."""
    return TorchBackend(
        {},
        max_context=max_context,
        max_batch=config.max_batch,
        gather_ms=config.gather_ms,
        cached_tokens=config.cached_tokens,
        seed=config.seed,
    )
