"""The processes of a Ray cluster that a benchmark started: their cost by kind, and their end."""

from __future__ import annotations

import os
import signal
import subprocess
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import psutil

_KINDS = {
    "TaskRunnerV1": "trainer and manager",
    "AgentLoopWorker": "agents",
    "RolloutWorker": "agents",
    "RewardLoop": "rewards",
    "vLLM": "vLLM",
    "VLLM": "vLLM",
    "TransferQueue": "TransferQueue",
    "SimpleStorage": "TransferQueue",
    "WorkerDict": "training",
    "tests.bench": "driver",
}
Known = dict[int, psutil.Process]


def kind_of(command: Sequence[str]) -> str:
    """The kind of a process by its command line, where Ray writes the actor's name."""
    name = " ".join(command[:4])
    return next((kind for part, kind in _KINDS.items() if part in name), "Ray")


def below(pid: int, known: Known) -> list[tuple[str, psutil.Process]]:
    """A process and its descendants with their kinds; updates ``known``."""
    found: list[tuple[str, psutil.Process]] = []
    parent = psutil.Process(pid)
    for process in (parent, *parent.children(recursive=True)):
        try:
            found.append((kind_of(process.cmdline()), process))
            known[process.pid] = process
        except psutil.Error:
            continue
    return found


def cpu_by_kind(pid: int, known: Known) -> dict[str, float]:
    """CPU seconds so far, by kind."""
    found: dict[str, float] = defaultdict(float)
    for kind, process in below(pid, known):
        try:
            times = process.cpu_times()
        except psutil.Error:
            continue
        found[kind] += times.user + times.system
    return dict(found)


def resident_by_kind(pid: int, known: Known) -> dict[str, int]:
    """Bytes of private resident memory, by kind."""
    found: dict[str, int] = defaultdict(int)
    for kind, process in below(pid, known):
        try:
            memory = process.memory_info()
        except psutil.Error:
            continue
        found[kind] += memory.rss - memory.shared
    return dict(found)


def end(child: subprocess.Popen[Any], known: Mapping[int, psutil.Process]) -> None:
    """End a child and all its known descendants; Ray's processes are in separate sessions."""
    if child.poll() is None:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    for process in known.values():
        try:
            if process.is_running():  # psutil detects a new process with an old id
                process.kill()
        except psutil.Error:
            continue
