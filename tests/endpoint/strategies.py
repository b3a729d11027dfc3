"""Hypothesis strategies for requests as an SDK's TypedDicts describe them, some with errors."""

from __future__ import annotations

import copy
import json
from collections.abc import Collection, Mapping
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from typing_extensions import is_typeddict

WORDS = [
    "",
    "hi",
    "base",
    "writer",
    "<|im_end|>",
    "<tool_call>",
    '{"name": "f"}',
    "\ud800",
    "\x00",
    "ünï",
    "auto",
    "none",
    "a" * 999,
]
"""Strings, some with a meaning in the chat format."""

TEXT: SearchStrategy[str] = st.sampled_from(WORDS) | st.text(max_size=8)
NUMBER: SearchStrategy[Any] = (
    st.sampled_from([0, 1, -1, 1 << 31, 1 << 63, 10**400, 1e-300, 0.5, float("nan"), float("inf")])
    | st.integers(-3, 300)
    | st.floats(0, 2)
)
JUNK: SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | NUMBER | TEXT,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXT, inner, max_size=2),
    max_leaves=5,
)

_DEEPEST = 5


def request(params: Any, least: Mapping[str, Any], read: Collection[str]) -> SearchStrategy[bytes]:
    """Bodies of ``params``, an SDK's TypedDict: ``least`` plus a few other fields, most of them valid.

    Fields in ``read`` are more frequent than the others, which are refused or ignored.
    """
    hints = get_type_hints(params)
    names = st.sampled_from(sorted(set(read) & set(hints))) | st.sampled_from(sorted(hints))

    @st.composite
    def draw(draw: st.DrawFn) -> bytes:
        body: dict[str, Any] = copy.deepcopy(dict(least))
        for name in draw(st.lists(names, min_size=1, max_size=3)):
            body[name] = draw(of(hints[name]))
        if draw(st.booleans()):
            spoil(body, draw)
        data = json.dumps(body).encode()
        if draw(st.integers(0, 19)) == 0:
            at, size = draw(st.integers(0, len(data))), draw(st.integers(0, 9))
            data = data[:at] + draw(st.binary(max_size=4)) + data[at + size :]
        return data

    return draw()


def spoil(body: dict[str, Any], draw: st.DrawFn) -> None:
    """Replace a part of ``body`` with an invalid value, often deep inside."""
    value: Any = body
    while True:
        places = list(value) if isinstance(value, dict) else list(range(len(value)))
        place = draw(st.sampled_from(places))
        if isinstance(value[place], (dict, list)) and value[place] and draw(st.integers(0, 3)):
            value = value[place]
        else:
            value[place] = draw(JUNK)
            return


@cache
def of(hint: Any, depth: int = 0) -> SearchStrategy[Any]:
    """JSON values that ``hint`` allows."""
    origin, arguments = get_origin(hint), get_args(hint)
    if depth > _DEEPEST:
        return JUNK
    if is_typeddict(hint):
        return st.deferred(lambda: object_of(hint, depth + 1))
    if origin in (Union, UnionType):
        return st.one_of([of(part, depth) for part in arguments])
    if origin is Literal:
        return st.sampled_from(arguments)
    if hint in (None, NoneType):
        return st.none()
    if hint is str:
        return TEXT
    if hint is bool:
        return st.booleans()
    if hint in (int, float):
        return NUMBER
    if len(arguments) == 2:
        return st.dictionaries(TEXT, of(arguments[1], depth + 1), max_size=2)
    if len(arguments) == 1:  # any kind of list
        return st.lists(of(arguments[0], depth + 1), max_size=2)
    return JUNK


@st.composite
def object_of(draw: st.DrawFn, kind: Any, depth: int) -> dict[str, Any]:
    """An object with its required fields, and perhaps an optional one."""
    hints = get_type_hints(kind)
    names = set(kind.__required_keys__)
    if optional := sorted(set(hints) - names):
        names |= set(draw(st.lists(st.sampled_from(optional), max_size=1)))
    return {name: draw(of(hints[name], depth)) for name in sorted(names)}
