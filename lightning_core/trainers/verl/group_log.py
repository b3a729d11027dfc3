"""The groups of a run with verl: which rollouts and counts belong to which of verl's prompts.

In the asynchronous modes, verl's checkpoint has prompts whose groups were incomplete, and requests them again when it resumes, as of a
later step. What the store has of them under their first step is found here and removed.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import reduce
from pathlib import Path

from lightning_core.records.atomic import write_atomically
from lightning_core.records.store import Store
from lightning_core.rollouts.counts import add_counts

_FILE = "verl.groups.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    """A group that began, or groups that were published together."""

    step: int
    tasks: Mapping[str, str]
    """The tasks' ids, by the prompts' ids in verl."""
    rollouts: Mapping[str, Sequence[str]] = field(default_factory=dict[str, Sequence[str]])
    """The ids of those that are trained on, by the prompts' ids. Empty: the group began."""
    counts: Mapping[str, float] = field(default_factory=dict[str, float])


class GroupLog:
    """The log of the run in ``folder``. To be used from one thread."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / _FILE
        self._steps: defaultdict[int, list[_Entry]] = defaultdict(list)
        # A killed process may leave an incomplete last line.
        for line in self._path.read_text(encoding="utf-8").split("\n")[:-1] if self._path.is_file() else ():
            entry = _Entry(**json.loads(line))
            self._steps[entry.step].append(entry)

    def begin(self, uid: str, task_id: str, step: int) -> None:
        """Before the rollouts of the prompt ``uid``."""
        self._add(_Entry(step=step, tasks={uid: task_id}))

    def publish(
        self, step: int, tasks: Mapping[str, str], rollouts: Mapping[str, Sequence[str]], counts: Mapping[str, float]
    ) -> Mapping[str, float]:
        """Before verl can read the rows of these groups, given by the prompts' ids. Returns the counts of ``step`` so far."""
        self._add(_Entry(step=step, tasks=tasks, rollouts=rollouts, counts=counts))
        return _total(self._steps[step])

    def rewind(self, step: int) -> None:
        """Drop what a run resumed after ``step`` repeats."""
        for later in [key for key in self._steps if key > step]:
            del self._steps[later]
        self._write()

    def drop(self, uids: Collection[str], store: Store) -> None:
        """Remove the groups of these prompts, which run again, from ``store`` and the log.

        Counts of groups that were published together are kept if one of them does not run again.
        """
        removed: list[str] = []
        for step, entries in self._steps.items():
            tasks = {task for entry in entries for uid, task in entry.tasks.items() if uid in uids}
            if not tasks:
                continue
            # Another group of the same task may be complete.
            others = {key for entry in entries for uid, ids in entry.rollouts.items() if uid not in uids for key in ids}
            removed += [
                record.id
                for record in store.rollouts(step=step)
                if record.task_id in tasks and record.id not in others and not record.phase.startswith("eval")
            ]
            kept = [entry for entry in entries if not entry.tasks.keys() <= set(uids)]
            if counted := _total(entries):
                store.add_step(step, add_counts(dict.fromkeys(counted, 0), _total(kept)))
            self._steps[step] = kept
        store.remove(removed)
        self._write()

    def _add(self, entry: _Entry) -> None:
        self._steps[entry.step].append(entry)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(f"{json.dumps(asdict(entry))}\n")
            file.flush()
            os.fsync(file.fileno())

    def _write(self) -> None:
        lines = [json.dumps(asdict(entry)) for entries in self._steps.values() for entry in entries]
        write_atomically(self._path, "".join(f"{line}\n" for line in lines))


def _total(entries: Iterable[_Entry]) -> Mapping[str, float]:
    return reduce(add_counts, (entry.counts for entry in entries if entry.counts), {})
