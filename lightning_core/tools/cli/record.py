"""``lightning-rl record``: runs a program unchanged, and records its model calls."""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from lightning_core.errors import ConfigError
from lightning_core.tools.cli.numbers import finite

FOLDER = "recorded"
_ISOLATED = "IES"
"""Options of Python with which it ignores the environment, or imports nothing at its start."""
_WITH_ARGUMENT = "WX"
"""Options of Python with an argument, in the same word or the next."""
_LAST = "cm"
"""Options of Python that end its own."""
_LONG_WITH_ARGUMENT = "--check-hash-based-pycs"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to ``parser``."""
    parser.add_argument(
        "--to", metavar="FOLDER", default=FOLDER, help="the folder of the traces (default: %(default)s)"
    )
    parser.add_argument(
        "--share", metavar="X", type=finite, default=1.0, help="share of traces to record, from 0 to 1 (default: 1)"
    )
    parser.add_argument(
        "--redact",
        metavar="MODULE:FUNCTION",
        help="function that gets each call as a dictionary and returns the one to record, or None to leave the call out",
    )
    parser.add_argument(
        "--max-mb",
        metavar="N",
        type=finite,
        default=1000.0,
        help="limit of the folder in MB; further calls are left out (default: 1000)",
    )
    parser.add_argument("-c", "--config", metavar="CONFIG", help="YAML file with names for calls, under agents")
    parser.add_argument("program", metavar="PROGRAM", help="the program to run, after --, such as python")
    parser.add_argument("arguments", metavar="ARGUMENT", nargs=argparse.REMAINDER, help="its arguments")


def record(options: argparse.Namespace) -> int:
    """Replace this process by the program, whose exit code is then that of the command."""
    from lightning_core.tools.record.naming import names_of
    from lightning_core.tools.record.programs import RecordedProgram, environment_for

    command: list[str] = [options.program, *options.arguments]
    _check(options, command)
    settings = RecordedProgram(
        folder=str(Path(options.to).absolute()),
        share=options.share,
        redact=options.redact,
        max_mb=options.max_mb,
        names=names_of(options.config),
    )
    environment = environment_for(settings, os.environ)
    sys.stdout.flush()
    sys.stderr.flush()
    if os.name == "nt":  # `exec` there starts another process, and ends this one
        return subprocess.call(command, env=environment)
    for name in ("SIGPIPE", "SIGXFSZ"):  # which Python ignores, and the program would inherit
        signal.signal(getattr(signal, name), signal.SIG_DFL)
    return os.execvpe(command[0], command, environment)


def _check(options: argparse.Namespace, command: Sequence[str]) -> None:
    if not 0 <= options.share <= 1:
        raise ConfigError(f"--share {options.share:g}: expected a number from 0 to 1, such as 0.1")
    if options.max_mb <= 0:
        raise ConfigError(f"--max-mb {options.max_mb:g}: expected a number above 0")
    if options.redact is not None and not all(options.redact.partition(":")):
        raise ConfigError(f"--redact {options.redact!r}: expected MODULE:FUNCTION")
    if shutil.which(command[0]) is None:
        raise ConfigError(f"{command[0]!r} is not a program: expected a command after --, such as -- python app.py")
    if Path(command[0]).name.startswith("python") and (option := _isolating(command[1:])) is not None:
        raise ConfigError(
            f"{command[0]} {option} ignores the variables that start the recording: remove the option, or call "
            "lightning_core.record(FOLDER) in the program"
        )


def _isolating(arguments: Sequence[str]) -> str | None:
    """The option among Python's own ``arguments`` with which nothing would be recorded."""
    words = iter(arguments)
    for word in words:
        if not word.startswith("-") or word in ("-", "--"):
            return None
        if word.startswith("--"):
            if word == _LONG_WITH_ARGUMENT:
                next(words, None)
            continue
        for place, letter in enumerate(word[1:], 2):
            if letter in _ISOLATED:
                return word
            if letter in _LAST:
                return None
            if letter in _WITH_ARGUMENT:
                if place == len(word):
                    next(words, None)
                break
    return None
