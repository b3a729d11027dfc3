"""BFCL's ``multi_turn_base`` in three fixed splits, and easier subsets of it.

The tasks are ordered by their classes and, within these, by a checksum of the user's first message. Of each ten, six are training tasks,
two validation and two test tasks. So every split has the same mix of classes, and a task stays in its split with every argument.

All sources take the same arguments:

- ``turns``: keep only so many of the user's turns, from the first on.
- ``classes``: only tasks with at most so many classes.
- ``calls``: only tasks whose kept turns have at most so many gold calls.
- ``tools``: ``classes``, all functions of the task's classes, as in BFCL; or ``needed``, only those in the gold calls of the kept turns,
  which tells the agent a part of the solution.
- ``steps``: maximum model calls in a turn; 20 in BFCL.
- ``turn_reward``: the part of the reward that is given turn by turn; the rest is for the whole task.
- ``examples``: whether the prompt begins with solved tasks about other functions, and messages end with a reminder, for small models.
"""

from __future__ import annotations

import zlib
from typing import Any, Literal

from examples.bfcl.wheel import entries, function_docs, gold

Task = dict[str, Any]
Tools = Literal["classes", "needed"]
SPLITS = {"train": range(6), "validation": range(6, 8), "test": range(8, 10)}


def train(**options: Any) -> list[Task]:
    """120 tasks, without options."""
    return _tasks("train", **options)


def validation(**options: Any) -> list[Task]:
    """40 tasks, without options."""
    return _tasks("validation", **options)


def test(**options: Any) -> list[Task]:
    """40 tasks, without options."""
    return _tasks("test", **options)


def held_out(**options: Any) -> list[Task]:
    """The validation and test tasks. A run's summary reports each split separately."""
    return [*validation(**options), *test(**options)]


def split_of() -> dict[str, str]:
    """The split of each task, by id."""
    ordered = sorted(
        entries().values(), key=lambda entry: (sorted(entry["involved_classes"]), _checksum(_first(entry)))
    )
    names = {place: name for name, places in SPLITS.items() for place in places}
    return {entry["id"]: names[index % 10] for index, entry in enumerate(ordered)}


def called(call: str) -> str:
    """The function of a gold call."""
    return call.partition("(")[0].strip()


def _tasks(
    split: str,
    *,
    turns: int | None = None,
    classes: int | None = None,
    calls: int | None = None,
    tools: Tools = "classes",
    steps: int = 20,
    turn_reward: float = 0.0,
    examples: bool = False,
) -> list[Task]:
    if tools not in ("classes", "needed"):
        raise ValueError(f"tools is {tools!r}: expected 'classes' or 'needed'")
    if not 0 <= turn_reward <= 1:
        raise ValueError(f"turn_reward is {turn_reward}: expected a number from 0 to 1")
    for option, value in {"turns": turns, "classes": classes, "calls": calls, "steps": steps}.items():
        if value is not None and value < 1:
            raise ValueError(f"{option} is {value}: expected 1 or more")
    tasks: list[Task] = []
    members = [name for name, part in split_of().items() if part == split]
    for name in sorted(members, key=_checksum):
        entry, answer = entries()[name], gold()[name][:turns]
        number = sum(map(len, answer))
        # Three gold turns have no call. A task with none at all would be solved by doing nothing.
        if not number or len(entry["involved_classes"]) > (classes or 99) or number > (calls or 99):
            continue
        tasks.append(
            {
                "id": name,
                "split": split,
                "classes": sorted(entry["involved_classes"]),
                "turns": [turn[0]["content"] for turn in entry["question"][:turns]],
                "scored": [bool(turn) for turn in answer],
                "functions": _functions(entry, answer, tools),
                "steps": steps,
                "turn_reward": turn_reward,
                "examples": examples,
            }
        )
    return tasks


def _functions(entry: dict[str, Any], answer: list[list[str]], tools: Tools) -> list[str]:
    names = [name for class_name in entry["involved_classes"] for name in function_docs(class_name)]
    needed = {called(call) for turn in answer for call in turn}
    return names if tools == "classes" else [name for name in names if name in needed]


def _first(entry: dict[str, Any]) -> str:
    """The user's first message, which two tasks have in common."""
    return entry["question"][0][0]["content"]


def _checksum(text: str) -> int:
    return zlib.crc32(text.encode())
