"""The progress and the results of ``lightning-rl improve``, as its folder has them."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from lightning_core.errors import RecordError
from lightning_core.records.atomic import write_atomically
from lightning_core.records.json_file import read_json
from lightning_core.records.run_folder.lock import is_running
from lightning_core.records.run_folder.runs import State
from lightning_core.records.statistics.intervals import Estimate
from lightning_core.records.statistics.measured import EvaluationSummary, read_evaluation

IMPROVEMENT = "improve.json"
"""The file's name."""
PROVIDER, POLICY, PROMPTS, TEACHER, WARM, TRAIN = "provider", "policy", "prompts", "teacher", "warm start", "train"
"""The stages. The name of an evaluation or a later round begins with that of its stage."""
STAGES = (PROMPTS, WARM, TRAIN)
"""The stages that can be left out."""
_ORDER = (PROVIDER, POLICY, PROMPTS, TEACHER, WARM, TRAIN)


class Note(NamedTuple):
    """Why a stage was left out, used or not used."""

    stage: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StageResult:
    """A command that has ended."""

    name: str
    command: str
    run: str | None
    """The name of the run that it recorded."""
    minutes: float
    result: EvaluationSummary | None
    """On held-out tasks; None if they were not evaluated."""
    over_policy: Estimate | None
    """Its reward minus that of the untrained policy, paired by task."""
    over_provider: Estimate | None


class CurrentStage(NamedTuple):
    """A command that runs."""

    name: str
    command: str


class PathEntry(NamedTuple):
    """A stage on the way from the provider's model to the best policy."""

    name: str
    stage: StageResult | None
    """None: not run."""
    command: str | None
    notes: Sequence[str]
    state: Literal["done", "running", "ended early", "left out", "pending"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Improvement:
    """All stages so far."""

    name: str
    """The folder's name."""
    command: str
    """The command line."""
    model: str | None
    """The provider's model."""
    started: float
    """Seconds since the epoch."""
    minutes: float
    """Minutes until the file was written."""
    minutes_limit: float | None
    usd: float
    """Known cost of the evaluations so far."""
    usd_limit: float | None
    tokens_limit: int | None
    """Tokens that training may sample."""
    stages: Sequence[StageResult]
    current: CurrentStage | None
    notes: Sequence[Note]
    best: str | None
    """The name of the stage with the best policy so far."""
    result: Sequence[str]
    """The result so far, in sentences."""
    use: str | None
    """The command that serves the best policy, or the settings that use it."""
    finished: bool = False
    problem: str | None = None
    """Why it ended early."""

    @property
    def provider(self) -> StageResult | None:
        return next((stage for stage in self.stages if stage.name == PROVIDER), None)

    @property
    def is_better(self) -> bool:
        """Whether a stage is better than the untrained policy."""
        return self.best not in (None, POLICY)

    def write(self, folder: Path) -> None:
        """Write the file in ``folder``."""
        write_atomically(folder / IMPROVEMENT, json.dumps(_without_nan(asdict(self)), indent=2, allow_nan=False))

    def state(self, folder: Path) -> State:
        """Its state on this machine; ``folder``: where it was read."""
        return "running" if is_running(folder) else "finished" if self.finished else "stopped"

    def minutes_now(self, state: State) -> float:
        """Minutes used; of a running one, whole minutes until now."""
        return (time.time() - self.started) // 60 if state == "running" else self.minutes

    def path(self, state: State) -> list[PathEntry]:
        """The stages in order, with those that run, were left out, or have not begun."""
        entries = [PathEntry(s.name, s, s.command, self._notes(s.name), "done") for s in self.stages]
        if self.current is not None:
            now = "running" if state == "running" else "ended early"
            entries.append(PathEntry(self.current.name, None, self.current.command, (), now))
        for name in dict.fromkeys(note.stage for note in self.notes):
            if all(entry.name != name for entry in entries):
                entries.append(PathEntry(name, None, None, self._notes(name), "left out"))
        if state == "running":
            begun = {_place(entry.name) for entry in entries}
            pending = [name for name in STAGES if _place(name) not in begun]
            entries += [PathEntry(name, None, None, (), "pending") for name in pending]
        return sorted(entries, key=lambda entry: _place(entry.name))

    def _notes(self, stage: str) -> list[str]:
        return [note.text for note in self.notes if note.stage == stage]


def read_improvement(folder: Path) -> Improvement:
    """The file in ``folder``. Raises `RecordError` if it cannot be read."""
    path = folder / IMPROVEMENT
    try:
        data: dict[str, Any] = read_json(path)
        data["stages"] = [_stage(one) for one in data["stages"]]
        data["notes"] = [Note(*one) for one in data["notes"]]
        data["current"] = None if data["current"] is None else CurrentStage(*data["current"])
        return Improvement(**data)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RecordError(
            f"{path} cannot be read: {error}; it is damaged, or of another version of lightning-rl"
        ) from error


def _stage(data: dict[str, Any]) -> StageResult:
    if data["result"] is not None:
        data["result"] = read_evaluation(data["result"])
    for name in ("over_policy", "over_provider"):
        data[name] = _estimate(data[name])
    return StageResult(**data)


def _estimate(data: list[float | None] | None) -> Estimate | None:
    return None if data is None else Estimate(*(math.nan if value is None else value for value in data))


def _without_nan(value: Any) -> Any:
    """``value`` with None for NaN, which JSON does not have."""
    if isinstance(value, dict):
        return {key: _without_nan(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(one) for one in value]
    return None if isinstance(value, float) and math.isnan(value) else value


def _place(name: str) -> int:
    return next((place for place, first in enumerate(_ORDER) if name.startswith(first)), len(_ORDER))
