"""Several policies that learn side by side: each with weights, optimiser, version and metrics of its own, all sampled by one engine.

Policies that are adapters of one model share it in memory and are sampled in the same batches; the others have models of their own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from lightning_core.backends.torch.engine import TorchBackend
from lightning_core.chat.chat import Chat
from lightning_core.errors import TrainingError
from lightning_core.model.load import LoadedModel, load
from lightning_core.model.settings import TorchTrainerConfig
from lightning_core.model.source import resolve_model
from lightning_core.trace import BASE
from lightning_core.trainers.torch import checkpoint
from lightning_core.trainers.torch.proof import prove_once
from lightning_core.trainers.torch.trainer import TorchTrainer, open_backend
from lightning_core.transitions import Row, Transition

_FILE = "policies.json"


class SeveralTrainer:
    """A `Trainer` of the policies ``configs``, by name; what concerns the sampling engine is taken from the first.

    ``base``: the model whose initial weights are served as ``base``, if a policy that is made of it keeps them.
    """

    def __init__(self, configs: Mapping[str, TorchTrainerConfig], *, base: str | None = None) -> None:
        keeper = _keeper(configs, base)
        configs = {name: replace(config, keep_base=name == keeper) for name, config in configs.items()}
        loaded = _load(configs)
        first = next(iter(configs.values()))
        with ExitStack() as stack:
            self._backend = open_backend(first, min(one.max_context for one in loaded.values()))
            stack.callback(self._backend.close)
            self.policies = {
                name: TorchTrainer(config, name=name, loaded=loaded[name], backend=self._backend)
                for name, config in configs.items()
            }
            chats = {
                id(one): Chat(one.tokenizer, stop_token_ids=one.stop_token_ids, name=name)
                for name, one in loaded.items()
            }
            self._chats = {name: chats[id(one)] for name, one in loaded.items()}
            if keeper is not None and (initial := self.policies[keeper].base) is not None:
                self._backend.add(BASE, initial, live=False)
                self._chats[BASE] = self._chats[keeper]
            stack.pop_all()
        self._steps = 0
        self._asked: dict[str, str] = {}  # by call, the policy whose critic was asked

    @property
    def steps(self) -> int:
        return self._steps

    @property
    def backend(self) -> TorchBackend:
        return self._backend

    @property
    def chats(self) -> Mapping[str, Chat]:
        return self._chats

    def step(self, rows: Sequence[Row]) -> Mapping[str, float]:
        """See `Trainer.step`. Each policy is updated on its own rows; one that has none stays as it is, version and all."""
        if not rows:
            raise TrainingError("a step was given no rows")
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
                    # A later policy may fail when this one has changed already.
                    undo.callback(trainer.restore, _copy(trainer.state()))
                metrics |= self._named(name, {**trainer.step(own[name]), "version": trainer.version})
            undo.pop_all()
            self._steps += 1
        return metrics

    def expected(self, transitions: Sequence[Transition]) -> Mapping[str, float]:
        """See `Trainer.expected`: each call's policy is asked, whose critic knows its own calls alone."""
        self._asked |= {t.call: t.policy for t in transitions}
        return {
            call: value
            for name in dict.fromkeys(t.policy for t in transitions)
            for call, value in self.policies[name].expected([t for t in transitions if t.policy == name]).items()
        }

    def learn_expected(self, targets: Mapping[str, float]) -> Mapping[str, float]:
        """See `Trainer.learn_expected`."""
        metrics: dict[str, float] = {}
        for name, trainer in self.policies.items():
            own = {call: target for call, target in targets.items() if self._asked[call] == name}
            if own:
                metrics |= self._named(name, trainer.learn_expected(own))
        self._asked.clear()
        return metrics

    def _named(self, name: str, metrics: Mapping[str, float]) -> dict[str, float]:
        """Where there is one policy, its metrics are plain."""
        return dict(metrics) if len(self.policies) == 1 else {f"{name}/{key}": value for key, value in metrics.items()}

    def save(self, folder: Path) -> None:
        """See `Trainer.save`. Every policy has a folder in it."""
        with self._backend.pause(), checkpoint.whole(folder) as scratch:
            for name, trainer in self.policies.items():
                trainer.save(scratch / name)
            facts = {"steps": self._steps, "policies": list(self.policies)}
            (scratch / _FILE).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")

    def load(self, folder: Path, *, weights_only: bool = False) -> None:
        """See `Trainer.load`."""
        try:
            facts = json.loads((folder / _FILE).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise TrainingError(f"{str(folder)!r} is not a checkpoint of several policies: {error}") from error
        if facts["policies"] != list(self.policies):
            raise TrainingError(
                f"the checkpoint {str(folder)!r} does not fit: its policies are {facts['policies']!r}, and here they are "
                f"{list(self.policies)!r}"
            )
        for name, trainer in self.policies.items():
            trainer.load(folder / name, weights_only=weights_only)
        self._steps = facts["steps"]

    def save_pretrained(self, folder: Path) -> None:
        """Write each policy as an ordinary Hugging Face folder, ``folder/NAME``; see `TorchTrainer.save_pretrained`."""
        for name, trainer in self.policies.items():
            trainer.save_pretrained(folder / name)

    def close(self) -> None:
        """See `Trainer.close`."""
        self._backend.close()


def _keeper(configs: Mapping[str, TorchTrainerConfig], base: str | None) -> str | None:
    """The policy that keeps the initial weights of ``base``: one with adapters, which has them anyway, or else one that is told to."""
    of_base = [name for name, config in configs.items() if config.model == base]
    free = [name for name in of_base if configs[name].tuning == "lora"]
    return next(iter([*free, *(name for name in of_base if configs[name].keep_base)]), None)


def _load(configs: Mapping[str, TorchTrainerConfig]) -> dict[str, LoadedModel]:
    """The model of each policy: those with adapters share one, as far as it is the same."""
    shared: dict[str, LoadedModel] = {}
    found: dict[str, LoadedModel] = {}
    for name, config in configs.items():
        place = resolve_model(config.model)
        key = str(place.resolve() if isinstance(place, Path) else place)
        if config.tuning != "lora":
            found[name] = load(config)
        elif key in shared:
            found[name] = shared[key]
        else:
            found[name] = shared[key] = load(config)
    return found


def _copy(state: checkpoint.Checkpoint) -> checkpoint.Checkpoint:
    """Outside of the GPU's memory, where a second copy of everything that is trained may not fit."""

    def copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}

    return replace(state, weights=copied(state.weights), moments=copied(state.moments))
