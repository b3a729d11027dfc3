"""Starts and ends worker processes, in a separate process that imports the agent and forks.

A fork costs milliseconds and shares the memory of everything that was imported. It is unsafe if the import started threads or left
connections open. Then, and on other systems than Linux, each worker is a new interpreter that imports the agent itself.

The runner sends one letter and a number: a socket for a new worker, or the process to end. When the runner is gone, all workers are
killed.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

from lightning_core.errors import describe
from lightning_core.propagation.children.frames import command, receive_bytes
from lightning_core.rollouts.executors import failures
from lightning_core.rollouts.executors.channel import send_json
from lightning_core.rollouts.executors.commands import COMMAND, START, TERMINATE
from lightning_core.rollouts.executors.groups import Processes, descendants, end_descendants, end_group
from lightning_core.rollouts.executors.leftovers import adopt_orphans
from lightning_core.rollouts.executors.worker import Program, memory_bytes, work

_ENDING_SECONDS = 2.0


def main(fd: int) -> None:
    """Serve the runner at the other end of ``fd``."""
    control = socket.socket(fileno=fd)
    settings = receive_bytes(control)
    if settings is not None:
        Launcher(control, json.loads(settings)).serve()


class Launcher:
    """The workers of one runner."""

    def __init__(self, control: socket.socket, settings: dict[str, Any]) -> None:
        self._control = control
        self._settings = settings
        self._workers: dict[int, Processes] = {}
        """Each worker, and what it had started in other groups when it got the signal to end."""
        self._own: Processes = {}
        """The threads and processes that the import of the agent has started."""
        self._program: Program | None = None

    def serve(self) -> None:
        """Import the agent, then start and end workers until the runner is gone."""
        before = _open_files(), _native_threads()
        adopt_orphans()
        try:
            program = Program.load(self._settings)
        except BaseException as error:  # noqa: BLE001 - the agent's module is user code
            send_json(self._control, {"failed": failures.dump(error)})
            return
        self._own = descendants()
        obstacle = _why_not_fork(*before)
        if obstacle is None:
            self._program = program
            _import_lazy_modules()
            gc.collect()
            gc.freeze()  # a collection in a worker would copy the pages of all objects
        send_json(self._control, {"ready": True, "obstacle": obstacle, "memory": memory_bytes()})
        wake, wakes = socket.socketpair()
        for end in (wake, wakes):
            end.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wakes.fileno(), warn_on_full_buffer=False)
        with selectors.DefaultSelector() as selector:
            selector.register(self._control, selectors.EVENT_READ)
            selector.register(wake, selectors.EVENT_READ)
            try:
                while True:
                    ready = {key.fileobj for key, _ in selector.select()}
                    if wake in ready:
                        with contextlib.suppress(BlockingIOError):
                            wake.recv(4096)
                        self._reap()
                    if self._control in ready and not self._obey((selector, wake, wakes)):
                        return
            except OSError:
                return  # the runner is gone
            finally:
                signal.set_wakeup_fd(-1)  # its socket is closed while workers still end
                for pid in self._workers:
                    self._end(pid, signal.SIGKILL)
                # Processes that start while they are searched for are found by another search.
                deadline = time.monotonic() + _ENDING_SECONDS
                while end_descendants() and time.monotonic() < deadline:
                    time.sleep(0.01)

    def _end(self, pid: int, number: signal.Signals) -> None:
        self._workers[pid] = end_group(pid, number, self._workers[pid])

    def _obey(self, inherited: tuple[Any, ...]) -> bool:
        """Carry out one command; False at the end of the connection."""
        data, fds, _, _ = socket.recv_fds(self._control, COMMAND.size, 1)
        if len(data) < COMMAND.size:
            return False
        letter, number = COMMAND.unpack(data)
        if letter == START:
            self._start(number, socket.socket(fileno=fds[0]), inherited)
        elif number in self._workers:
            self._end(number, signal.SIGTERM if letter == TERMINATE else signal.SIGKILL)
        return True

    def _start(self, number: int, connection: socket.socket, inherited: tuple[Any, ...]) -> None:
        program = self._program
        try:
            with connection:
                pid = self._spawn(connection) if program is None else self._fork(program, connection, inherited)
        except OSError as error:  # such as the system's limit on processes
            send_json(self._control, {"started": number, "failed": describe(error)})
            return
        self._workers[pid] = {}
        send_json(self._control, {"started": number, "pid": pid})

    def _spawn(self, connection: socket.socket) -> int:
        module = "lightning_core.rollouts.executors.worker"
        fd = connection.fileno()
        child = subprocess.Popen(command(module, fd), pass_fds=[fd], start_new_session=True, stdin=subprocess.DEVNULL)
        child.returncode = 0  # reaped here, not by the object
        return child.pid

    def _fork(self, program: Program, connection: socket.socket, inherited: tuple[Any, ...]) -> int:
        sys.stdout.flush()
        sys.stderr.flush()
        with warnings.catch_warnings():
            # Python 3.12 warns of threads. Those that are left are NumPy's, which it stops at a fork.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid:
            return pid
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for one in (*inherited, self._control):
                one.close()
            os.setsid()
            work(program, connection)
            code = 0
        except BaseException as error:  # noqa: BLE001 - must not return into the launcher's own code
            sys.excepthook(type(error), error, error.__traceback__)
        finally:
            os._exit(code)

    def _reap(self) -> None:
        """Report workers that ended, and end what they left running."""
        workers = 0
        while (ended := _ended_child()) is not None:
            if ended in self._workers:
                self._end(ended, signal.SIGKILL)
                workers += 1
            _, status = os.waitpid(ended, 0)
            if self._workers.pop(ended, None) is not None:
                send_json(self._control, {"exited": ended, "status": os.waitstatus_to_exitcode(status)})
        if workers:
            end_descendants(but={*self._workers, *self._own})


def _import_lazy_modules() -> None:
    """Import once what each worker would import in its first rollout: for asynchronous HTTP clients (30 ms), and for the seed (15 ms)."""
    for name in ("anyio._backends._asyncio", "numpy.random"):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def _ended_child() -> int | None:
    """A child that has ended. Its number stays its own until it is reaped."""
    try:
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    return None if ended is None else ended.si_pid


def _why_not_fork(files: dict[int, str], threads: int) -> str | None:
    """The reason this process must not be forked now, or None. ``files``, ``threads``: before the agent was imported."""
    if sys.platform != "linux":
        return f"the platform is {sys.platform}"
    if len(running := threading.enumerate()) > 1:
        return f"importing the agent started threads: {sorted(t.name for t in running[1:])!r}"
    if (now := _native_threads()) > threads:
        return f"importing the agent started {now - threads} native threads"
    if shared := sorted(name for fd, name in _open_files().items() if fd not in files and not _is_shareable(fd)):
        return f"importing the agent left files or connections open: {shared!r}"
    return None


def _native_threads() -> int:
    # NumPy's own threads are stopped and restarted around a fork, and Lightning imports NumPy.
    __import__("numpy")
    task = Path("/proc/self/task")
    return len(list(task.iterdir())) if task.is_dir() else 1


def _open_files() -> dict[int, str]:
    """The targets of the open file descriptors."""
    found: dict[int, str] = {}
    for path in Path("/proc/self/fd").glob("*"):
        with contextlib.suppress(OSError):
            found[int(path.name)] = os.readlink(path)
    return found


def _is_shareable(fd: int) -> bool:
    """Whether several processes may use the file descriptor: devices, and files that are only read or appended to."""
    try:
        mode, flags = os.fstat(fd).st_mode, fcntl.fcntl(fd, fcntl.F_GETFL)
    except OSError:  # closed since
        return True
    return stat.S_ISCHR(mode) or (
        stat.S_ISREG(mode) and bool(flags & os.O_APPEND or flags & os.O_ACCMODE == os.O_RDONLY)
    )
