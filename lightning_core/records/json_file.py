"""Reads JSON files that this package wrote, and that a person may have edited since."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_json(path: Path) -> Any:
    """The content of the file ``path``. Raises `OSError`, or ValueError for damaged text and for a key that is given twice."""
    try:
        return json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_unique)
    except RecursionError:
        raise ValueError("its lists and objects are nested too deep") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {twice!r} is given twice; expected each key once")
    return found
