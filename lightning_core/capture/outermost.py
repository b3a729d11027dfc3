"""Runs of frameworks that are the outermost unit of work of a recorded program; see `context.set_ambient`."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from lightning_core.capture.context import current, enter, opened_scope


def is_outermost() -> bool:
    """Whether the program is recorded here and no agent, node or rollout is open."""
    return current.get() is None and opened_scope() is not None


@contextmanager
def outermost_run() -> Generator[None]:
    """Make the body one unit of work if `is_outermost`: all that it opens belongs to one trace."""
    if not is_outermost():
        yield
        return
    with enter(opened_scope()):
        yield
