"""Tables of request fields (supported, ignored, dropped, refused), and readers for their values."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from lightning_core.chat.json_text import MOST_SHOWN, show_json
from lightning_core.errors import HostedToolError, PolicyRequestError, did_you_mean, shorten

TEXT_ONLY = "the model reads and writes text only"
OFF_POLICY = "the sampler has temperature and top_p only"
ONLY_SAMPLED = "only the logprob of the sampled token is available"
NO_HOSTED_TOOLS = "only function tools that the client runs are supported"
NO_SEARCH = "the model cannot use tools of a provider; it is not shown this one"
NOT_STORED = "the endpoint stores nothing but the responses of the current rollout"

_INDEX = re.compile(r"(?<=\.)\d+(?=\.|$)")
_MOST_NOTES = 50
"""Notes of one request. The ledger needs no more, and a request may have millions of unknown fields."""
_LONGEST_NAME = 200

_notes: ContextVar[dict[str, str] | None] = ContextVar("notes", default=None)


@contextmanager
def collect_notes() -> Generator[dict[str, str]]:
    """The reasons of the fields that are dropped in this block, by path; indices in a path are ``N``."""
    notes: dict[str, str] = {}
    token = _notes.set(notes)
    try:
        yield notes
    finally:
        _notes.reset(token)


def note(path: str, reason: str) -> None:
    """Note that the field at ``path`` is dropped. The ledger of the run counts the requests."""
    notes = _notes.get()
    if notes is not None and len(notes) < _MOST_NOTES:
        notes.setdefault(_INDEX.sub("N", path[:_LONGEST_NAME]), reason)


def _is_full() -> bool:
    notes = _notes.get()
    return notes is None or len(notes) >= _MOST_NOTES


class JsonType(NamedTuple):
    """A type of values in JSON."""

    name: str
    types: tuple[type, ...]

    def check(self, value: Any, path: str) -> None:
        """Raise `PolicyRequestError` if ``value``, the field at ``path``, has another type."""
        if not isinstance(value, self.types) or (isinstance(value, bool) and bool not in self.types):
            raise PolicyRequestError(f"{path} is {show_json(value)}; expected {self.name}", param=path)


FLAG = JsonType("true or false", (bool,))
INTEGER = JsonType("an integer", (int,))
NUMBER = JsonType("a number", (int, float))
TEXT = JsonType("a string", (str,))
LIST = JsonType("a list", (list,))
OBJECT = JsonType("an object", (dict,))
TEXT_OR_LIST = JsonType("a string or a list", (str, list))
TEXT_OR_OBJECT = JsonType("a string or an object", (str, dict))


@dataclass(frozen=True, slots=True)
class UnsupportedField:
    """A field that is refused, and why."""

    reason: str
    unless: tuple[Any, ...] = ()
    """Values without effect, which are accepted silently. null always is."""


@dataclass(frozen=True, slots=True)
class DroppedField(UnsupportedField):
    """A field that is dropped, and why. Values of another type are refused."""

    kind: JsonType = field(kw_only=True)


PENALTY = DroppedField(OFF_POLICY, unless=(0,), kind=NUMBER)

_Unsupported = TypeVar("_Unsupported", bound=UnsupportedField)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fields:
    """All fields of a JSON object.

    ``outer.inner`` is a field of the object in ``outer``, whose fields are then checked too.

    The value of a name without inner names is not looked into. Fields in no table are dropped: clients add bookkeeping in every
    version.
    """

    supported: frozenset[str]
    ignored: frozenset[str] = frozenset()
    """Bookkeeping: accepted, without effect on what the model sees or samples."""
    dropped: Mapping[str, DroppedField] = field(default_factory=dict[str, DroppedField])
    """Accepted and noted: they would have an effect that is not available, and clients work without it."""
    refused: Mapping[str, UnsupportedField] = field(default_factory=dict[str, UnsupportedField])
    """Errors: the response would be useless to the client."""
    _accepted: frozenset[str] = field(init=False, repr=False, compare=False)
    _objects: Mapping[str, Fields] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        names = self.supported | self.ignored
        object.__setattr__(self, "_accepted", frozenset(name for name in names if "." not in name))
        outers = {name.partition(".")[0] for name in names if "." in name}
        object.__setattr__(self, "_objects", {outer: self._inside(outer) for outer in outers})

    def _inside(self, outer: str) -> Fields:
        """The fields of the object in ``outer``."""

        def inner(names: frozenset[str]) -> frozenset[str]:
            return frozenset(name.removeprefix(f"{outer}.") for name in names if name.startswith(f"{outer}."))

        def unsupported(fields: Mapping[str, _Unsupported]) -> dict[str, _Unsupported]:
            return {name: fields[f"{outer}.{name}"] for name in inner(frozenset(fields))}

        return Fields(
            supported=inner(self.supported),
            ignored=inner(self.ignored),
            dropped=unsupported(self.dropped),
            refused=unsupported(self.refused),
        )

    def check(self, value: Mapping[str, Any], path: str = "") -> None:
        """Note the fields of ``value`` that are dropped or unknown.

        ``path``: where ``value`` is in the request, such as ``messages.2``; empty for the request itself. Raises
        `PolicyRequestError` for the first field that is refused, and for a dropped one of another type.
        """
        if value.keys() <= self._accepted:
            return
        for key, inner in value.items():
            if inner is None or key in self._accepted:
                continue
            fields = self._objects.get(key)
            if fields is not None and isinstance(inner, dict) and inner.keys() <= fields._accepted:
                continue
            name = f"{path}.{key}" if path else key
            if fields is not None:
                if not isinstance(inner, Mapping):
                    raise PolicyRequestError(f"{name} is {show_json(inner)}; expected an object", param=name)
                fields.check(inner, name)
            elif (dropped := self.dropped.get(key)) is not None:
                dropped.kind.check(inner, name)
                if inner not in dropped.unless:
                    note(name, dropped.reason)
            elif (refused := self.refused.get(key)) is None:
                if not _is_full():
                    note(name, self._unknown(key))
            elif inner not in refused.unless:
                if refused.reason == NO_HOSTED_TOOLS:
                    raise HostedToolError(f"{name} is not supported: {refused.reason}", param=name)
                raise PolicyRequestError(
                    f"{name} is {show_json(inner)}, which is not supported: {refused.reason}", param=name
                )

    def _unknown(self, name: str) -> str:
        known = {known.partition(".")[0] for known in self.supported | self.ignored}
        meant = did_you_mean(name[:_LONGEST_NAME], known, cutoff=0.8)
        return f"unknown field; {meant}" if meant else "unknown field"


def check_left_out(tools: Sequence[str], *, left: bool) -> None:
    """Raise `HostedToolError` if no tool is ``left`` beside ``tools``, which the model is not shown.

    Without them, such a request would be answered from what the model remembers, as if it had searched.
    """
    if tools and not left:
        raise HostedToolError(
            f"tools has only {', '.join(tools)}; expected at least one function: {NO_HOSTED_TOOLS}", param="tools"
        )


def refused_tool(kind: Any, path: str, known: Sequence[str]) -> PolicyRequestError:
    """The error for a tool of another type than ``known``, which only a provider can run, or that lacks fields of its type."""
    found = shorten(kind, MOST_SHOWN) if isinstance(kind, str) else show_json(kind)
    message = f"{path} is {found}; expected {', '.join(known)} with its fields: {NO_HOSTED_TOOLS}"
    if isinstance(kind, str) and kind not in known:
        return HostedToolError(message, param=path)
    return PolicyRequestError(message, param=path)


def check_variant(variants: Mapping[str, Fields], value: Mapping[str, Any], path: str, *, default: str = "") -> None:
    """Check ``value`` by the table of its ``type`` (``default`` if it has none).

    Types without a table are not checked.
    """
    kind = value.get("type", default)
    if isinstance(kind, str) and (fields := variants.get(kind)) is not None:
        fields.check(value, path)


def check_function(function: Mapping[str, Any], path: str, parameters: str = "parameters") -> None:
    """Raise `PolicyRequestError` if the description or ``parameters`` of the function at ``path`` has another type."""
    for name, kind in (("description", TEXT), (parameters, OBJECT)):
        if function.get(name) is not None:
            kind.check(function[name], f"{path}.{name}")


def check_choice(value: Any, choices: Collection[str], path: str) -> None:
    """Raise `PolicyRequestError` if ``value``, the field at ``path``, is not one of ``choices``."""
    if not isinstance(value, str) or value not in choices:
        raise PolicyRequestError(f"{path} is {show_json(value)}; expected one of {list(choices)!r}", param=path)


def number(body: Mapping[str, Any], name: str, low: float, high: float, *, zero: bool = False) -> float | None:
    """A number of the body, or None.

    Raises `PolicyRequestError` for other types and values; ``zero`` allows 0.
    """
    value = body.get(name)
    if value is None:
        return None
    if (
        isinstance(value, (int, float))
        and not isinstance(value, bool)
        and (low <= value <= high or (zero and value == 0))
    ):
        return float(value)
    range_ = f"{'0, or ' if zero else ''}a number from {low:g} to {high:g}"
    raise PolicyRequestError(f"{name} is {show_json(value)}; expected {range_}", param=name)


def temperature(body: Mapping[str, Any]) -> float | None:
    """The sampling temperature, 0 (greedy) or at least 1e-6."""
    return number(body, "temperature", 1e-6, 100.0, zero=True)


def top_p(body: Mapping[str, Any]) -> float | None:
    """The probability mass of nucleus sampling."""
    return number(body, "top_p", 1e-6, 1.0)


def integer(body: Mapping[str, Any], name: str, low: int, high: float = math.inf) -> int | None:
    """An integer of the body, or None. Raises `PolicyRequestError` for other types and values."""
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        most = "" if high == math.inf else f" and at most {high}"
        raise PolicyRequestError(
            f"{name} is {show_json(value)}; expected an integer of at least {low}{most}", param=name
        )
    return value


def seed(body: Mapping[str, Any]) -> int | None:
    """The random seed, a signed 64-bit integer."""
    return integer(body, "seed", -(1 << 63), (1 << 63) - 1)


def flag(body: Mapping[str, Any], name: str) -> bool | None:
    """A boolean of the body, or None. Raises `PolicyRequestError` for other types."""
    value = body.get(name)
    if not isinstance(value, (bool, type(None))):
        raise PolicyRequestError(f"{name} is {show_json(value)}; expected true or false", param=name)
    return value


def text(body: Mapping[str, Any], name: str, path: str = "") -> str | None:
    """A string of the body, or None.

    Raises `PolicyRequestError` for other types. ``path``: where the body is in the request.
    """
    value = body.get(name)
    if not isinstance(value, (str, type(None))):
        where = f"{path}.{name}" if path else name
        raise PolicyRequestError(f"{where} is {show_json(value)}; expected a string", param=where)
    return value


def strings(body: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """A list of strings of the body, empty if absent.

    Raises `PolicyRequestError` for other types.
    """
    return tuple(_items(body, name, str, "strings"))


def stops(body: Mapping[str, Any], name: str, *, one: bool = False) -> tuple[str, ...]:
    """The stop strings, a list. ``one``: or a string.

    Raises `PolicyRequestError` for other types and for empty strings.
    """
    value = body.get(name)
    texts = (value,) if one and isinstance(value, str) else strings(body, name)
    if "" in texts:
        raise PolicyRequestError(f"{name} is {show_json(value)}; expected non-empty strings", param=name)
    return texts


def objects(body: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    """A list of objects of the body, empty if absent.

    Raises `PolicyRequestError` for other types.
    """
    return _items(body, name, Mapping, "objects")


def _items(body: Mapping[str, Any], name: str, kind: type, kinds: str) -> list[Any]:
    value = body.get(name)
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(item, kind) for item in value):
        raise PolicyRequestError(f"{name} is {show_json(value)}; expected a list of {kinds}", param=name)
    return value
