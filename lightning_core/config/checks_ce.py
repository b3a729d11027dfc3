"""Checks of the section ``algorithm.ce``."""

from __future__ import annotations

from collections.abc import Iterator

from lightning_core.config.sections import Sections
from lightning_core.config.source import KeyPath


def check_ce(c: Sections) -> Iterator[tuple[KeyPath, str]]:
    """Yield problems of ``algorithm.ce``."""
    ce = c.algorithm.ce
    if ce is None:
        return
    path = ("algorithm", "ce")
    if not ce.tokens or len(set(ce.tokens)) < len(ce.tokens):
        yield (
            (*path, "tokens"),
            f"found {list(ce.tokens)!r}, expected one or more different sources: tool, user or response",
        )
    if ce.min_reward is not None and "response" not in ce.tokens:
        yield (*path, "min_reward"), f"goes with tokens: response only, but algorithm.ce.tokens is {list(ce.tokens)!r}"
