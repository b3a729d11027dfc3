"""Selectors: how a configuration names agents.

A selector is a name, or a path such as ``team/writer``. A ``*`` in it matches any characters of one name, so agents that are
created at run time can be listed: ``researcher-*`` selects ``researcher-1`` and ``researcher-2``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Sequence
from functools import cache


def is_pattern(selector: str) -> bool:
    """Whether ``selector`` can match several names."""
    return "*" in selector


def matches(selector: str, name: str) -> bool:
    """Whether ``selector`` is ``name``, or a pattern that matches it. Case matters, and all characters but ``*`` are literal."""
    return selector == name or (is_pattern(selector) and _compiled(selector).fullmatch(name) is not None)


def matched(selector: str, path: Sequence[str]) -> str | None:
    """The names of ``path`` that ``selector`` matches: the last one, and in order those around it. None if it does not."""
    if matches(selector, path[-1]):
        return path[-1]
    *around, last = selector.split("/")
    if not around or not matches(last, path[-1]):
        return None
    outer = iter(path[:-1])
    found = [next((name for name in outer if matches(part, name)), None) for part in around]
    return None if None in found else "/".join(name for name in (*found, path[-1]) if name is not None)


def may_overlap(first: str, second: str) -> bool:
    """Whether a name can match both selectors."""
    if not first or not second:
        return set(first + second) <= {"*"}
    if first[0] == "*":  # it matches nothing more, or one more character of a name
        return may_overlap(first[1:], second) or (second[0] != "/" and may_overlap(first, second[1:]))
    if second[0] == "*":
        return may_overlap(second, first)
    return first[0] == second[0] and may_overlap(first[1:], second[1:])


def find_selector(selectors: Iterable[str], name: str) -> str | None:
    """The selector that matches ``name``: an exact match, else the longest pattern, else None."""
    found = [s for s in selectors if matches(s, name)]
    return max(found, key=lambda s: (s == name, len(s), s), default=None)


def is_known(selector: str, known: Collection[str]) -> bool:
    """Whether ``selector`` matches any of the names ``known``. A path is known if each of its names is."""
    if selector in known or any(matches(selector, name) for name in known):
        return True
    parts = selector.split("/")
    return len(parts) > 1 and all(is_known(part, known) for part in parts)


_PLAIN = re.compile(r"[A-Za-z_](?:[\w ./-]*[\w./-])?")
_YAML_WORDS = frozenset({"true", "false", "null", "yes", "no", "on", "off", "y", "n"})


def as_yaml(text: str) -> str:
    """``text`` as it is written inside a YAML list, on one line."""
    plain = _PLAIN.fullmatch(text) is not None and text.lower() not in _YAML_WORDS
    return text if plain else json.dumps(text, ensure_ascii=False)


@cache
def _compiled(selector: str) -> re.Pattern[str]:
    return re.compile("[^/]*".join(re.escape(part) for part in selector.split("*")), re.DOTALL)
