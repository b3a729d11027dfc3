"""Starts and ends worker processes, in a separate process that imports the agent and forks.

A fork costs milliseconds and shares the memory of everything that was imported. It is unsafe once the import has started threads or left
connections open. Where the import starts its first thread, this process stops: workers are forked there, and each goes on with the rest of
the import. If that is unsafe as well, and on other systems than Linux, each worker is a new interpreter that imports the agent itself.

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
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn

from lightning_core.errors import describe
from lightning_core.propagation.children.frames import command, receive_bytes
from lightning_core.rollouts.executors import failures
from lightning_core.rollouts.executors.channel import send_json
from lightning_core.rollouts.executors.commands import COMMAND, START, TERMINATE
from lightning_core.rollouts.executors.first_thread import before_first_thread, starts_after_fork
from lightning_core.rollouts.executors.groups import Processes, descendants, end_descendants, end_group
from lightning_core.rollouts.executors.leftovers import adopt_orphans
from lightning_core.rollouts.executors.worker import Program, memory_bytes, work

_ENDING_SECONDS = 2.0
_LAZY_MODULES = {
    "numpy": ("numpy.random",),
    "anyio": ("anyio._backends._asyncio", "anyio.streams.tls"),
    "httpx": ("httpcore",),
    "httpx2": ("httpcore2",),
    "openai": ("jiter", "openai.resources.chat.chat", "openai.resources.responses.responses"),
    "anthropic": ("anthropic.resources.messages.messages",),
    "langchain_core": ("langchain_core.tracers.langchain", "langchain_core.tracers.run_collector"),
}
"""Modules that a package imports when it is first used, not when it is imported."""
_HARMLESS = ("numpy", "anyio")
"""Packages whose modules can be imported in the middle of an import: they start nothing."""


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
        self._forks = False
        self._worker: socket.socket | None = None
        """The connection to the runner of the worker that this process is, after a fork."""

    def serve(self) -> None:
        """Import the agent, then start and end workers until the runner is gone. In a worker: run its rollouts."""
        try:
            self._serve()
        except ConnectionError:  # the runner is gone
            if self._worker is not None:
                raise
        finally:
            if self._worker is None:
                self._end_all()  # also what an import has started that failed

    def _serve(self) -> None:
        before = _open_files(), _native_threads()
        adopt_orphans()
        try:
            with before_first_thread(lambda thread: self._stop_import(before, thread)):
                program = Program.load(self._settings)
        except BaseException as error:  # noqa: BLE001 - the agent's module is user code
            send_json(self._worker or self._control, {"failed": failures.dump(error)})
            return
        if self._worker is not None:  # forked during the import
            self._work(program, imported=True)
        if sys.platform == "linux":
            _import_lazy_modules()
        obstacle = _why_not_fork(*before)
        self._ready("spawn" if obstacle else "fork", obstacle, memory_bytes())
        self._start_workers()
        if self._worker is not None:
            self._work(program)

    def _stop_import(self, before: tuple[dict[int, str], int], thread: str) -> None:
        """The import is about to start its first thread: start workers from here, if that is safe. Returns in workers, to go on."""
        if _why_not_fork(*before) is not None or not starts_after_fork():
            return
        theirs, ours = socket.socketpair()
        with theirs:
            # The first worker only finds whether the rest of the import succeeds.
            if (pid := self._fork(ours, (theirs,))) == 0:
                return
            ours.close()
            found = receive_bytes(theirs)
        _, status = os.waitpid(pid, 0)
        message = {} if found is None else json.loads(found)
        if "ready" in message:
            _import_lazy_modules(_HARMLESS)
            self._ready("resume", f"importing the agent starts {thread}", max(message["memory"] - memory_bytes(), 0))
            self._start_workers()
            if self._worker is not None:
                return
        elif message:
            send_json(self._control, message)
        elif os.WIFSIGNALED(status):
            os.kill(os.getpid(), os.WTERMSIG(status))
        os._exit(0 if message else os.waitstatus_to_exitcode(status))  # the import does not go on in this process

    def _ready(self, start: str, obstacle: str | None, memory: int) -> None:
        """Tell the runner how workers start. ``memory``: bytes that each of them takes for what it imports."""
        self._own = descendants()
        self._forks = start != "spawn"
        if self._forks:
            gc.collect()
            gc.freeze()  # a collection in a worker would copy the pages of all objects
        send_json(self._control, {"ready": True, "start": start, "obstacle": obstacle, "memory": memory})

    def _work(self, program: Program, *, imported: bool = False) -> NoReturn:
        """Be a worker. ``imported``: it has finished the import itself."""
        assert self._worker is not None
        try:
            if imported:
                send_json(self._worker, {"ready": True, "memory": memory_bytes()})
            work(program, self._worker)
        except BaseException as error:  # noqa: BLE001 - must not return into the launcher's own code
            _end_worker(error)
        os._exit(0)

    def _start_workers(self) -> None:
        """Start and end workers until the runner is gone. Returns in workers that are forked as well."""
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
                if self._worker is None:
                    self._end_all()

    def _end_all(self) -> None:
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
        """Carry out one command; False at the end of the connection, and in a worker that was forked."""
        data, fds, _, _ = socket.recv_fds(self._control, COMMAND.size, 1)
        if len(data) < COMMAND.size:
            return False
        letter, number = COMMAND.unpack(data)
        if letter == START:
            return self._start(number, socket.socket(fileno=fds[0]), inherited)
        if number in self._workers:
            self._end(number, signal.SIGTERM if letter == TERMINATE else signal.SIGKILL)
        return True

    def _start(self, number: int, connection: socket.socket, inherited: tuple[Any, ...]) -> bool:
        """Start a worker; False in the worker, if it is a fork."""
        try:
            pid = self._fork(connection, inherited) if self._forks else self._spawn(connection)
        except OSError as error:  # such as the system's limit on processes
            send_json(self._control, {"started": number, "failed": describe(error)})
            connection.close()
            return True
        if pid == 0:
            return False
        connection.close()
        self._workers[pid] = {}
        send_json(self._control, {"started": number, "pid": pid})
        return True

    def _spawn(self, connection: socket.socket) -> int:
        module = "lightning_core.rollouts.executors.worker"
        fd = connection.fileno()
        child = subprocess.Popen(command(module, fd), pass_fds=[fd], start_new_session=True, stdin=subprocess.DEVNULL)
        child.returncode = 0  # reaped here, not by the object
        return child.pid

    def _fork(self, connection: socket.socket, inherited: tuple[Any, ...]) -> int:
        """Fork; 0 in the new process, which is a worker with ``connection``."""
        sys.stdout.flush()
        sys.stderr.flush()
        with warnings.catch_warnings():
            # Python 3.12 warns of threads. Those that are left are NumPy's, which it stops at a fork.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid:
            return pid
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for one in (*inherited, self._control):
                one.close()
            os.setsid()
        except BaseException as error:  # noqa: BLE001 - must not return into the launcher's own code
            _end_worker(error)
        self._worker, self._workers = connection, {}
        return 0

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


def _end_worker(error: BaseException) -> NoReturn:
    sys.excepthook(type(error), error, error.__traceback__)
    os._exit(1)


def _import_lazy_modules(packages: Iterable[str] = _LAZY_MODULES) -> None:
    """Import what ``packages`` import when they are first used, which each worker would do in its first rollout.

    For a first request with openai that is 60 to 350 ms of processor time.
    """
    for package in filter(_is_imported, packages):
        for name in _LAZY_MODULES[package]:
            with contextlib.suppress(ImportError, AttributeError):  # other versions have other modules
                importlib.import_module(name)


def _is_imported(package: str) -> bool:
    """Whether ``package`` is imported, and not just being imported."""
    spec = getattr(sys.modules.get(package), "__spec__", None)
    return spec is not None and not getattr(spec, "_initializing", False)


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
