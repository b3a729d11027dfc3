"""The log format of commands and their worker processes."""

from __future__ import annotations

import logging
import os
import re
from typing import Any

from lightning_core.errors import Repeats, explain, shorten, visible

DEBUG_VARIABLE = "LIGHTNING_DEBUG"

_FORMAT = "%(levelname)s %(name)s: %(message)s"
_OWN = re.compile(r"^([A-Z]+) lightning_[\w.]+(?=: )")
"""The level of a message of Lightning, and its logger, which is shown with `DEBUG_VARIABLE` only."""
_MOST_LINES = 30
_LAST_LINES = 10
_MOST_CHARACTERS = 2_000
"""The most characters of one line."""
_ID = re.compile(r"0x[0-9a-f]+|[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}|[0-9a-f]{16,}")
"""Addresses, UUIDs and other ids. They never distinguish messages."""
_NUMBER = re.compile(r"\d+")
_MOST_VARIANTS = 10
"""Most messages that differ only in their numbers, such as exit codes and hosts, which are counted separately."""
_MOST_KINDS = 10_000
"""Messages of further kinds are not counted, and all are printed."""


def configure_logging(level: int = logging.WARNING) -> None:
    """Print messages from ``level`` on standard error, folded. Does nothing if logging has been configured.

    Tracebacks are shown if the variable ``LIGHTNING_DEBUG`` is set, which child processes inherit.
    """
    handler = logging.StreamHandler()
    handler.addFilter(FirstOfEach())
    formatter = FoldingFormatter if DEBUG_VARIABLE in os.environ else _PlainFormatter
    handler.setFormatter(formatter(_FORMAT))
    logging.basicConfig(level=level, handlers=[handler])


class FirstOfEach(logging.Filter):
    """Passes a message the first time, the 10th, the 100th and so on, with its number.

    Messages are equal up to their ids. After `_MOST_VARIANTS` messages that differ only in their numbers, further ones are equal too.
    """

    def __init__(self) -> None:
        super().__init__()
        self._repeats = Repeats()
        self._variants: dict[int, set[int]] = {}
        """The messages of each kind, as hashes: texts are long."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether ``record`` is printed. Those that their callers count (`COUNTED`) always are."""
        if getattr(record, "is_counted", False):
            return True
        text = _ID.sub("0", _text(record)[:_MOST_CHARACTERS])
        kind = hash((record.name, record.levelno, _NUMBER.sub("0", text)))
        if kind not in self._variants and len(self._variants) >= _MOST_KINDS:
            return True
        variants = self._variants.setdefault(kind, set())
        variant = hash(text)
        if len(variants) < _MOST_VARIANTS:
            variants.add(variant)
        of_kind = self._repeats.count(kind)
        record.times = times = self._repeats.count((kind, variant)) if variant in variants else of_kind
        return times is not None


class FoldingFormatter(logging.Formatter):
    """Leaves out the middle of long messages and tracebacks, and shows control characters of agents' texts as escapes."""

    def format(self, record: logging.LogRecord) -> str:
        """The text to print."""
        lines = visible(super().format(record)).split("\n")
        if len(lines) > _MOST_LINES:
            left = len(lines) - _MOST_LINES
            lines[_MOST_LINES - _LAST_LINES : -_LAST_LINES] = [f"… {left} lines more …"]
        lines = [shorten(line, _MOST_CHARACTERS) for line in lines]
        return "\n".join([f"{lines[0]}{getattr(record, 'times', '') or ''}", *lines[1:]])


class _PlainFormatter(FoldingFormatter):
    """Shows the user's code and the message in place of a traceback, and Lightning's own messages without their logger."""

    def format(self, record: logging.LogRecord) -> str:
        """The text to print."""
        return _OWN.sub(r"\1", super().format(record))

    def formatException(self, ei: Any) -> str:
        """The lines to print."""
        return explain(ei[1])


def _text(record: logging.LogRecord) -> str:
    try:
        return record.getMessage()
    except Exception:  # noqa: BLE001 - wrong arguments of the caller, which the handler reports
        return str(record.msg)
