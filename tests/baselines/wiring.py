"""How the baselines reach into the product: the fake learner, the run, and what the run left behind.

The only file here that knows how a trainer is plugged in and how rows reach it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from lightning_core import Call, Config, Row, Trace, Transition, fit, load_config
from lightning_core.chat.chat import Chat
from lightning_core.records.store import CallCredit, RolloutRecord, Store
from lightning_core.signals.information_gain.gains import ANSWER_LOGPROBS
from lightning_core.trace import BASE, LOGPROBS_AFTER, POLICY, Floats
from lightning_core.trainers import Trainer, open_run
from lightning_core.trainers.micro_batches import OnBatch, ignore_batches
from lightning_core.transitions import Candidates
from tests.baselines.model import FastByteTokenizer, SeededBackend, logprobs, numbers


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """A rollout of the store."""

    record: RolloutRecord
    trace: Trace
    credit: Mapping[str, CallCredit]
    """By call id."""


@dataclass(frozen=True, kw_only=True)
class Recording:
    """What a run handed to its learner and left in its folder."""

    rows: Sequence[Sequence[Row]]
    """By step, in the learner's order."""
    targets: Sequence[Mapping[str, float]]
    """The returns that the critic was fitted to, by call id; by step."""
    metrics: Sequence[Mapping[str, Any]]
    summary: Mapping[str, Any]
    rollouts: Sequence[Recorded]
    files: Sequence[str]
    """The names of what is in the run's folder."""


@dataclass
class HashLearner:
    """Implements `Learner`, `Critic` and `TokenScorer`. What it computes are hashes of token ids; `step` keeps its rows."""

    config: Config
    steps: int = 0
    rows: list[Sequence[Row]] = field(default_factory=list[Sequence[Row]])
    targets: list[Mapping[str, float]] = field(default_factory=list[Mapping[str, float]])

    def __post_init__(self) -> None:
        names = list(self.config.policies) or [POLICY]
        self.versions = dict.fromkeys(names, 0)
        self.backend = SeededBackend(self.versions)
        chat = Chat(FastByteTokenizer())
        self.chats: Mapping[str, Chat] = dict.fromkeys([*names, BASE], chat)

    def step(self, rows: Sequence[Row], on_batch: OnBatch = ignore_batches) -> Mapping[str, float]:
        self.rows.append(list(rows))
        self.targets.append({})
        self.steps += 1
        learning = [name for name in self.versions if any(row.policy == name for row in rows)]
        metrics: dict[str, float] = {}
        for name in learning or self.versions:
            self.versions[name] += 1
            prefix = f"{name}/" if len(self.versions) > 1 else ""
            metrics |= {f"{prefix}loss": 0.5, f"{prefix}grad_norm": 1.0, f"{prefix}version": self.versions[name]}
        return metrics

    def scorer(self, model: str) -> _HashScorer:
        return _HashScorer(self, "policy" if model == POLICY else "teacher")

    def values(self, transitions: Sequence[Transition]) -> Mapping[str, float]:
        return {
            t.call: numbers("critic", self.steps, t.policy, t.prompt_ids.tolist()).randrange(64) / 64
            for t in transitions
        }

    def fit_values(self, targets: Mapping[str, float]) -> Mapping[str, float]:
        self.targets[-1] = dict(targets)
        return {"critic_loss": 0.25}

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        (folder / "learner.json").write_text(json.dumps({"steps": self.steps, "versions": self.versions}))

    def load(self, folder: Path, *, weights_only: bool = False) -> int:
        raise NotImplementedError("no baseline resumes a run")

    def close(self) -> None:
        """It has nothing to free."""


@dataclass(frozen=True)
class _HashScorer:
    learner: HashLearner
    name: str

    def logprobs(self, rows: Sequence[Row]) -> Mapping[str, Floats]:
        return {call: logprobs(source, length) for call, source, length in self._segments(self.name, rows)}

    def candidates(self, rows: Sequence[Row], count: int) -> Mapping[str, Candidates]:
        found: dict[str, Candidates] = {}
        for call, source, length in self._segments("candidates", rows):
            ids = [source.sample(range(256), count) for _ in range(length)]
            scores = [sorted(logprobs(source, count), reverse=True) for _ in range(length)]
            found[call] = Candidates(token_ids_TK=np.array(ids, dtype="<u4"), logprobs_TK=np.array(scores, dtype="<f4"))
        return found

    def _segments(self, who: str, rows: Sequence[Row]) -> list[tuple[str, Any, int]]:
        """Each call of ``rows``, numbers that its tokens and those before determine, and how many tokens it sampled."""
        steps = self.learner.steps
        return [
            (s.call, numbers(who, steps, row.policy, s.start, row.token_ids[: s.stop].tolist()), s.stop - s.start)
            for row in rows
            for s in row.segments
        ]


def run(sections: Mapping[str, Any]) -> Recording:
    """Train with the configuration ``sections``."""
    learners: list[HashLearner] = []

    def make_trainer(config: Config) -> Trainer:
        learner = HashLearner(config)
        learners.append(learner)
        return Trainer(learner=learner, backend=learner.backend, chats=learner.chats, notes=(), critic=learner)

    with patch.object(open_run, "make_trainer", make_trainer):
        result = fit(config=load_config(sections), progress=False)
    (learner,) = learners
    return Recording(
        rows=learner.rows,
        targets=learner.targets,
        metrics=result.metrics,
        summary=json.loads((result.folder / "summary.json").read_text(encoding="utf-8")),
        rollouts=read_rollouts(result.folder),
        files=sorted(str(path.relative_to(result.folder)) for path in result.folder.rglob("*")),
    )


def read_rollouts(folder: Path) -> list[Recorded]:
    """The rollouts in the store of the run in ``folder``."""
    with Store(folder / "store.db", read_only=True) as store:
        credit: dict[str, dict[str, CallCredit]] = {}
        for one in store.credit():
            credit.setdefault(one.rollout, {})[one.call] = one
        return [
            Recorded(record=record, trace=store.trace(record.id), credit=credit.get(record.id, {}))
            for record in store.rollouts()
        ]


def cross_entropy(row: Row) -> Any:
    """bool [L]: the tokens of ``row`` with a cross-entropy loss; None: none."""
    return None if row.streams.cross_entropy is None else row.cross_entropy_mask


def candidates(row: Row, call: str) -> Candidates | None:
    """The tokens that a teacher proposed for ``call`` in ``row``, if any."""
    return row.streams.candidates.get(call)


def answer_logprobs(call: Call) -> Any:
    """float32 [A]: of the task's answer in place of the response; None: it was not scored."""
    return call.arrays.get(ANSWER_LOGPROBS)


def logprobs_after(call: Call) -> Any:
    """float32 [T]: of the response, after the update; None: they were not measured."""
    return call.arrays.get(LOGPROBS_AFTER)
