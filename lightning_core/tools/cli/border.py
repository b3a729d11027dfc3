"""The border of the commands: every exception becomes a message and an exit code.

A message says what happened, what is saved, and how to go on. A traceback is shown with ``--debug`` only; that of an exception
that is not Lightning's is also written to a file.
"""

from __future__ import annotations

import argparse
import os
import select
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from importlib import metadata
from pathlib import Path

from lightning_core.errors import (
    ConfigError,
    IntegrationUnavailable,
    LightningError,
    MissingExtra,
    RecordError,
    describe,
    explain,
    redact_urls,
    user_lines,
)
from lightning_core.records.failures import causes, failure_of
from lightning_core.tools import exits
from lightning_core.tools.cli.messages import say

_ISSUES = "https://github.com/lightning-rl/lightning-rl/issues"


def run_command(command: Callable[[argparse.Namespace], int], options: argparse.Namespace) -> int:
    """The exit code of ``command``, whose exceptions are reported.

    A command adds what is saved, and how to go on, as notes to its exception. ``options.folder``: the run's folder, once it exists.
    """
    try:
        code = command(options)
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - this is the border
        code = _report(error, options)
    return _flush(code, options)


def _flush(code: int, options: argparse.Namespace) -> int:
    """Write the rest of the standard output. Returns ``code``, or that of a failure to write if ``code`` is 0."""
    if sys.stdout is None:
        return code
    try:
        sys.stdout.flush()
    except (OSError, ValueError) as error:
        is_unread = isinstance(error, BrokenPipeError) and _reader_is_gone()  # as in "… | head"
        failed = exits.OK if is_unread else _report(error, options)
        with suppress(OSError, ValueError):  # the interpreter would fail in the same way at its end
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return code or failed
    return code


def _report(error: BaseException, options: argparse.Namespace) -> int:
    first, *others = causes(error)
    if isinstance(first, BrokenPipeError) and _reader_is_gone():
        code, text = (
            exits.UNREAD,
            "lightning-rl: the reader of standard output has closed it." if options.folder else "",
        )
    else:
        code, text = _describe(first, error, options)
    with suppress(OSError):
        if options.debug:
            traceback.print_exception(error)
        also = [f"\nFurther errors: {'; '.join(dict.fromkeys(map(describe, others)))}."] if others else []
        more = [*getattr(first, "__notes__", ()), *_notes(error, first), *also]
        stop = "." if more and text and text[-1].isalnum() else ""
        message = " ".join(filter(None, (text + stop, *more)))
        if message:
            say(message, error=True)
    return code


def _notes(error: BaseException, first: BaseException) -> list[str]:
    return [] if error is first else getattr(error, "__notes__", [])


def _describe(error: BaseException, whole: BaseException, options: argparse.Namespace) -> tuple[int, str]:
    """The exit code and the message of ``error``, the first one of ``whole``, whose traceback is written to a file."""
    if isinstance(error, KeyboardInterrupt):
        number = getattr(error, "number", signal.SIGINT)
        by = "" if number == signal.SIGINT else f" by {signal.Signals(number).name}"
        return exits.SIGNAL + number, f"\nlightning-rl: interrupted{by}."
    if isinstance(error, ConfigError | MissingExtra | IntegrationUnavailable):
        return exits.USAGE, f"lightning-rl: {error}"
    if isinstance(error, RecordError):
        return exits.ERROR, f"lightning-rl: {error}"
    if isinstance(error, LightningError):
        return exits.ERROR, f"lightning-rl: {type(error).__name__}: {error}"
    failure = failure_of(error)
    where = "" if failure is not None and failure.is_disk_full else _write_traceback(whole, options)
    if failure is not None:
        lines = f"\nIt was raised in this code:\n{explain(error)}" if user_lines(error) else ""
        separator = "\n" if lines else ". "
        file = f"{separator}{where}." if where else "" if lines else "."
        return exits.ERROR, f"lightning-rl: {failure.problem}. {failure.advice}{lines}{file}"
    if isinstance(error, ModuleNotFoundError) and not (error.name or "lightning_core").startswith("lightning"):
        return (
            exits.USAGE,
            f"lightning-rl: the package {error.name!r} is not installed: pip install it, or the extra that needs it. {where}.",
        )
    return exits.BUG, (
        f"lightning-rl: unexpected {describe(error)}\n{explain(error)}\nThis is a bug of lightning-rl, or of code that it was given. "
        f"{where}, and --debug shows it. Please report it: {_ISSUES}."
    )


def _write_traceback(error: BaseException, options: argparse.Namespace) -> str:
    """Write the traceback to the run's folder, or else to the folder of temporary files; returns where it is, as a clause."""
    name = time.strftime(f"error-%Y%m%d-%H%M%S-{os.getpid()}.txt")
    header = f"lightning-rl {metadata.version('lightning-rl')} {options.command}, Python {sys.version.split()[0]}, {sys.platform}\n\n"
    text = redact_urls(header + "".join(traceback.format_exception(error)))
    for folder in filter(None, (options.folder, Path(tempfile.gettempdir()))):
        with suppress(OSError):
            (folder / name).write_text(text, encoding="utf-8", errors="backslashreplace")
            return f"The traceback is in {folder / name}"
    return "The traceback could not be written to a file"


def _reader_is_gone() -> bool:
    """Whether the reader of standard output has closed it."""
    if sys.stdout is None:
        return False
    try:
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)
        return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))
    except (AttributeError, OSError, ValueError):  # no poll, or no file behind standard output
        return True
