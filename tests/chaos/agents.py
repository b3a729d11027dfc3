"""The agent of `tests.bandit`, which disturbs its run once: as ``CHAOS`` says, in the first rollout after ``CHAOS_AFTER`` others."""

from __future__ import annotations

import gc
import os
import resource
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests import bandit

_folder = Path(os.environ.get("CHAOS_FOLDER", "."))
"""Where rollouts are counted, for all processes of a run."""


def solve(task: dict[str, Any]) -> float:
    if _turn():
        DISTURBANCES[os.environ["CHAOS"]]()
    return bandit.solve(task)


def held_out() -> list[dict[str, Any]]:
    return bandit.tasks(4, start=100)


def more_tasks() -> list[dict[str, Any]]:
    """Tasks that neither of the lists of `tests.bandit` has."""
    return bandit.tasks(8, start=200)


def _turn() -> bool:
    for number in range(int(os.environ["CHAOS_AFTER"]) + 1):
        with suppress(FileExistsError):
            (_folder / f"rollout-{number}").touch(exist_ok=False)
            return number == int(os.environ["CHAOS_AFTER"])
    return False


def _raise() -> None:
    raise ValueError("a bug of the agent")


def _leave() -> None:
    sys.exit(3)


def _recurse() -> None:
    _recurse()


def _many_files() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    held = []
    with suppress(OSError):
        while True:
            held.append(os.open(os.devnull, os.O_RDONLY))
    time.sleep(0.5)
    for descriptor in held:
        os.close(descriptor)


def _print() -> None:
    for _ in range(20):
        sys.stdout.write("\x1b[2J\x00" + "x" * 100_000 + "\n")


def _thread() -> None:
    threading.Thread(target=time.sleep, args=(3600,), daemon=True).start()


def _handlers() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


DISTURBANCES: Mapping[str, Callable[[], object]] = {
    "raises": _raise,
    "exits": _leave,
    "ends its process": lambda: os._exit(7),
    "is killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "crashes": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "is stopped": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "recurses without end": _recurse,
    "takes all file descriptors for half a second": _many_files,
    "prints 2 MB with control characters": _print,
    "changes the working folder": lambda: os.chdir("/"),
    "removes its working folder's environment": os.environ.clear,
    "leaves a thread": _thread,
    "ignores SIGTERM": _handlers,
    "disables garbage collection": gc.disable,
    "seeds all random numbers": lambda: __import__("random").seed(0),
    "deletes the store": lambda: (_run() / "store.db").unlink(),
    "deletes the checkpoints": lambda: shutil.rmtree(_run() / "checkpoints"),
}


def _run() -> Path:
    return Path(os.environ["CHAOS_RUN"])
