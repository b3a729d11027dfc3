"""The ids of tool calls that chat templates accept."""

from __future__ import annotations

import re
from enum import Enum
from hashlib import blake2b

_SHORT = re.compile("[a-zA-Z0-9]{9}")
_NUMBERED = re.compile(r"functions\.[\w.-]+:\d+")


class IdStyle(Enum):
    """The ids of calls that a template accepts."""

    ANY = "any"
    SHORT = "short"
    """Nine letters or digits, as in Mistral's templates."""
    NUMBERED = "numbered"
    """``functions.NAME:INDEX``, which is all that Kimi's templates write of the name."""

    def accepts(self, identifier: str) -> bool:
        """Whether templates of this style accept ``identifier``."""
        match self:
            case IdStyle.ANY:
                return True
            case IdStyle.SHORT:
                return _SHORT.fullmatch(identifier) is not None
            case IdStyle.NUMBERED:
                return _NUMBERED.fullmatch(identifier) is not None

    @property
    def patterns(self) -> tuple[str, str]:
        """Regular expressions of `example` as templates write it, and of any id in its place."""
        return {
            IdStyle.ANY: (r"call_\d{24}", "[a-zA-Z0-9_-]{1,40}"),
            IdStyle.SHORT: (r"probe\d{4}", "[a-zA-Z0-9]{9}"),
            IdStyle.NUMBERED: (r":\d+", ":[0-9]{1,2}"),
        }[self]

    def example(self, name: str, index: int) -> str:
        """An id that this style accepts."""
        return {
            IdStyle.ANY: f"call_{index:024d}",
            IdStyle.SHORT: f"probe{index:04d}",
            IdStyle.NUMBERED: f"functions.{name}:{index}",
        }[self]

    def make(self, identifier: str, name: str, index: int) -> str:
        """An id that this style accepts, for the call with ``identifier`` to ``name``, the ``index``-th of a conversation."""
        match self:
            case IdStyle.ANY:
                return identifier
            case IdStyle.SHORT:
                return blake2b(identifier.encode(), digest_size=8).hexdigest()[:9]
            case IdStyle.NUMBERED:
                return f"functions.{name}:{index}"
