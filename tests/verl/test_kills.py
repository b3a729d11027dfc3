"""One run whose processes are killed, one kind after the other, and that is resumed each time."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path

import psutil
import pytest

from lightning_core.records.checkpoints import checkpoints
from lightning_core.records.report import read_metrics
from lightning_core.records.store import Store
from tests.verl.conftest import Command, Train

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

SECONDS_TO_END = 120
KILLED = ("the command", "ray::vLLMHttpServer", "ray::TaskRunner", "ray::WorkerDict", "raylet")
"""In step 1, before the first checkpoint; in step 2; and so on."""


class Killer:
    """Kills a process of a run when rollouts of ``step`` are recorded."""

    def __init__(self, kind: str, store: Path, step: int) -> None:
        self.kind = kind
        self.seconds = float("nan")
        self.left: list[psutil.Process] = []
        self._store = store
        self._step = step

    def __call__(self, command: psutil.Process) -> None:
        while not self._is_time():
            if not command.is_running():
                return
            time.sleep(0.2)
        started = command.children(recursive=True)
        names = {process: " ".join(process.cmdline()) for process in started}
        process = command if self.kind == KILLED[0] else next(p for p, n in names.items() if self._is_meant(n))
        process.kill()
        began = time.monotonic()
        command.wait()
        self.seconds = time.monotonic() - began
        self.left = psutil.wait_procs(started, timeout=30)[1]

    def _is_time(self) -> bool:
        if not self._store.exists():
            return False
        with Store(self._store, read_only=True) as store:
            return bool(store.rollouts(phase="train", step=self._step, last=1))

    def _is_meant(self, name: str) -> bool:
        return name.startswith(self.kind) or name.split(" ")[0].endswith(f"/{self.kind}")


def test_a_killed_run_ends_with_a_message_and_resumes(train: Train, tmp_path: Path) -> None:
    folder = tmp_path / "run"

    def run(*overrides: str, killer: Killer | None = None) -> Command:
        return train(
            *overrides,
            folder=folder,
            meanwhile=killer,
            agent="tests.verl.agents:takes_a_while",
            agents={"train": ["writer"]},
            trainer={"steps": len(KILLED), "checkpoint_every": 1},
        )

    for number, kind in enumerate(KILLED):
        killer = Killer(kind, folder / "store.db", number + 1)
        done = run(*(["--resume"] if number else []), killer=killer)
        print(
            f"=== {kind}: code {done.code}, ended {killer.seconds:.0f} s after, left {killer.left}\n{done.output[-3000:]}"
        )
        assert killer.seconds < SECONDS_TO_END, done.output[-3000:]
        assert len(checkpoints(folder)) == number
        assert not killer.left
        if kind == KILLED[0]:
            assert done.code == -9
            continue
        assert done.code == 1
        last = done.output.splitlines()[-1]
        assert "--resume" in last
        assert "Traceback" not in last
    done = run("--resume")
    assert done.trained, done.output[-4000:]
    with Store(folder / "store.db", read_only=True) as store:
        found = Counter((r.phase, r.step) for r in store.rollouts(status="ok"))
        assert list(store.steps()) == [*range(1, len(KILLED) + 1)]
    steps = range(1, len(KILLED) + 1)
    assert found == {("eval_before", 0): 2, ("eval_after", len(KILLED)): 2} | {("train", step): 8 for step in steps}
    metrics = read_metrics(folder / "metrics.jsonl")
    assert [m["step"] for m in metrics] == list(steps)
    assert all(m["verl/actor/grad_norm"] > 0 for m in metrics)
