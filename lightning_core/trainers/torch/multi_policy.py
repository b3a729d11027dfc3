"""Several policies trained side by side and sampled by one engine.

Each policy has its own weights, optimizer, version and metrics. Policies that are adapters of one model share it in memory
and are sampled in the same batches; every other policy has its own model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from lightning_core.backends.torch.engine import TorchBackend
from lightning_core.chat.chat import Chat
from lightning_core.config.algorithm import Algorithm
from lightning_core.config.resolve import PolicySettings
from lightning_core.config.trainer import TrainerSection
from lightning_core.errors import TrainingError
from lightning_core.model.folders import whole
from lightning_core.model.load import LoadedModel
from lightning_core.model.source import resolve_model
from lightning_core.records.json_file import read_json
from lightning_core.records.run_folder.manifest import write_manifest
from lightning_core.rollouts.signal import TokenScorer
from lightning_core.trace import BASE, Floats
from lightning_core.trainers.micro_batches import OnBatch, ignore_batches
from lightning_core.trainers.torch.build import load_policy, open_backend
from lightning_core.trainers.torch.policy_model import PolicyModel
from lightning_core.trainers.torch.proof import prove_once
from lightning_core.trainers.torch.scorer import RowScorer
from lightning_core.trainers.torch.trainer import TorchTrainer
from lightning_core.transitions import Candidates, Row

_FILE = "policies.json"


@dataclass(frozen=True, slots=True)
class _OwnPolicies:
    """A `TokenScorer` of rows by the policy that sampled them."""

    scorers: Mapping[str, RowScorer]
    """Scorers by policy."""

    def logprobs(self, rows: Sequence[Row]) -> Mapping[str, Floats]:
        return {
            call: logprobs_T
            for name, scorer in self.scorers.items()
            for call, logprobs_T in scorer.logprobs([row for row in rows if row.policy == name]).items()
        }

    def candidates(self, rows: Sequence[Row], count: int) -> Mapping[str, Candidates]:
        return {
            call: found
            for name, scorer in self.scorers.items()
            for call, found in scorer.candidates([row for row in rows if row.policy == name], count).items()
        }


class MultiPolicyTrainer:
    """A `Learner` of several policies."""

    def __init__(
        self,
        policies: Mapping[str, PolicySettings],
        algorithm: Algorithm,
        settings: TrainerSection,
        *,
        seed: int,
        base: str | None = None,
    ) -> None:
        """``policies``: by name.

        ``base``: the model whose initial weights are served as ``base``, if a policy keeps them.
        """
        keeper = _keeper(policies, base)
        policies = {name: replace(policy, keep_base=name == keeper) for name, policy in policies.items()}
        loaded = _load(policies, deterministic=settings.deterministic)
        has_copy = keeper is not None and policies[keeper].tuning != "lora"
        with ExitStack() as stack:
            self._backend = open_backend(settings, min(one.max_context for one in loaded.values()), seed=seed)
            stack.callback(self._backend.close)
            self.policies = {
                name: TorchTrainer(
                    PolicyModel(
                        policy,
                        algorithm,
                        settings,
                        seed=seed,
                        name=name,
                        loaded=loaded[name],
                        share=len(policies) + has_copy,
                    ),
                    self._backend,
                    algorithm,
                    settings,
                    seed=seed,
                )
                for name, policy in policies.items()
            }
            self._chats = _make_chats(loaded, policies)
            if keeper is not None and (initial := self.policies[keeper].model.base) is not None:
                memory = self.policies[keeper].model.memory
                self._backend.add(
                    BASE, initial, live=False, cached_tokens=memory.cache_tokens, row_bytes=memory.row_bytes or None
                )
                self._chats[BASE] = self._chats[keeper]
            stack.pop_all()
        self._steps = 0

    @property
    def steps(self) -> int:
        """Number of completed steps."""
        return self._steps

    @property
    def notes(self) -> Sequence[str]:
        """See `Trainer.notes`."""
        return [f"{name}: {note}" for name, trainer in self.policies.items() for note in trainer.model.notes]

    @property
    def backend(self) -> TorchBackend:
        """See `Trainer.backend`."""
        return self._backend

    @property
    def chats(self) -> Mapping[str, Chat]:
        """See `Trainer.chats`."""
        return self._chats

    def step(self, rows: Sequence[Row], on_batch: OnBatch = ignore_batches) -> Mapping[str, float]:
        """See `Learner.step`. Each policy is updated on its own rows.

        A policy without rows keeps its weights and version.
        """
        own: dict[str, list[Row]] = {name: [] for name in self.policies}
        for row in rows:
            if row.policy not in own:
                raise TrainingError(
                    f"a row of rollout {row.rollout!r} was sampled by {row.policy!r}; expected one of {list(own)!r}"
                )
            own[row.policy].append(row)
        prove_once(rows)
        learning = [name for name in own if own[name]]
        for name in learning:
            self.policies[name].check(own[name])
        metrics: dict[str, float] = {}
        with self._backend.pause(), ExitStack() as undo:
            for name in learning:
                trainer = self.policies[name]
                if name != learning[-1]:
                    # A later policy can fail after this one has changed.
                    undo.callback(trainer.restore, trainer.state().copy())
                metrics |= self._named(name, {**trainer.step(own[name], on_batch), "version": trainer.version})
            undo.pop_all()
            self._steps += 1
        return metrics

    def scorer(self, model: str) -> TokenScorer:
        """See `Learner.scorer`. Each row is scored by its own policy; the configuration admits no other model."""
        return _OwnPolicies({name: trainer.scorer(model) for name, trainer in self.policies.items()})

    def _named(self, name: str, metrics: Mapping[str, float]) -> dict[str, float]:
        """``metrics`` with the policy's name as prefix, unless there is only one policy."""
        return dict(metrics) if len(self.policies) == 1 else {f"{name}/{key}": value for key, value in metrics.items()}

    def save(self, folder: Path) -> None:
        """See `Learner.save`. Each policy gets a subfolder."""
        with self._backend.pause(), whole(folder) as scratch:
            for name, trainer in self.policies.items():
                trainer.save(scratch / name)
            facts = {"steps": self._steps, "policies": list(self.policies)}
            (scratch / _FILE).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
            write_manifest(scratch, step=self._steps, run=folder.parent.parent)
        for name, trainer in self.policies.items():
            trainer.saved_in = folder / name

    def load(self, folder: Path, *, weights_only: bool = False) -> int:
        """See `Learner.load`."""
        try:
            facts = read_json(folder / _FILE)
        except (OSError, ValueError) as error:
            raise TrainingError(f"{str(folder)!r} is not a checkpoint of several policies: {error}") from error
        if facts["policies"] != list(self.policies):
            raise TrainingError(
                f"the checkpoint {str(folder)!r} does not fit: it has the policies {facts['policies']!r}, but this run has "
                f"{list(self.policies)!r}"
            )
        for name, trainer in self.policies.items():
            trainer.load(folder / name, weights_only=weights_only)
        self._steps = facts["steps"]
        return self._steps

    def save_pretrained(self, folder: Path) -> None:
        """Write each policy to ``folder/NAME``; see `TorchTrainer.save_pretrained`."""
        for name, trainer in self.policies.items():
            trainer.save_pretrained(folder / name)

    def close(self) -> None:
        """See `Learner.close`."""
        self._backend.close()


def _keeper(policies: Mapping[str, PolicySettings], base: str | None) -> str | None:
    """The policy that serves the initial weights of the model ``base``.

    Preferably one with adapters, which has them anyway; else one that keeps a copy.
    """
    of_base = [name for name, policy in policies.items() if policy.model == base]
    free = [name for name in of_base if policies[name].tuning == "lora"]
    return next(iter([*free, *(name for name in of_base if policies[name].keep_base)]), None)


def _load(policies: Mapping[str, PolicySettings], *, deterministic: bool) -> dict[str, LoadedModel]:
    """The model of each policy; policies that are adapters of the same model share it."""
    shared: dict[str, LoadedModel] = {}
    found: dict[str, LoadedModel] = {}
    for name, policy in policies.items():
        folder = resolve_model(policy.model)
        key = str(folder.resolve() if isinstance(folder, Path) else folder)
        if policy.tuning != "lora":
            found[name] = load_policy(policy, deterministic=deterministic)
        elif key in shared:
            found[name] = shared[key]
        else:
            found[name] = shared[key] = load_policy(policy, deterministic=deterministic)
    return found


def _make_chats(loaded: Mapping[str, LoadedModel], policies: Mapping[str, PolicySettings]) -> dict[str, Chat]:
    """The chat of each policy; policies with the same model and the same variables of its template share it."""
    shared: dict[tuple[int, str], Chat] = {}
    chats: dict[str, Chat] = {}
    for name, one in loaded.items():
        variables = policies[name].chat_template_kwargs
        key = id(one), json.dumps(variables, sort_keys=True, default=str)
        if key not in shared:
            shared[key] = Chat(one.tokenizer, stop_token_ids=one.stop_token_ids, name=name, template_kwargs=variables)
        chats[name] = shared[key]
    return chats
