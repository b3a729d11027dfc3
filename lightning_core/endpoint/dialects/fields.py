"""The fields of a request body: which are honoured, which are accepted and mean nothing here, and which are refused, each by its name."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lightning_core.errors import PolicyRequestError

TEXT_ONLY = "this model reads and writes text"
OFF_POLICY = "it changes the sampled distribution in a way that training cannot follow"
ONLY_SAMPLED = "only the sampled token's logprob is known"
NO_HOSTED_TOOLS = "only the caller's own tools can be called here"
NOT_KEPT = "nothing is kept here beyond a rollout's own responses"


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a field cannot be honoured."""

    why: str
    unless: tuple[Any, ...] = ()
    """Values that ask for nothing; null is one always."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fields:
    """All fields of a wire format. ``outer.inner`` is a field of the object in ``outer``, whose other fields are refused."""

    honoured: frozenset[str]
    inert: frozenset[str]
    """Without influence on what a model without reasoning and without hosted tools samples: accepted, and meaningless here."""
    refused: Mapping[str, Refusal] = field(default_factory=dict[str, Refusal])

    def check(self, body: Mapping[str, Any], *, within: str = "") -> None:
        """Raise `PolicyRequestError` for a field that asks for what cannot be honoured; one that is not known at all among them."""
        for key, value in body.items():
            name = f"{within}{key}"
            if value is None or name in self.honoured or name in self.inert:
                continue
            if any(known.startswith(f"{name}.") for known in self.honoured | self.inert):
                if not isinstance(value, Mapping):
                    raise PolicyRequestError(f"{name} is {value!r}; expected an object", param=name)
                self.check(value, within=f"{name}.")
                continue
            refusal = self.refused.get(name)
            if refusal is None:
                raise PolicyRequestError(
                    f"{name!r} is no field that is known here; honoured are {sorted(self.honoured)!r}", param=name
                )
            if value not in refusal.unless:
                raise PolicyRequestError(f"{name} is {value!r}: {refusal.why}", param=name)


def number(body: Mapping[str, Any], name: str, low: float, high: float, *, zero: bool = False) -> float | None:
    """A number of the body, or None. Raises `PolicyRequestError` if it is something else or out of range; 0 is in it with ``zero``."""
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
    raise PolicyRequestError(f"{name} is {value!r}; expected {range_}", param=name)


def temperature(body: Mapping[str, Any]) -> float | None:
    """0 means greedy; so near to it that single precision cannot divide by it would mean nothing."""
    return number(body, "temperature", 1e-6, 100.0, zero=True)


def top_p(body: Mapping[str, Any]) -> float | None:
    """The nucleus; it holds the likeliest token however small it is, but cannot be empty."""
    return number(body, "top_p", 1e-6, 1.0)


def integer(body: Mapping[str, Any], name: str, low: int, high: float = math.inf) -> int | None:
    """An integer of the body, or None. Raises `PolicyRequestError` if it is something else or out of range."""
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        most = "" if high == math.inf else f" and at most {high}"
        raise PolicyRequestError(f"{name} is {value!r}; expected an integer of at least {low}{most}", param=name)
    return value


def seed(body: Mapping[str, Any]) -> int | None:
    """A signed integer of 64 bits."""
    return integer(body, "seed", -(1 << 63), (1 << 63) - 1)


def flag(body: Mapping[str, Any], name: str) -> bool | None:
    """True, False or None. Raises `PolicyRequestError` if it is something else."""
    value = body.get(name)
    if not isinstance(value, (bool, type(None))):
        raise PolicyRequestError(f"{name} is {value!r}; expected true or false", param=name)
    return value


def text(body: Mapping[str, Any], name: str) -> str | None:
    """A string of the body, or None. Raises `PolicyRequestError` if it is something else."""
    value = body.get(name)
    if not isinstance(value, (str, type(None))):
        raise PolicyRequestError(f"{name} is {value!r}; expected a string", param=name)
    return value


def strings(body: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """A list of strings in the body, empty where there is none. Raises `PolicyRequestError` if it is something else."""
    value = body.get(name)
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise PolicyRequestError(f"{name} is {value!r}; expected a list of strings", param=name)
    return tuple(value)


def stops(body: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """One stop string or several. Raises `PolicyRequestError` if one of them is empty: it would end every answer before it begins."""
    value = body.get(name)
    found = (value,) if isinstance(value, str) else strings(body, name)
    if "" in found:
        raise PolicyRequestError(f"{name} is {value!r}; expected strings that are not empty", param=name)
    return found


def objects(body: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    """A list of objects in the body, empty where there is none. Raises `PolicyRequestError` if it is something else."""
    value = body.get(name)
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(item, Mapping) for item in value):
        raise PolicyRequestError(f"{name} is {value!r}; expected a list of objects", param=name)
    return value
