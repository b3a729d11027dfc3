"""The name of the program that a command line starts, which is recorded. The rest of a command may contain secrets."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence
from typing import Any

_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*\+?=[^`(]*", re.DOTALL)
_PROGRAM = re.compile(r"[\w.+/-]+")


def program_of(words: Sequence[Any]) -> str:
    """The name of the program with these arguments; for a shell with ``-c``, the name of its command."""
    name = os.path.basename(os.fsdecode(words[0]))
    if len(words) > 2 and name.endswith("sh") and os.fsdecode(words[1]) == "-c":
        return program_of_command(os.fsdecode(words[2]), shell=name)
    return name


def program_of_command(command: str, *, shell: str) -> str:
    """The name of the first program of a shell's command; ``shell`` if that is not a plain word.

    Assignments before the program (``TOKEN=secret program``) are skipped.
    """
    try:
        words = shlex.split(command)
    except ValueError:
        return shell
    program = next((word for word in words if not _ASSIGNMENT.fullmatch(word)), "")
    return os.path.basename(program) if _PROGRAM.fullmatch(program) else shell
