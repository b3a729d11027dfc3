"""Passes the endpoint's URL and key to the programs that an agent starts, and counts the programs.

Inside a rollout, the environment of a child process is extended with `endpoint_environment`, whether the caller passes an environment
or not. A program that was given a key of the rollout keeps it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from lightning_core.capture.patching import Patches, Wrapper
from lightning_core.capture.recording import note_elsewhere, record
from lightning_core.propagation.children.environment import endpoint_environment
from lightning_core.propagation.children.program_names import program_of, program_of_command
from lightning_core.propagation.children.sender import sender
from lightning_core.propagation.clients.stamping import is_sending

SUBPROCESS = "subprocess"
"""The reason of a request elsewhere: a child process was started, whose requests are not seen here."""

_OF_PYTHON = ("uname", "ldconfig")
"""Programs of the standard library's own: of `platform`, which HTTP clients use for their user agent, and of `ctypes.util`."""

_counted: ContextVar[bool] = ContextVar("lightning_program_counted", default=False)
"""Whether the program that is being started is counted by a function that calls this one."""


def _extended(environment: Mapping[Any, Any] | None) -> Mapping[Any, Any] | None:
    """A copy of ``environment`` (None: this process's) with the variables; the same object if there are none to add."""
    with record("environment"):
        given = os.environ if environment is None else environment
        known = {os.fsdecode(name): os.fsdecode(value) for name, value in given.items()}
        if variables := endpoint_environment(known):
            return {name: value for name, value in given.items() if os.fsdecode(name) not in variables} | variables
    return environment


@contextmanager
def _counting(name_of: Callable[[], str]) -> Generator[None]:
    """Count the program that the body starts, unless that fails."""
    token = _counted.set(True)
    try:
        yield
    finally:
        _counted.reset(token)
    _count(name_of)


def _count(name_of: Callable[[], str]) -> None:
    if not (_counted.get() or is_sending()):
        with record("program"):
            name = name_of()
            if name not in _OF_PYTHON:
                note_elsewhere(name, SUBPROCESS)


def _with_environment(
    args: Sequence[Any], kwargs: Mapping[str, Any], position: int
) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """The arguments of a function whose argument ``env`` is at ``position``, with the environment extended."""
    if len(args) > position:
        return (*args[:position], _extended(args[position]), *args[position + 1 :]), kwargs
    environment = _extended(kwargs.get("env"))
    return args, kwargs if environment is None else {**kwargs, "env": environment}


def _popen(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
    with _counting(lambda: _program_of_popen(*args, **kwargs)):
        args, kwargs = _with_environment(args, kwargs, 10)
        return wrapped(*args, **kwargs)


def _program_of_popen(args: Any, *positional: Any, **kwargs: Any) -> str:
    is_text = isinstance(args, (str, bytes, os.PathLike))
    words = [args] if is_text else list(args)
    if not words:
        return "unknown program"  # the words were an iterator, which is used up
    if kwargs.get("shell", positional[7] if len(positional) > 7 else False) or (is_text and os.name == "nt"):
        return program_of_command(os.fsdecode(words[0]), shell="sh")
    return program_of(words)


def _spawn(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
    """``os.posix_spawn`` and ``posix_spawnp``."""
    with _counting(lambda: _program_of_exec(*args, **kwargs)):
        args, kwargs = _with_environment(args, kwargs, 2)
        return wrapped(*args, **kwargs)


def _execve(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
    # Counted before: it does not return.
    _count(lambda: _program_of_exec(*args, **kwargs))
    args, kwargs = _with_environment(args, kwargs, 2)
    sender.flush()
    return wrapped(*args, **kwargs)


def _execv(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
    environment = _extended(None)
    if environment is not None:
        return os.execve(*args, env=environment, **kwargs)
    _count(lambda: _program_of_exec(*args, **kwargs))
    sender.flush()
    return wrapped(*args, **kwargs)


def _program_of_exec(path: Any, argv: Sequence[Any], *_: Any, **__: Any) -> str:
    return program_of([path, *argv[1:]])


def _system(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
    """``os.system``, which takes no environment, as the C library does it: the shell, and its wait status.

    The variables are not put before the command, because other users of the machine can read command lines.
    """
    if not args and "command" not in kwargs:
        return wrapped(*args, **kwargs)
    command = args[0] if args else kwargs["command"]
    environment = _extended(None)
    with _counting(lambda: program_of_command(os.fsdecode(command), shell="sh")):
        if environment is None:
            return wrapped(*args, **kwargs)
        sys.audit("os.system", command)
        with _ignored(signal.SIGINT, signal.SIGQUIT) as restored:
            child = os.posix_spawn("/bin/sh", ["sh", "-c", command], environment, setsigdef=restored)
            try:
                return os.waitpid(child, 0)[1]
            except ChildProcessError:  # the process ignores SIGCHLD
                return -1


@contextmanager
def _ignored(*signals: signal.Signals) -> Generator[list[signal.Signals]]:
    """Ignore ``signals`` in this process; yields those that a child must not ignore.

    Python changes handlers on the main thread alone, which is also the only one that they interrupt.
    """
    handlers: dict[signal.Signals, Any] = {}
    try:
        if threading.current_thread() is threading.main_thread():
            for number in signals:
                if (
                    handler := signal.getsignal(number)
                ) is not None:  # else it is not Python's, and could not be put back
                    handlers[number] = handler
                    signal.signal(number, signal.SIG_IGN)
        yield [number for number, handler in handlers.items() if handler != signal.SIG_IGN]
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def install_programs(patches: Patches) -> None:
    """Make programs started inside a rollout call the endpoint, and count them."""
    patches.wrap(subprocess.Popen, "__init__", _popen)  # asyncio's subprocesses use it too
    wrappers: tuple[tuple[str, Wrapper], ...] = (
        ("posix_spawn", _spawn),
        ("posix_spawnp", _spawn),
        ("execve", _execve),
        ("execv", _execv),
    )
    for name, wrapper in wrappers:
        if hasattr(os, name):
            patches.wrap(os, name, wrapper)
    if hasattr(os, "posix_spawn"):
        patches.wrap(os, "system", _system)
