"""Scores rows under a model: the policy, its initial weights, or another model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch

from lightning_core.config.resolve import PolicySettings
from lightning_core.errors import ConfigError
from lightning_core.model.compute import ComputePlan
from lightning_core.model.load import LoadedModel
from lightning_core.trace import BASE, POLICY, Floats
from lightning_core.trainers.torch.build import load_policy
from lightning_core.trainers.torch.forward import Forward, Reference
from lightning_core.trainers.torch.packing import PackedBatch, pack
from lightning_core.trainers.torch.policy_model import PolicyModel
from lightning_core.transitions import Candidates, Row


@dataclass(frozen=True, slots=True, kw_only=True)
class RowScorer:
    """A `TokenScorer` with one model."""

    forward: Forward | Reference
    path: ComputePlan
    policy: PolicyModel
    """The policy that is trained, which has the size of micro-batches."""
    vocabulary: int
    """Number of tokens of the policy. Models of one tokenizer can have more, without a meaning."""
    prepared: Callable[[], AbstractContextManager[object]]
    """Entered around each use: sampling pauses and the trained weights are active."""

    @torch.no_grad()
    def logprobs(self, rows: Sequence[Row]) -> dict[str, Floats]:
        """See `TokenScorer.logprobs`."""
        found: dict[str, Floats] = {}
        with self.prepared():
            for batch in self._pack(rows):
                logprobs_E = self.forward.logprobs(batch, rows)
                values_E = logprobs_E[0] if isinstance(logprobs_E, tuple) else logprobs_E
                found |= batch.by_call(rows, values_E.float().cpu().numpy())
        return found

    def candidates(self, rows: Sequence[Row], count: int) -> dict[str, Candidates]:
        """See `TokenScorer.candidates`."""
        found: dict[str, Candidates] = {}
        with self.prepared():
            for batch in self._pack(rows):
                ids_EK, logprobs_EK = self.forward.candidates(batch, rows, count, vocabulary=self.vocabulary)
                ids = batch.by_call(rows, ids_EK.cpu().numpy().astype("<u4"))
                logprobs = batch.by_call(rows, logprobs_EK.cpu().numpy())
                found |= {call: Candidates(token_ids_TK=ids[call], logprobs_TK=logprobs[call]) for call in ids}
        return found

    def _pack(self, rows: Sequence[Row]) -> Sequence[PackedBatch]:
        return pack(self.path, rows, range(len(rows)), budget=self.policy.memory.micro_batch_tokens)


def open_scorer(
    policy: PolicyModel, model: str, *, prepared: Callable[[], AbstractContextManager[object]]
) -> RowScorer:
    """The scorer of ``model`` in the trainer of ``policy``; see `Learner.scorer`. ``prepared``: see `RowScorer`."""
    path = policy.path
    forward: Forward | Reference
    if model == POLICY:
        forward = policy.forward
    elif model == BASE:
        forward = policy.reference
    else:
        forward, path = load_other(model, policy.settings, policy.loaded)
    return RowScorer(forward=forward, path=path, policy=policy, vocabulary=policy.vocabulary, prepared=prepared)


def load_other(model: str, settings: PolicySettings, own: LoadedModel) -> tuple[Reference, ComputePlan]:
    """Another ``model`` than the policy's ``own``. Raises `ConfigError` if it cannot be loaded, or has another vocabulary."""
    other: Mapping[str, int]
    try:
        loaded = load_policy(replace(settings, model=model, lora=None, train_layers=None))
    except ConfigError as error:
        raise ConfigError(
            f"{model!r} cannot be loaded; expected base, policy, the folder or the name of a model, or the URL of a server, which begins "
            f"with http://: {error}"
        ) from error
    vocabulary, other = own.tokenizer.get_vocab(), loaded.tokenizer.get_vocab()
    if vocabulary != other:
        different = sum(vocabulary.get(token) != number for token, number in other.items())
        raise ConfigError(
            f"{model!r} has another vocabulary than {settings.model!r} ({different} of {len(other)} tokens differ); a teacher scores the "
            "policy's tokens, so both need the same tokenizer"
        )
    forward = Forward(loaded.model.requires_grad_(False), loaded.path, loaded.constraints)
    return Reference(forward, nullcontext), loaded.path
