"""Requests and responses independent of the wire format, as in chat completions."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning_core.chat.json_text import kind_of, show_json
from lightning_core.chat.messages import Message
from lightning_core.dialects.requirements import OutputRequirements
from lightning_core.errors import PolicyRequestError

TextPrompt = str | Sequence[int]
"""A prompt without a chat: its text or its token ids."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """A request that was read. None means that the request does not set the field."""

    model: str
    messages: Sequence[Any]
    tools: Sequence[Any] | None = None
    later_tools: Sequence[Any] = ()
    """The tools that messages define, as ``tools``."""
    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None
    n: int = 1
    stop: tuple[str, ...] = ()
    stop_field: str = "stop"
    """The field of the body with the stop strings."""
    seed: int | None = None
    stream: bool = False
    requirements: OutputRequirements = field(default_factory=OutputRequirements)
    history: Sequence[Message] | None = None
    """The conversation before the response, for a later request that names it.

    None if the format has no such requests.
    """
    prompts: Sequence[TextPrompt] = ()
    """Prompts without a chat, with ``n`` responses each; ``messages`` are then empty."""
    input_field: str = "messages"
    """The field of the body with the messages or prompts."""
    template_settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict[str, Mapping[str, Any]])
    """Variables of the chat template, which replace the configured ones, by the path of the field that sets them."""
    upstream_url: Callable[[str], str] | None = None
    """The URL of the forwarded request, built from the server's, for formats with the model in the URL."""
    notes: Mapping[str, str] = field(default_factory=dict[str, str])
    """The reasons fields were dropped, by path."""
    prompt: str | None = None
    """The prompt that the endpoint added, with its digest."""
    body: Mapping[str, Any] = field(repr=False)
    """The body as the client sent it, for fields that only the dialect reads."""

    @property
    def has_tools(self) -> bool:
        """Whether the response may have tool calls."""
        return bool(self.functions)

    @property
    def functions(self) -> Sequence[Any]:
        """The tools that the response may call."""
        return [*(self.tools or ()), *self.later_tools]

    @property
    def template_variables(self) -> dict[str, Any]:
        """The variables of ``template_settings``; later fields win."""
        return {name: value for variables in self.template_settings.values() for name, value in variables.items()}

    @property
    def choices(self) -> int:
        """The number of responses."""
        return self.n * (len(self.prompts) or 1)

    def input_messages(self, choice: int) -> Sequence[Any]:
        """The messages before response ``choice``; a prompt without a chat becomes a user message."""
        if not self.prompts:
            return self.messages
        prompt = self.prompts[choice // self.n]
        return [{"role": "user", "content": prompt if isinstance(prompt, str) else json.dumps(list(prompt))}]


@dataclass(slots=True, kw_only=True)
class Choice:
    """One response, complete or still being sampled."""

    message: Message
    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str
    """``length`` if the token limit cut it, also with calls; else ``tool_calls`` if it has calls, else ``stop``."""
    stop: str | None = None
    """The stop string that ended the response."""
    has_whole_calls: bool = False
    """Whether ``length`` cut nothing but the end of the response, after complete calls."""

    @property
    def reason(self) -> str:
        """The reason in the response: with ``has_whole_calls`` that of calls, which clients run. The record has ``length``."""
        return "tool_calls" if self.has_whole_calls else self.finish_reason


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseCounts:
    """The tokens of a response, of all its choices."""

    input: int
    output: int
    cached: int = 0
    """Of the input tokens, those from a prompt cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseContext:
    """The known facts of a response before it is sampled."""

    request: ChatRequest
    call: str
    """Span id of the first choice; the id of the response ends with it."""
    model: str
    prompts: Sequence[Sequence[int]]
    """Token ids of each prompt; a chat has one."""
    bytes_of: Callable[[int], bytes | None]
    """The bytes of a token; see `token_bytes`."""
    answered: Callable[[Sequence[int]], bool]
    """Whether a response to the first prompt that starts with these tokens is past its reasoning."""

    known_counts: ResponseCounts | None = None
    """The counts of a response whose tokens are not known; None: those of the prompts and of what is sampled."""
    reports_usage: bool = True
    """Whether the response has its token counts, where the format allows a response without."""

    @property
    def prompt_tokens(self) -> int:
        """The number of tokens of all prompts."""
        return sum(len(ids) for ids in self.prompts) if self.known_counts is None else self.known_counts.input

    def output_tokens(self, choices: Sequence[Choice]) -> int:
        """The number of tokens of ``choices``, which are all."""
        return sum(len(c.token_ids) for c in choices) if self.known_counts is None else self.known_counts.output

    @property
    def cached_tokens(self) -> int:
        """Of the tokens of all prompts, those from a prompt cache."""
        return 0 if self.known_counts is None else self.known_counts.cached


@dataclass(frozen=True, slots=True, kw_only=True)
class UpstreamResponse:
    """One response of an upstream server."""

    message: Message
    finish_reason: str | None = None
    model: str | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None  # of the input tokens
    conversation: str | None = None
    """The id by which a later request continues the conversation that ends with this response; None if the server keeps none."""


_REQUEST_ERRORS = frozenset(
    {"invalid_request_error", "invalid_prompt", "context_length_exceeded", "request_too_large", "INVALID_ARGUMENT"}
    | {"400", "413", "422"}
)
"""Types and codes of errors that a request causes, in all wire formats."""


@dataclass(frozen=True, slots=True)
class StreamError:
    """An error that an upstream server reports in a stream, after the status 200."""

    message: str
    is_request_error: bool
    """Whether the request caused it."""


def stream_error(event: Mapping[str, Any]) -> StreamError | None:
    """The error that an event of a streamed response reports, in any wire format; None for other events.

    ``{"error": {…}}`` (Chat Completions, Google), ``{"type": "error", …}`` (Messages, Responses), ``{"type": "response.failed", …}``.
    """
    response = event.get("response")
    error = event.get("error")
    if event.get("type") == "response.failed" and isinstance(response, Mapping):
        error = response.get("error") or "the response failed"  # pyright: ignore[reportUnknownMemberType]
    elif not error and event.get("type") == "error":
        error = event
    if not error:
        return None
    if not isinstance(error, Mapping):
        return StreamError(str(error), is_request_error=False)  # pyright: ignore[reportUnknownArgumentType]
    kinds: set[str] = {str(error.get(name)) for name in ("type", "code", "status")}  # pyright: ignore[reportUnknownMemberType]
    return StreamError(
        str(error.get("message") or error),  # pyright: ignore
        is_request_error=bool(kinds & _REQUEST_ERRORS),
    )


def model_name(body: Any) -> str:
    """The model named in a request, or "".

    Raises `PolicyRequestError` if the body is not an object.
    """
    if not isinstance(body, Mapping):
        raise PolicyRequestError(f"the request body is {kind_of(body)}; expected an object")
    model = body.get("model")
    if not isinstance(model, (str, type(None))):
        raise PolicyRequestError(f"model is {show_json(model)}; expected a string", param="model")
    return model or ""
