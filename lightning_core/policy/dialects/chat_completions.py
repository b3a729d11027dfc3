"""OpenAI's chat completions on the wire: what a request may say, and how an answer looks.

A parameter that the endpoint cannot honour is refused with its name; none is ignored. ``return_token_ids`` is vLLM's extension.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_core.errors import PolicyRequestError

# Parameters without influence on what is sampled: accepted, and meaningless here.
_INERT = frozenset({
    "metadata", "parallel_tool_calls", "prompt_cache_key", "safety_identifier", "service_tier", "store", "stream_options", "user",
})  # fmt: skip
_KNOWN = frozenset({
    "model", "messages", "tools", "tool_choice", "temperature", "top_p", "max_tokens", "max_completion_tokens", "n", "stop", "stream",
    "seed", "logprobs", "top_logprobs", "response_format", "frequency_penalty", "presence_penalty", "return_token_ids",
})  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """A checked request; None where the client left the choice to us."""

    model: str
    messages: Sequence[Any]
    tools: Sequence[Any] | None
    temperature: float | None
    top_p: float | None
    max_tokens: int | None
    n: int
    stop: tuple[str, ...]
    seed: int | None
    stream: bool
    include_usage: bool
    logprobs: bool
    return_token_ids: bool


@dataclass(slots=True, kw_only=True)
class Choice:
    """One sampled response, as far as it has come."""

    message: Mapping[str, Any]
    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str


def model_name(body: Any) -> str:
    """The model that a request names. Raises `PolicyRequestError` if the body is no object."""
    if not isinstance(body, Mapping):
        raise PolicyRequestError(f"the request body is a JSON {type(body).__name__}; expected an object")
    return str(body.get("model") or "")


def parse_request(body: Mapping[str, Any], *, check: bool = True) -> ChatRequest:
    """Read a request body. Raises `PolicyRequestError` naming the parameter that cannot be honoured, if ``check``."""
    if check:
        _refuse_what_cannot_be_honoured(body)
    messages = body.get("messages")
    if not isinstance(messages, list):
        raise PolicyRequestError(f"messages is {messages!r}; expected a list", param="messages")
    stop = body.get("stop") or ()
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    tools = body.get("tools") or None
    return ChatRequest(
        model=model_name(body),
        messages=messages,
        tools=None if body.get("tool_choice") == "none" else tools,
        temperature=_number(body, "temperature", 0.0, 100.0),
        top_p=_number(body, "top_p", 0.0, 1.0),
        max_tokens=_integer(body, "max_completion_tokens", 1) or _integer(body, "max_tokens", 1),
        n=_integer(body, "n", 1) or 1,
        stop=stops,
        seed=_integer(body, "seed", None),
        stream=bool(body.get("stream")),
        include_usage=bool((body.get("stream_options") or {}).get("include_usage")),
        logprobs=bool(body.get("logprobs")),
        return_token_ids=bool(body.get("return_token_ids")),
    )


def _refuse_what_cannot_be_honoured(body: Mapping[str, Any]) -> None:
    unknown = sorted(k for k, v in body.items() if k not in _KNOWN | _INERT and v is not None)
    if unknown:
        raise PolicyRequestError(
            f"unsupported parameters {unknown!r}; supported are {sorted(_KNOWN)!r}", param=str(unknown[0])
        )
    choice = body.get("tool_choice")
    if choice not in (None, "auto", "none"):
        raise PolicyRequestError(
            f"tool_choice {choice!r} would need constrained sampling; use 'auto' or 'none'", param="tool_choice"
        )
    form = body.get("response_format")
    if form is not None and form != {"type": "text"}:
        raise PolicyRequestError(
            "response_format other than text would need constrained sampling", param="response_format"
        )
    for name in ("frequency_penalty", "presence_penalty"):
        if body.get(name):
            raise PolicyRequestError(
                f"{name} changes the sampled distribution in a way that training cannot follow", param=name
            )
    if body.get("top_logprobs"):
        raise PolicyRequestError("top_logprobs: only the sampled token's logprob is known", param="top_logprobs")


def _number(body: Mapping[str, Any], name: str, low: float, high: float) -> float | None:
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise PolicyRequestError(f"{name} is {value!r}; expected a number from {low:g} to {high:g}", param=name)
    return float(value)


def _integer(body: Mapping[str, Any], name: str, low: int | None) -> int | None:
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or (low is not None and value < low):
        raise PolicyRequestError(
            f"{name} is {value!r}; expected an integer{'' if low is None else f' of at least {low}'}", param=name
        )
    return value


def completion(
    request: ChatRequest, choices: Sequence[Choice], *, id: str, model: str, prompt_ids: Sequence[int], decode: Any
) -> dict[str, Any]:
    """The answer to a request without streaming."""
    body: dict[str, Any] = {
        "id": id,
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "choices": [
            {
                "index": i,
                "message": choice.message,
                "finish_reason": choice.finish_reason,
                "logprobs": _logprobs(choice.token_ids, choice.logprobs, decode) if request.logprobs else None,
                **({"token_ids": choice.token_ids} if request.return_token_ids else {}),
            }
            for i, choice in enumerate(choices)
        ],
        "usage": usage(prompt_ids, choices),
    }
    if request.return_token_ids:
        body["prompt_token_ids"] = list(prompt_ids)
    return body


def usage(prompt_ids: Sequence[int], choices: Sequence[Choice]) -> dict[str, int]:
    """Token counts of a request."""
    sampled = sum(len(c.token_ids) for c in choices)
    return {"prompt_tokens": len(prompt_ids), "completion_tokens": sampled, "total_tokens": len(prompt_ids) + sampled}


def chunk(
    id: str, model: str, index: int | None, delta: Mapping[str, Any], *, finish_reason: str | None = None, **extra: Any
) -> bytes:
    """One server-sent event of a streamed answer; ``index`` None for the closing one that carries usage only."""
    choices = (
        [] if index is None else [{"index": index, "delta": delta, "finish_reason": finish_reason, "logprobs": None}]
    )
    if choices and "logprobs" in extra:
        choices[0]["logprobs"] = extra.pop("logprobs")
    if choices and "token_ids" in extra:
        choices[0]["token_ids"] = extra.pop("token_ids")
    body = {
        "id": id,
        "object": "chat.completion.chunk",
        "created": int(time.time()),
        "model": model,
        "choices": choices,
        **extra,
    }
    return b"data: " + json.dumps(body, ensure_ascii=False).encode() + b"\n\n"


def tool_call_delta(message: Mapping[str, Any]) -> dict[str, Any]:
    """The tool calls of a finished message as one streamed delta."""
    return {"tool_calls": [{"index": i, **call} for i, call in enumerate(message["tool_calls"])]}


def stream_logprobs(token_ids: Sequence[int], logprobs: Sequence[float], decode: Any) -> dict[str, Any]:
    """Logprobs of newly sampled tokens, for a chunk."""
    return _logprobs(token_ids, logprobs, decode)


def _logprobs(token_ids: Sequence[int], logprobs: Sequence[float], decode: Any) -> dict[str, Any]:
    content: list[dict[str, Any]] = []
    for token, logprob in zip(token_ids, logprobs, strict=True):
        text = decode([token])
        content.append({"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []})
    return {"content": content, "refusal": None}


def error_body(message: str, *, kind: str, param: str | None = None) -> dict[str, Any]:
    """An error as OpenAI's clients expect it."""
    return {"error": {"message": message, "type": kind, "param": param, "code": None}}
