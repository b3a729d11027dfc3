"""Python programs in processes that have imported torch already: each starts in milliseconds instead of seconds.

They are forked from one server for each test process, which has imported what training needs, or other modules, and done nothing
else. Each program has a process, signals, limits, environment and working folder of its own, as with ``python -c`` and ``python -m``.
Environment variables that those packages read while they are imported have no effect.
"""

from __future__ import annotations

import atexit
import functools
import gc
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import types
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

# The frameworks too, which a program that trains imports when it prepares their integrations, before it imports the agent.
IMPORTED = (
    "openai",
    "lightning_autogen_agentchat._patches",
    "lightning_genai_spans._patches",
    "lightning_langchain._patches",
    "lightning_langgraph._patches",
    "lightning_openai_agents._patches",
    "torch",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.llama.modeling_llama",
    "matplotlib.backends.backend_agg",
    "matplotlib.figure",
    "lightning_core.tools.cli.main",
    "lightning_core.loop",
    "lightning_core.tools.export.export",
    "lightning_core.trainers.torch.factory",
)
_MESSAGE = 200_000
"""The most bytes of a program with its arguments and environment."""
_spent: list[float] = []


class Warm:
    """A running program, with the interface of `subprocess.Popen`.

    ``stdout`` is a pipe. With ``merged`` it has standard error too; otherwise see `errors`. ``imported``: the modules of its server.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
        merged: bool = False,
        imported: tuple[str, ...] = IMPORTED,
    ) -> None:
        self.args = [sys.executable, *arguments]
        self.returncode: int | None = None
        self._status, status = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        (out, out_end), (errors, errors_end) = os.pipe(), os.pipe()
        self.stdout = os.fdopen(out, encoding="utf-8")
        self._errors: list[str] = []
        self._reader = threading.Thread(target=self._read_errors, args=(errors,), daemon=True)
        self._reader.start()
        environment = dict(os.environ if env is None else env)
        message = json.dumps([list(arguments), environment, os.fspath(cwd or os.getcwd())]).encode()
        ends = [status.fileno(), out_end, out_end if merged else errors_end]
        try:
            socket.send_fds(_server(imported), [message], ends)
        finally:
            status.close()
            os.close(out_end)
            os.close(errors_end)
        self.pid = int(self._status.recv(64))

    def _read_errors(self, descriptor: int) -> None:
        with os.fdopen(descriptor, encoding="utf-8") as errors:
            self._errors.extend(errors)

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, or the signal that ended the program as a negative number. Raises TimeoutError."""
        if self.returncode is None:
            self._status.settimeout(timeout)
            code, seconds = self._status.recv(64).split()
            self.returncode = int(code)
            _spent.append(float(seconds))
        return self.returncode

    def errors(self) -> str:
        """All that a program which has ended wrote to its standard error."""
        self._reader.join()
        return "".join(self._errors)

    def __enter__(self) -> Warm:
        return self

    def __exit__(self, *_: object) -> None:
        self.stdout.close()
        self.wait()
        self._reader.join()
        self._status.close()


def cpu_seconds() -> float:
    """The CPU seconds of all programs that have ended."""
    return sum(_spent)


def run(
    arguments: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    cwd: str | Path | None = None,
    check: bool = False,
    imported: tuple[str, ...] = IMPORTED,
) -> subprocess.CompletedProcess[str]:
    """The result of a program: ``-c``, its source and its arguments, or ``-m``, a module and its arguments."""
    with Warm(arguments, env=env, cwd=cwd, imported=imported) as program:
        out = program.stdout.read()
        done = subprocess.CompletedProcess(program.args, program.wait(), out, program.errors())
    if check:
        done.check_returncode()
    return done


@functools.cache
def _server(imported: tuple[str, ...]) -> socket.socket:
    """The connection to the server with these modules, which ends when this process does."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        subprocess.Popen(
            [sys.executable, "-m", __name__, str(theirs.fileno()), *imported],
            cwd=Path(__file__).parents[1],
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
        )
    return ours


def _serve(connection: socket.socket) -> tuple[list[str], dict[str, str], str]:
    """Start the programs that are requested. Returns in each of them, with its arguments, environment and working folder."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the tests, which end this process
    signal.signal(signal.SIGCHLD, lambda *_: _reap())
    while True:
        message, descriptors, _, _ = socket.recv_fds(connection, _MESSAGE, 3)
        if not message:
            os._exit(0)
        if os.fork() == 0:
            break
        for descriptor in descriptors:
            os.close(descriptor)
    connection.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    status, output, errors = descriptors
    child = os.fork()
    if child:
        os.close(output)
        os.close(errors)
        os.write(status, str(child).encode())
        _, ended, usage = os.wait4(child, 0)
        with suppress(OSError):  # nobody waits for it
            os.write(status, f"{os.waitstatus_to_exitcode(ended)} {usage.ru_utime + usage.ru_stime}".encode())
        os._exit(0)
    os.close(status)
    os.dup2(output, 1)
    os.dup2(errors, 2)
    os.close(output)
    os.close(errors)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    return tuple(json.loads(message))


def _reap() -> None:
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _become(kind: str, program: str, arguments: list[str], environment: dict[str, str], folder: str) -> None:
    """Run a program as the interpreter would."""
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None
    os.chdir(folder)
    sys.dont_write_bytecode = "PYTHONDONTWRITEBYTECODE" in environment
    paths = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path and path not in sys.path]
    sys.path[:1] = ["" if kind == "-c" else folder, *paths]
    sys.argv = [kind, *arguments]
    if kind == "-m":
        if not hasattr(sys.modules.get(program), "__path__"):
            sys.modules.pop(program, None)  # it is executed as __main__
        runpy.run_module(program, run_name="__main__", alter_sys=True)
        return
    main: Any = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    exec(compile(program, "<string>", "exec"), main.__dict__)


def _exit(code: object) -> None:
    """Exit as the interpreter does, but without taking apart all modules, which takes longer than most programs."""
    if code is not None and not isinstance(code, int):
        sys.stderr.write(f"{code}\n")
        code = 1
    with suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()  # pyright: ignore[reportPrivateUsage]
    if (main := vars(sys.modules["__main__"])) is not globals():
        main.clear()  # closes its files
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    os._exit((code or 0) & 0xFF)


if __name__ == "__main__":
    for name in sys.argv[2:]:
        try:
            import_module(name)
        except ModuleNotFoundError as error:  # torch is not in every environment
            if error.name is None or error.name.startswith("lightning_core"):
                raise
    gc.freeze()  # a collection would copy the pages that the programs share
    (kind, program, *arguments), environment, folder = _serve(socket.socket(fileno=int(sys.argv[1])))
    result: object = None
    try:
        _become(kind, program, arguments, environment, folder)
    except SystemExit as end:
        result = end.code
    _exit(result)
