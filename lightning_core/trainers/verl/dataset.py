"""The tasks as a dataset for verl.

In the order of the embedded trainer, so each step has the same tasks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

from lightning_core.rollouts.attempt import Task

TASK = "lightning_task"
"""The column that holds a task as JSON."""


def write_tasks(path: Path, tasks: Sequence[Mapping[str, Any]]) -> None:
    """Write ``tasks`` as JSON lines for `TaskDataset`."""
    path.write_text("".join(f"{json.dumps(task, ensure_ascii=False)}\n" for task in tasks), encoding="utf-8")


def read_tasks(path: Path) -> list[Task]:
    """The tasks in the order in which verl requests them."""
    with path.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


class TaskDataset(Dataset[Mapping[str, Any]]):
    """The tasks of a file that `write_tasks` wrote.

    Constructed by verl (``verl.trainer.ppo.utils.create_rl_dataset``).
    """

    def __init__(self, data_files: Any, **_: Any) -> None:
        self._tasks = read_tasks(Path(str(data_files)))

    def __len__(self) -> int:
        return len(self._tasks)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        task = self._tasks[index]
        return {
            TASK: json.dumps(task, ensure_ascii=False),
            # verl counts prompts by raw_prompt and requires a tensor column. Agents read neither.
            "raw_prompt": [{"role": "user", "content": str(task["id"])}],
            "dummy_tensor": torch.zeros(1, dtype=torch.uint8),
            "index": index,
            "data_source": str(task.get("split", "tasks")),
            "reward_model": {"style": "lightning", "ground_truth": ""},
        }
