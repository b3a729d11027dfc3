"""Runs of `tests.bandit` that are disturbed, in processes of their own, and how a run differs from an undisturbed one."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from lightning_core.records.run_folder.checkpoints import checkpoints
from lightning_core.records.store import LEFT_OUT, Store
from tests import warm
from tests.bandit_runs import settings
from tests.tiny_model import make_tiny_model

LIMIT = 300.0
"""Seconds after which a run that goes on counts as one that hangs."""
_PROBLEMS = ("lightning-rl: ", "WARNING: ", "ERROR: ", "checkpoint saved")
_LOGGED = re.compile(r"^(WARNING|ERROR): ")
_CLI = ("-m", "lightning_core.tools.cli")
_NOT_THEIRS = re.compile(r"seconds|per_second|memory|cpu")
"""Metrics that measure the machine."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How a process ended: its exit code, or minus the number of the signal that ended it, and its output with standard error."""

    code: int
    output: str

    @property
    def traceback(self) -> bool:
        return "Traceback (most recent call last)" in self.output

    @property
    def message(self) -> str:
        """The first lines with a problem, without the places of log messages; empty after a run without one."""
        lines = [_LOGGED.sub("", line).strip() for line in self.output.splitlines() if line.startswith(_PROBLEMS)]
        return " ".join(lines[:2])


@dataclass(frozen=True, slots=True)
class Content:
    """What a run has computed."""

    weights: str
    """Digest of the newest checkpoint's weights and optimizer."""
    metrics: tuple[str, ...]
    rollouts: Counter[tuple[Any, ...]]
    """Phase, step, task, status, reward and sampled token ids of each rollout that counts."""

    @property
    def places(self) -> Counter[tuple[Any, ...]]:
        """Phase, step and task of each rollout."""
        return Counter(place[:3] for place in self.rollouts.elements())


@dataclass(frozen=True, slots=True)
class Difference:
    """What a disturbed run has other than an undisturbed one."""

    lost: int
    """Rollouts of the undisturbed run, by phase, step and task, that this one does not have."""
    doubled: int
    """Rollouts that only this one has."""
    weights: bool
    """Whether the weights are the same to the bit."""
    records: bool
    """Whether metrics and rollouts with their tokens are the same."""


def difference(expected: Content, found: Content) -> Difference:
    return Difference(
        lost=(expected.places - found.places).total(),
        doubled=(found.places - expected.places).total(),
        weights=expected.weights == found.weights,
        records=expected.metrics == found.metrics and expected.rollouts == found.rollouts,
    )


def content(folder: Path) -> Content:
    """The content of the run in ``folder``."""
    digest = hashlib.sha256()
    for path in sorted(checkpoints(folder)[-1].rglob("*.safetensors")):
        digest.update(path.name.encode() + path.read_bytes())
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    metrics = tuple(
        json.dumps({k: v for k, v in json.loads(line).items() if not _NOT_THEIRS.search(k)}, sort_keys=True)
        for line in lines
    )
    rollouts: Counter[tuple[Any, ...]] = Counter()
    with Store(folder / "store.db", read_only=True) as store:
        for record in store.rollouts():
            if record.phase != "eval_unfinished" and record.status not in LEFT_OUT:
                tokens = tuple(_ids(call.output_ids) for call in store.trace(record.id).calls)
                rollouts[record.phase, record.step, record.task_id, record.status, record.reward, tokens] += 1
    return Content(digest.hexdigest(), metrics, rollouts)


def _ids(tokens: Any) -> tuple[int, ...]:
    return () if tokens is None else tuple(int(token) for token in tokens)


_BASE: Mapping[str, Mapping[str, Any]] = {
    "rollouts": {"tasks_per_step": 2, "group_size": 4, "concurrency": 16, "executor": "task"},
    "trainer": {"steps": 4, "checkpoint_every": 1, "keep_checkpoints": 3, "deterministic": True},
    "tasks": {"eval": "tests.chaos.agents:held_out"},
    "eval": {"every": 2},
}
VARIANTS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "plain": {},
    "processes": {"rollouts": {"executor": "process", "concurrency": 4}},
    "lora": {"policy": {"tuning": "lora", "lora": {"rank": 4}}, "trainer": {"checkpoint_every": 2}},
    "refill": {"rollouts": {"refill": 2}, "tasks": {"sampling": "curriculum"}, "eval": {"solved": 0.5}},
    "forks": {
        "rollouts": {"forks": {"points": 1, "samples": 2}},
        "credit": {"rewards": "vine", "advantage": "none"},
        "tasks": {"eval": None},
        "eval": {"every": 0},
    },
    "policies": {
        "tasks": {"train": "tests.two_bandits:tasks", "eval": None},
        "eval": {"every": 0},
        "credit": {"rewards": "explicit", "group_by": ["task", "agent"]},
    },
}
"""Settings of runs, by name. Not all of them write a checkpoint after each step."""
PROGRAMS: Mapping[str, Mapping[str, Any]] = {
    "policies": {
        "agent": "tests.two_bandits:solve",
        "policies": {
            "talk": {"agents": ["talker"], "tuning": "lora", "lora": {"rank": 4}},
            "count": {"agents": ["counter"]},
        },
    },
    "forks": {"agent": "tests.signals.forked_agents:conversation"},
}
"""What else the runs of a variant have."""


class Bench:
    """The folder ``root`` with a model, a configuration and an undisturbed run of it."""

    def __init__(self, root: Path, variant: str = "plain") -> None:
        """``variant``: one of `VARIANTS`."""
        self.root = root
        make_tiny_model(root / "model")
        changes = VARIANTS[variant]
        sections = {
            name: {**section, **changes.get(name, {})}
            for name, section in {**{key: {} for key in changes}, **_BASE}.items()
        }
        self.file = root / "lightning.json"
        self.file.write_text(json.dumps({**settings(root / "model", root, **sections), **PROGRAMS.get(variant, {})}))
        warm.run(["-c", "pass"])
        before = warm.cpu_seconds()
        self.whole = Trial(self, "whole")
        ended = self.whole.end()
        assert ended.code == 0, ended.output
        self.seconds = warm.cpu_seconds() - before
        """The CPU seconds of an undisturbed run."""
        self.content = content(self.whole.folder)

    def trial(self, name: str) -> Trial:
        shutil.rmtree(self.root / name, ignore_errors=True)
        return Trial(self, name)


class Trial:
    """A run that can be started again and again: with ``--resume`` once it has a folder."""

    def __init__(self, bench: Bench, name: str) -> None:
        self.bench = bench
        self.name = name
        self.folder = bench.root / name
        self.overrides: list[str] = []
        self.environment: dict[str, str] = {}

    def start(self, *overrides: str, before: str = "") -> warm.Warm:
        """The running command. ``before``: Python that its process executes first."""
        arguments = ["train", str(self.bench.file), f"run.name={self.name}", *self.overrides, *overrides]
        if any((self.folder / name).exists() for name in ("config.yaml", "store.db")):
            arguments.append("--resume")
        program = f"import sys\n{before}\nfrom lightning_core.tools.cli.main import main\nsys.exit(main(sys.argv[1:]))"
        command = ["-c", program] if before else list(_CLI)
        return warm.Warm([*command, *arguments], env={**os.environ, **self.environment}, merged=True)

    def end(self, *overrides: str, before: str = "") -> Ended:
        """Start, and wait until it ends."""
        return finish(self.start(*overrides, before=before))

    def until(self, line: str, number: int = signal.SIGKILL, *, before: str = "") -> Ended:
        """Start, and send a signal after the first output line that contains ``line``."""
        return self.when(lambda process: any(line in printed for printed in process.stdout), number, before=before)

    def when(self, happened: Callable[[warm.Warm], object], number: int = signal.SIGKILL, *, before: str = "") -> Ended:
        """Start, and send a signal when ``happened`` returns. It may read lines of the output."""
        process = self.start(before=before)
        happened(process)
        process.send_signal(number)
        return finish(process)

    def spent(self, seconds: float, process: warm.Warm) -> None:
        """Wait until the process has used so many CPU seconds, or has ended."""
        ticks = os.sysconf("SC_CLK_TCK")
        while (used := cpu_ticks(process.pid)) is not None and used < seconds * ticks:
            time.sleep(0.002)

    def newest(self) -> Path:
        return checkpoints(self.folder)[-1]

    def difference(self) -> Difference:
        return difference(self.bench.content, content(self.folder))


def finish(process: warm.Warm) -> Ended:
    """The rest of its output, and its end. A process that does not end within `LIMIT` is killed."""
    alarm = _Alarm(process)
    with process, alarm:
        output = process.stdout.read()
        code = process.wait()
    return Ended(code, output + ("\nIT HUNG" if alarm.rang else ""))


class _Alarm:
    def __init__(self, process: warm.Warm) -> None:
        import threading

        self.rang = False
        self._process = process
        self._timer = threading.Timer(LIMIT, self._ring)

    def _ring(self) -> None:
        self.rang = True
        self._process.send_signal(signal.SIGKILL)

    def __enter__(self) -> None:
        self._timer.start()

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()


def cpu_ticks(pid: int) -> int | None:
    """User and system time of a process; None if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[11]) + int(fields[12])


def children(pid: int) -> Iterator[int]:
    """All processes below one, the nearest first."""
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, task.read_text().split()):
            yield child
            yield from children(child)


def flip(file: Path, place: float = 0.5) -> None:
    """Change one bit of ``file``, at a share of its length."""
    data = bytearray(file.read_bytes())
    data[int(place * (len(data) - 1))] ^= 4
    file.write_bytes(data)


def cut(file: Path, share: float = 0.5) -> None:
    """Keep only the first part of ``file``."""
    data = file.read_bytes()
    file.write_bytes(data[: int(share * len(data))])


def locked(file: Path) -> sqlite3.Connection:
    """A connection that keeps the database locked until it is closed."""
    database = sqlite3.connect(file, isolation_level=None, check_same_thread=False)
    database.execute("BEGIN EXCLUSIVE")
    return database


def configuration(folder: Path) -> dict[str, Any]:
    return yaml.safe_load((folder / "config.yaml").read_text())
