"""A worker process: runs one rollout after another, each in its own scope.

Working directory, environment variables and random numbers are reset at the start of each rollout. Other state of the process
is kept, so the agent's clients stay connected.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import faulthandler
import inspect
import json
import logging
import os
import pickle
import queue
import random
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lightning_core.capture import run_as
from lightning_core.capture.marks import marked_agents
from lightning_core.capture.run import ActiveRollout
from lightning_core.propagation.children.frames import receive_bytes
from lightning_core.propagation.children.scope import ChildScope
from lightning_core.propagation.children.sender import RECORDS_THREAD, sender
from lightning_core.propagation.process_patches import ensure_patched
from lightning_core.rollouts.containment import AgentExit, contained
from lightning_core.rollouts.executors import failures, results
from lightning_core.rollouts.executors.channel import STATE, send_json
from lightning_core.rollouts.executors.groups import Processes, end_group
from lightning_core.rollouts.executors.leftovers import adopt_orphans, any_left, processes
from lightning_core.rollouts.executors.reference import FunctionReference
from lightning_core.rollouts.executors.stacks import stacks_of, tasks_of
from lightning_core.rollouts.log_format import configure_logging
from lightning_core.trace import REWARD_FUNCTION

_TOOL_THREADS = 256
_ENDING_SECONDS = 0.05
"""Seconds that threads and processes may take to end after their rollout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramSettings:
    """The agent and settings that a worker loads. All fields are JSON values."""

    agent: dict[str, Any]
    """Fields of a `FunctionReference`."""
    reward: dict[str, Any] | None
    integrations: list[str]
    log_level: int | None
    """Level of the root logger; None: the run has not configured logging."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkMessage:
    """One rollout to run."""

    scope: ChildScope
    task: Any
    scored_task: Any
    seed: int


@dataclass(frozen=True, slots=True)
class Program:
    """The agent and its reward function, imported."""

    solve: Callable[[Any], Any]
    reward: Callable[[Any, Any], Any] | None

    @classmethod
    def load(cls, settings: dict[str, Any]) -> Program:
        """Install the patches, then import what `ProgramSettings` name."""
        if settings["log_level"] is not None:
            configure_logging(settings["log_level"])
        ensure_patched(settings["integrations"])
        reward = settings["reward"]
        solve = FunctionReference(**settings["agent"]).load("agent")
        return cls(contained(solve), None if reward is None else contained(FunctionReference(**reward).load("reward")))


def main(fd: int) -> None:
    """Serve the runner at the other end of ``fd``: a new interpreter, which gets its settings first."""
    connection = socket.socket(fileno=fd)
    settings = receive_bytes(connection)
    if settings is not None:
        program = Program.load(json.loads(settings))
        send_json(connection, {"ready": True})
        work(program, connection)
        _flush()
        os._exit(0)  # threads of the agent may still run


def work(program: Program, connection: socket.socket) -> None:
    """Run rollouts until the runner is gone."""
    with contextlib.suppress(OSError, ValueError):
        faulthandler.enable(all_threads=False)
    adopt_orphans()
    Worker(program, connection).serve()


class Worker:
    """The state that a worker process keeps."""

    def __init__(self, program: Program, connection: socket.socket) -> None:
        self._pid = os.getpid()
        self._program = program
        self._connection = connection
        self._messages: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._folder = Path.cwd()
        self._environment = dict(os.environ)
        self._marks = set(marked_agents().values())
        self._loop = asyncio.Runner()
        self._used_loop = False
        self._tools: ThreadPoolExecutor | None = None
        self._sending = threading.Lock()
        self._current: ActiveRollout | None = None
        """The rollout that runs."""

    def serve(self) -> None:
        """Run the rollouts that arrive. Ends with the process."""
        threading.Thread(target=self._receive, name="lightning-worker", daemon=True).start()
        while True:
            message = self._run(self._messages.get())
            _flush()
            try:
                self._send(message)
            except OSError:  # the runner is gone, and `_receive` ends this process
                return

    def _send(self, message: Any) -> None:
        with self._sending:
            send_json(self._connection, message)

    def _receive(self) -> None:
        while (message := receive_bytes(self._connection)) is not None:
            if message == STATE:
                with contextlib.suppress(OSError):
                    run = self._current
                    met = {} if run is None else {"waiting": run.sent.waiting, "unanswered": run.sent.unanswered}
                    tasks = tasks_of(self._loop.get_loop()) if self._used_loop else ()
                    self._send({"state": {"stacks": stacks_of(tasks=tasks), **met}})
            else:
                self._messages.put(message)
        # The runner is gone: end this process and those that the agent started.
        end_group(os.getpid(), signal.SIGKILL)

    def _run(self, data: bytes) -> dict[str, Any]:
        given: WorkMessage = pickle.loads(data)
        given.scope.run.task = given.task
        self._current = given.scope.run
        self._restore(given.seed)
        before = set(threading.enumerate()), processes()
        ended: dict[str, Any] = {}
        try:
            # Leaving the scope sends what is still to be recorded.
            with sender.supervised(given.scope.run.rollout), given.scope():
                # Context variables that the agent sets are its own.
                ended = contextvars.copy_context().run(self._solve, given)
        except BaseException as error:  # noqa: BLE001 - reported to the runner
            ended = {"raised": failures.dump(error)}
        marks = set(marked_agents().values())
        ended["marks"] = [[mark.name, mark.policy] for mark in marks - self._marks]
        self._marks = marks
        if self._tools is not None:
            self._tools.shutdown(wait=False)
            self._tools = None
        return {"ended": ended, "memory": memory_bytes(), "left": self._left_running(*before)}

    def _left_running(self, before: set[threading.Thread], processes_before: Processes) -> bool:
        """Whether the rollout left its own tasks, threads or processes, which would run during later rollouts."""
        if self._used_loop and asyncio.all_tasks(self._loop.get_loop()):
            return True
        new = [t for t in threading.enumerate() if t not in before and t.name != RECORDS_THREAD]
        deadline = time.monotonic() + _ENDING_SECONDS
        for thread in new:
            thread.join(max(deadline - time.monotonic(), 0.0))
        return any(thread.is_alive() for thread in new) or any_left(processes_before, deadline)

    def _solve(self, given: WorkMessage) -> dict[str, Any]:
        try:
            result = self._awaited(self._program.solve(given.task))
        except BaseException as error:  # noqa: BLE001 - the agent's exception is data
            self._end_copy(error)
            return {"raised": failures.dump(error)}
        self._end_copy(None)
        given.scope.run.count_unsettled()
        if self._program.reward is None:
            return {"result": results.dump(result)}
        ended: dict[str, Any] = {"answer": results.to_answer(result)}  # the function may change it
        self._send({"scoring": True})
        try:
            with run_as(REWARD_FUNCTION):
                ended["score"] = results.dump(self._awaited(self._program.reward(given.scored_task, result)))
        except BaseException as error:  # noqa: BLE001 - as above
            self._end_copy(error)
            ended["score_raised"] = failures.dump(error)
        self._end_copy(None)
        return ended

    def _end_copy(self, error: BaseException | None) -> None:
        """End this process if it is a fork that the agent made and did not end, since it shares the worker's connection."""
        if os.getpid() == self._pid:
            return
        if error is not None and not isinstance(error, SystemExit):
            sys.excepthook(type(error), error, error.__traceback__)
        _flush()
        os._exit(0 if error is None else _exit_code(error))

    def _awaited(self, result: Any) -> Any:
        """``result``, or its result if it is a coroutine."""
        if not inspect.iscoroutine(result):
            return result
        self._used_loop = True
        if self._tools is None:
            # Of its own: tools that hang must not hold the threads of later rollouts.
            self._tools = ThreadPoolExecutor(_TOOL_THREADS, thread_name_prefix="lightning-tools")
            self._loop.get_loop().set_default_executor(self._tools)
        return self._loop.run(result, context=contextvars.copy_context())

    def _restore(self, seed: int) -> None:
        os.chdir(self._folder)
        for name in os.environ.keys() - self._environment.keys():
            del os.environ[name]
        for name, value in self._environment.items():
            if os.environ.get(name) != value:
                os.environ[name] = value
        random.seed(seed)
        np.random.seed(seed % (1 << 32))
        if (torch := sys.modules.get("torch")) is not None:
            torch.manual_seed(seed % (1 << 63))


def _exit_code(error: BaseException) -> int:
    cause = error.__cause__ if isinstance(error, AgentExit) else error
    if not isinstance(cause, SystemExit):
        return 1
    return cause.code if isinstance(cause.code, int) else int(cause.code is not None)


def memory_bytes() -> int:
    """The memory of this process in bytes, without files; 0 on systems without ``/proc``."""
    with contextlib.suppress(OSError, ValueError):
        _, resident, shared, *_ = map(int, Path("/proc/self/statm").read_text().split())
        return (resident - shared) * os.sysconf("SC_PAGE_SIZE")
    return 0


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


def to_settings(
    agent: FunctionReference, reward: FunctionReference | None, integrations: frozenset[str]
) -> dict[str, Any]:
    """The settings of a program as JSON values."""
    root = logging.getLogger()
    settings = ProgramSettings(
        agent=asdict(agent),
        reward=None if reward is None else asdict(reward),
        integrations=sorted(integrations),
        log_level=root.level if root.handlers else None,
    )
    return asdict(settings)
