"""A request and its answer as the endpoint sees them, whatever the wire format: messages and tools are those of chat completions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning_core.errors import PolicyRequestError
from lightning_core.policy.demands import Demands

Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """A checked request; None where the client left the choice to us."""

    model: str
    messages: Sequence[Any]
    tools: Sequence[Any] | None = None
    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None
    n: int = 1
    stop: tuple[str, ...] = ()
    seed: int | None = None
    stream: bool = False
    demands: Demands = field(default_factory=Demands)
    carried: Sequence[Message] | None = None
    """What a later request that names this answer begins with, the answer itself aside; None if there can be none."""
    body: Mapping[str, Any] = field(repr=False)
    """As the client sent it, for what concerns only the wire format."""


@dataclass(slots=True, kw_only=True)
class Choice:
    """One sampled response, as far as it has come."""

    message: Message
    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str
    """stop, length or tool_calls."""
    stop: str | None = None
    """The stop string that ended it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What is known of an answer before it is sampled."""

    request: ChatRequest
    call: str
    """Id of the first response's span; the answer's id on the wire has it at its end."""
    model: str
    prompt_ids: Sequence[int]
    decode: Callable[[Sequence[int]], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One response of somebody else's model server."""

    message: Message
    finish_reason: str | None = None
    model: str | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None


def model_name(body: Any) -> str:
    """The model that a request names. Raises `PolicyRequestError` if the body is no object."""
    if not isinstance(body, Mapping):
        raise PolicyRequestError(f"the request body is a JSON {type(body).__name__}; expected an object")
    return str(body.get("model") or "")


def refuse_unknown(body: Mapping[str, Any], known: frozenset[str], inert: frozenset[str]) -> None:
    """Raise `PolicyRequestError` for a parameter that is neither honoured nor without influence on what is sampled."""
    unknown = sorted(k for k, v in body.items() if k not in known | inert and v is not None)
    if unknown:
        raise PolicyRequestError(
            f"unsupported parameters {unknown!r}; supported are {sorted(known)!r}", param=str(unknown[0])
        )


def number(body: Mapping[str, Any], name: str, low: float, high: float) -> float | None:
    """A number of the body, or None. Raises `PolicyRequestError` if it is something else or out of range."""
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise PolicyRequestError(f"{name} is {value!r}; expected a number from {low:g} to {high:g}", param=name)
    return float(value)


def integer(body: Mapping[str, Any], name: str, low: int | None) -> int | None:
    """An integer of the body, or None. Raises `PolicyRequestError` if it is something else or below ``low``."""
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or (low is not None and value < low):
        raise PolicyRequestError(
            f"{name} is {value!r}; expected an integer{'' if low is None else f' of at least {low}'}", param=name
        )
    return value


def objects(body: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    """A list of objects in the body, empty where there is none. Raises `PolicyRequestError` if it is something else."""
    value = body.get(name) or []
    if not isinstance(value, list) or not all(isinstance(item, Mapping) for item in value):
        raise PolicyRequestError(f"{name} is {value!r}; expected a list of objects", param=name)
    return value
