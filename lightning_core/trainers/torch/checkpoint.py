"""Checkpoints: a model that other tools open, and the state of training, written atomically.

model*.safetensors              the weights, the trained ones in float32; see ``model/saved.py``. With LoRA instead
adapter_model.safetensors       the adapter; see ``model/peft.py``
config.json, tokenizer.json, …  what belongs to a Hugging Face folder, or to an adapter
trainer.json                    version, random state, what failed updates left, and the fingerprint of model and tuning
trainer/optimizer.safetensors   AdamW's moments and step counts, ``<name>/<moment>``
trainer/critic.safetensors      the value head and its moments; only with a critic, as any other `Stateful`
manifest.json                   the run that wrote it, and the hash of each file; see ``records/run_folder/manifest.py``

Format 1 had the trained weights in ``weights.safetensors``, by the trainer's names, and no subfolder. It can be read.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from lightning_core.errors import TrainingError
from lightning_core.model import peft
from lightning_core.model.folders import whole
from lightning_core.records.json_file import read_json
from lightning_core.records.run_folder.manifest import OPTIMIZER, write_manifest

FORMAT = 2
_FACTS, _STATE = "trainer.json", "trainer"


class Stateful(Protocol):
    """Learns beside the policy, and is saved and loaded with it."""

    def state(self) -> Mapping[str, Tensor]:
        """All that `restore` needs."""
        ...

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Load what `state` returned."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """The complete state of a trainer."""

    fingerprint: Mapping[str, Any]
    """Model and tuning, as JSON values; must be equal on loading."""
    version: int
    submitted: int
    """Number of requests to the sampling engine, which seeds later requests."""
    skipped: int = 0
    """See `UndoneUpdates.skipped`."""
    micro_batch_tokens: int | None = None
    """See `UndoneUpdates.micro_batch_tokens`."""
    weights: Mapping[str, Tensor]
    moments: Mapping[str, Tensor]
    also: Mapping[str, Mapping[str, Tensor]]
    """The state of each `Stateful`, by the name of its file."""

    def copy(self) -> Checkpoint:
        """A copy in CPU memory: a second copy of all trained weights may not fit on the GPU."""

        def copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
            return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}

        also = {name: copied(tensors) for name, tensors in self.also.items()}
        return replace(self, weights=copied(self.weights), moments=copied(self.moments), also=also)


def optimizer_moments(optimizer: torch.optim.Optimizer, names: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The optimizer's state as named tensors; empty before its first step."""
    return {
        f"{name}/{key}": value
        for name, parameter in names.items()
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def restore_moments(
    optimizer: torch.optim.Optimizer, names: Mapping[str, Tensor], moments: Mapping[str, Tensor]
) -> None:
    """Load what `optimizer_moments` returned."""
    optimizer.state.clear()
    for path, value in moments.items():
        name, _, key = path.rpartition("/")
        # The optimizer's kernels do not check shapes: others crash the process.
        shape = names[name].shape if name in names and key != "step" else ()
        if name not in names or value.shape != shape:
            raise TrainingError(
                f"the optimizer's state does not fit the weights: found {path!r} with the shape {list(value.shape)}, expected "
                f"{f'the shape {list(shape)}' if name in names else f'a weight such as {next(iter(names), None)!r}'}"
            )
        optimizer.state[names[name]][key] = value.to(names[name].device, copy=True)


def write(folder: Path, state: Checkpoint, *, weights: Callable[[Path], str]) -> None:
    """Write ``state`` to ``folder``, whole or not at all. ``weights``: writes the weights there and returns their file's name."""
    with whole(folder) as scratch:
        file = weights(scratch)
        (scratch / _STATE).mkdir()
        save_file(dict(state.moments), scratch / _STATE / OPTIMIZER)
        for name, tensors in state.also.items():
            save_file(dict(tensors), _file_of(scratch / _STATE, name))
        facts = {
            "format": FORMAT,
            "weights": file,
            "fingerprint": state.fingerprint,
            "version": state.version,
            "submitted": state.submitted,
            "skipped": state.skipped,
            "micro_batch_tokens": state.micro_batch_tokens,
        }
        (scratch / _FACTS).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
        write_manifest(scratch, step=state.version, run=folder.parent.parent)


def read_facts(folder: Path) -> dict[str, Any]:
    """The content of ``trainer.json``.

    Raises `TrainingError` if ``folder`` is not a Lightning checkpoint, or is of a later version.
    """
    try:
        facts = read_json(folder / _FACTS)
        if facts["format"] in (1, FORMAT):
            return {"weights": "weights.safetensors", **facts}
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise _not_readable(folder, error) from error
    raise TrainingError(
        f"the checkpoint {str(folder)!r} has format {facts['format']!r}, but this version reads formats up to {FORMAT}: "
        "use the version of lightning-rl that wrote it"
    )


def read_weights(folder: Path) -> dict[str, Tensor]:
    """The trained weights, float32, by the trainer's names. Raises `TrainingError` if they cannot be read."""
    try:
        tensors = load_file(folder / read_facts(folder)["weights"])
    except (OSError, SafetensorError) as error:
        raise _not_readable(folder, error) from error
    return peft.from_peft(tensors) if is_adapter(folder) else tensors


def is_adapter(folder: Path) -> bool:
    """Whether the checkpoint is an adapter in peft's format."""
    return read_facts(folder)["weights"] == peft.WEIGHTS


def read(
    folder: Path, fingerprint: Mapping[str, Any], *, also: Iterable[str] = (), weights_only: bool = False
) -> Checkpoint:
    """Read a checkpoint.

    ``also``: the names of the further states to read, if it has them.
    ``weights_only``: skip the moments, which are twice as large as the weights.
    Raises `TrainingError` if it is not a checkpoint, has another fingerprint, has no moments, or its shapes are not its own.
    """
    facts = read_facts(folder)
    found: dict[str, Any] = facts["fingerprint"]
    for key in dict.fromkeys((*fingerprint, *found)):
        if found.get(key) != fingerprint.get(key):
            raise TrainingError(
                f"the checkpoint {str(folder)!r} does not fit the configuration: {_difference(key, found.get(key), fingerprint.get(key))}. "
                "Restore the settings of policy and policies that the run began with, or start a new run from its weights (policy.model)"
            )
    state = folder if facts["format"] == 1 else folder / _STATE
    if not weights_only and not (state / OPTIMIZER).exists():
        raise TrainingError(
            f"the checkpoint {str(folder)!r} has no optimizer state to resume from: only the two newest checkpoints of a run "
            "keep it. The weights can be evaluated, served and exported"
        )
    try:
        moments = {} if weights_only else load_file(state / OPTIMIZER)
        files = {} if weights_only else {name: _file_of(state, name) for name in also}
        further = {name: load_file(file) for name, file in files.items() if file.exists()}
    except (OSError, SafetensorError) as error:
        raise _not_readable(folder, error) from error
    weights = read_weights(folder)
    shapes = {name: list(tensor.shape) for name, tensor in weights.items()}
    if different := sorted(name for name, shape in found["weights"].items() if shapes.get(name) != shape):
        name = different[0]
        raise TrainingError(
            f"the checkpoint {str(folder)!r} is damaged: its weight {name!r} has the shape {shapes.get(name)}, expected "
            f"{found['weights'][name]} ({_FACTS})"
        )
    return Checkpoint(
        fingerprint=found,
        version=facts["version"],
        submitted=facts["submitted"],
        skipped=facts.get("skipped", 0),
        micro_batch_tokens=facts.get("micro_batch_tokens"),
        weights=weights,
        moments=moments,
        also=further,
    )


def _file_of(folder: Path, name: str) -> Path:
    return folder / f"{name}.safetensors"


def _difference(name: str, found: Any, expected: Any) -> str:
    """The difference as a text; of two mappings it names the first entry that differs, as the weights have an entry each."""
    if isinstance(found, Mapping) and isinstance(expected, Mapping):
        there, here = cast("Mapping[str, Any]", found), cast("Mapping[str, Any]", expected)
        key = next(key for key in (*there, *here) if there.get(key) != here.get(key))
        return _difference(f"{name} {key!r}", there.get(key), here.get(key))
    return f"its {name} is {found!r}, but this trainer's is {expected!r}"


def _not_readable(folder: Path, error: Exception) -> TrainingError:
    return TrainingError(f"{str(folder)!r} is not a checkpoint, or is damaged: {type(error).__name__}: {error}")
