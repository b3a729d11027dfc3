"""Converts verl's batch of prompts to tasks."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tensordict import NonTensorData
from torch import Tensor

from lightning_core.rollouts.attempt import Task
from lightning_core.trainers.verl.dataset import TASK
from lightning_core.trainers.verl.rows import PromptGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One prompt in verl: a task to attempt several times."""

    group: PromptGroup
    task: Task
    training: bool

    @property
    def uid(self) -> str:
        """The prompt's id in verl."""
        return self.group.uid

    @property
    def step(self) -> int:
        """verl's ``global_steps`` when it requested the prompt."""
        return self.group.step

    @property
    def partition(self) -> str:
        """The prompt's partition in TransferQueue."""
        return "train" if self.training else "val"


def read_prompts(batch: Any) -> list[Prompt]:
    """The prompts of verl's TensorDict.

    Its columns: `TaskDataset`'s, and ``uid``, ``global_steps`` and ``validate``.
    """
    columns = {key: _column(value, len(batch)) for key, value in batch.items()}
    training = not any(columns.pop("validate", [False]))
    prompts: list[Prompt] = []
    for index in range(len(batch)):
        row: Mapping[str, Any] = {key: column[index] for key, column in columns.items()}
        kept = {key: value for key, value in row.items() if key not in ("uid", "global_steps")}
        group = PromptGroup(uid=str(row["uid"]), columns=kept, step=int(row["global_steps"]))
        prompts.append(Prompt(group=group, task=json.loads(row[TASK]), training=training))
    return prompts


def _column(value: Any, length: int) -> Sequence[Any]:
    """A column as a list.

    TensorDict stores a value that is the same for all rows as `NonTensorData`.
    """
    if isinstance(value, Tensor):
        return list(value.unbind(0))
    if isinstance(value, NonTensorData):
        return [value.data] * length
    return [getattr(item, "data", item) for item in value]
