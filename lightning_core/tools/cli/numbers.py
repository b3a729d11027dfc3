"""Numbers as options: what argparse refuses with a usage error."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def whole(least: int) -> Callable[[str], int]:
    """The type of an option that is a whole number from ``least``."""

    def parse(text: str) -> int:
        from lightning_core.tools.runs.browse import whole_number

        return _checked(text, lambda text: whole_number(text, least=least))

    return parse


def finite(text: str) -> float:
    """The type of an option that is a finite number."""
    from lightning_core.tools.runs.browse import finite_number

    return _checked(text, finite_number)


def port(text: str) -> int:
    """The type of an option that is a TCP port; 0: any free one."""
    number = int(text) if text.isascii() and text.isdecimal() and len(text) <= 5 else -1
    if not 0 <= number <= 65_535:
        raise argparse.ArgumentTypeError(f"found {text!r}, expected a port from 0 to 65535")
    return number


def _checked(text: str, parse: Callable[[str], T]) -> T:
    try:
        return parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"found {text!r}, {error}") from None
