"""One run whose processes are killed, one kind after the other, and that is resumed each time."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path

import psutil
import pytest

from lightning_core.records.report import read_metrics
from lightning_core.records.store import Store
from lightning_core.trainers.verl.records import LOG
from tests.verl.conftest import Command, Train

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

COMMAND = "lightning-rl train"
KILLED = ("ray::vLLMHttpServer", "ray::TaskRunner", COMMAND, "ray::WorkerDict", "raylet")
"""In step 1, before the first checkpoint; in step 3, after it; in step 5; and so on."""
STEPS = 2 * len(KILLED)
SECONDS_TO_END = 120
"""For the command, and then for its processes: those of Ray's agents take more than 30 seconds after the command was killed."""


class Killer:
    """Kills a process of a run when a group of ``step`` is recorded."""

    def __init__(self, kind: str, folder: Path, step: int) -> None:
        self.kind = kind
        self.killed = float("nan")
        """When, by the monotonic clock."""
        self.started: list[psutil.Process] = []
        """The processes of the run. The command is not one of them: who waits for it here takes its exit code."""
        self._folder = folder
        self._step = step

    def __call__(self, command: psutil.Process) -> None:
        while not self._is_time():
            if not command.is_running():
                return
            time.sleep(0.1)
        self.started = command.children(recursive=True)
        (command if self.kind == COMMAND else next(filter(self._is_meant, self.started))).kill()
        self.killed = time.monotonic()

    def left(self) -> list[psutil.Process]:
        """The processes of the run that do not end within `SECONDS_TO_END` from now."""
        return psutil.wait_procs(self.started, timeout=SECONDS_TO_END)[1]

    def _is_time(self) -> bool:
        if not (self._folder / LOG).exists():
            return False
        with Store(self._folder / "store.db", read_only=True) as store:
            return bool(store.rollouts(phase="train", step=self._step, last=1))

    def _is_meant(self, process: psutil.Process) -> bool:
        words = process.cmdline()
        return bool(words) and (words[0].startswith(self.kind) or words[0].endswith(f"/{self.kind}"))


def test_a_killed_run_ends_with_a_message_and_resumes(train: Train, tmp_path: Path) -> None:
    """No group is lost or doubled, wherever the run was killed."""
    folder = tmp_path / "run"

    def run(*overrides: str, killer: Killer | None = None) -> Command:
        return train(
            *overrides,
            folder=folder,
            meanwhile=killer,
            agent="tests.verl.agents:takes_a_while",
            agents={"train": ["writer"]},
            trainer={"steps": STEPS, "checkpoint_every": 2},
        )

    for number, kind in enumerate(KILLED):
        killer = Killer(kind, folder, 2 * number + 1)
        done = run(*(["--resume"] if number else []), killer=killer)
        assert time.monotonic() - killer.killed < SECONDS_TO_END, done.output[-3000:]
        assert not killer.left()
        if kind == COMMAND:
            assert done.code == -9
            continue
        assert done.code == 1, done.output[-3000:]
        (last,) = done.output.splitlines()[-1:]
        assert "was lost" in last, done.output[-3000:]
        assert "--resume" in last
    done = run("--resume")
    assert done.trained, done.output[-4000:]
    assert f"continues after step {STEPS - 2}" in done.output
    with Store(folder / "store.db", read_only=True) as store:
        found = Counter((r.phase, r.step) for r in store.rollouts(status="ok"))
    steps = range(1, STEPS + 1)
    assert found == {("eval_before", 0): 2, ("eval_after", STEPS): 2} | {("train", step): 8 for step in steps}
    metrics = read_metrics(folder / "metrics.jsonl")
    assert [m["step"] for m in metrics] == list(steps)
    assert all(m["groups"] == 2 and m["verl/actor/grad_norm"] > 0 for m in metrics)
