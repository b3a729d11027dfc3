"""Scores rows with a model: the policy, or the teacher of ``algorithm.distill``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch

from lightning_core.backends.vllm.scorer import ServerScorer, open_scorer
from lightning_core.config.algorithm import Algorithm
from lightning_core.config.distill import Distill
from lightning_core.config.resolve import PolicySettings
from lightning_core.errors import ConfigError
from lightning_core.model.compute import ModelPath
from lightning_core.model.load import LoadedModel
from lightning_core.trace import BASE, POLICY, Floats
from lightning_core.trainers.torch.build import load_policy
from lightning_core.trainers.torch.forward import Forward, Reference
from lightning_core.trainers.torch.packing import PackedBatch, pack_rows, pad_rows
from lightning_core.transitions import Candidates, Row


@dataclass(frozen=True, slots=True)
class RowScorer:
    """Logprobs under one model."""

    forward: Forward | Reference
    path: ModelPath
    budget: int
    """Tokens of a micro-batch."""
    count: int = 0
    """Of `candidates`; 0: not used."""

    @torch.no_grad()
    def logprobs(self, rows: Sequence[Row]) -> dict[str, Floats]:
        """The logprobs of the sampled tokens of ``rows``: float32 [T] by call id, as at sampling."""
        found: dict[str, Floats] = {}
        for batch in self._pack(rows):
            logprobs_E = self.forward.logprobs(batch, rows)
            values_E = logprobs_E[0] if isinstance(logprobs_E, tuple) else logprobs_E
            found |= batch.by_call(rows, values_E.float().cpu().numpy())
        return found

    def candidates(self, rows: Sequence[Row], *, vocabulary: int) -> dict[str, Candidates]:
        """The ``count`` most likely tokens at the sampled tokens of ``rows``, by call id.

        ``vocabulary``: the number of tokens of the policy. Models of one tokenizer can have more, without a meaning.
        """
        found: dict[str, Candidates] = {}
        for batch in self._pack(rows):
            ids_EK, logprobs_EK = self.forward.candidates(batch, rows, self.count, vocabulary=vocabulary)
            ids = batch.by_call(rows, ids_EK.cpu().numpy().astype("<u4"))
            logprobs = batch.by_call(rows, logprobs_EK.cpu().numpy())
            found |= {call: Candidates(token_ids_TK=ids[call], logprobs_TK=logprobs[call]) for call in ids}
        return found

    def _pack(self, rows: Sequence[Row]) -> Sequence[PackedBatch]:
        pack = pad_rows if self.path.geometry is None else pack_rows
        return pack(rows, range(len(rows)), budget=self.budget)


def keeps_base(algorithm: Algorithm) -> bool:
    """Whether the loss or the teacher needs the initial weights."""
    return algorithm.kl is not None or (algorithm.distill is not None and algorithm.distill.teacher == BASE)


def open_teacher(
    distill: Distill,
    settings: PolicySettings,
    loaded: LoadedModel,
    *,
    policy: Forward,
    base: Reference | None,
    budget: int,
) -> RowScorer | ServerScorer:
    """The teacher of ``distill``; ``loaded``, ``policy`` and ``base``: the policy's model, current and initial weights.

    Raises `ConfigError` if another model has another vocabulary.
    """
    count = distill.candidate_count
    if distill.teacher == POLICY:
        return RowScorer(policy, loaded.path, budget, count)
    if distill.teacher == BASE:
        assert base is not None, "the initial weights are kept"
        return RowScorer(base, loaded.path, budget, count)
    if distill.server is not None:
        return open_scorer(distill, loaded.tokenizer)
    other: Mapping[str, int]
    try:
        teacher = load_policy(replace(settings, model=distill.teacher, lora=None, train_layers=None))
    except ConfigError as error:
        raise ConfigError(
            f"algorithm.distill.teacher: {distill.teacher!r} cannot be loaded; expected base, policy, the folder or the name of a model, "
            f"or the URL of a server, which begins with http://: {error}"
        ) from error
    own, other = loaded.tokenizer.get_vocab(), teacher.tokenizer.get_vocab()
    if own != other:
        different = sum(own.get(token) != number for token, number in other.items())
        raise ConfigError(
            f"algorithm.distill.teacher: {distill.teacher!r} has another vocabulary than {settings.model!r} ({different} of "
            f"{len(other)} tokens differ); a teacher scores the policy's tokens, so both need the same tokenizer"
        )
    forward = Forward(teacher.model.requires_grad_(False), teacher.path, teacher.constraints)
    return RowScorer(Reference(forward, nullcontext), teacher.path, budget, count)
