"""The wire format of OpenAI's legacy completions: prompts as text or token ids.

No chat template is applied, and no tools are called. Choices are numbered prompt by prompt. ``return_token_ids`` is vLLM's extension.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, cast

from lightning_core.chat.json_text import show_json
from lightning_core.chat.messages import Message
from lightning_core.dialects.dialect import sse
from lightning_core.dialects.exchange import (
    ChatRequest,
    Choice,
    ResponseContext,
    TextPrompt,
    UpstreamResponse,
    model_name,
)
from lightning_core.dialects.fields import (
    Fields,
    UnsupportedField,
    flag,
    integer,
    seed,
    stops,
    temperature,
    top_p,
)
from lightning_core.dialects.logprobs import characters, token_text
from lightning_core.dialects.openai_chat import FORWARDED_HEADERS as FORWARDED_HEADERS
from lightning_core.dialects.openai_chat import KEY_HEADER as KEY_HEADER
from lightning_core.dialects.openai_chat import error_body as error_body
from lightning_core.dialects.openai_chat import error_event as error_event
from lightning_core.dialects.openai_chat import usage_field, wants_usage
from lightning_core.dialects.openai_sampler import GUIDED, SAMPLER
from lightning_core.dialects.usage import openai_chat_tokens
from lightning_core.errors import PolicyRequestError

PATH = "/completions"

FIELDS = Fields(
    supported=frozenset({
        "model", "prompt", "temperature", "top_p", "max_tokens", "n", "stop", "stream", "stream_options.include_usage", "seed",
        "logprobs", "return_token_ids",
    }),
    ignored=frozenset({"stream_options.include_obfuscation", "user"}),
    dropped=SAMPLER,
    refused={
        **GUIDED,
        "best_of": UnsupportedField("every response is returned", unless=(1,)),
        "echo": UnsupportedField("a response is the sampled text, without its prompt", unless=(False,)),
        "suffix": UnsupportedField("the model writes what follows a prompt, not what is between two texts"),
    },
)  # fmt: skip


NESTED: dict[str, Fields] = {}


def parse_request(body: Mapping[str, Any], *, conversations: Mapping[str, Sequence[Message]]) -> ChatRequest:
    """See `Dialect.parse_request`."""
    FIELDS.check(body)
    request = read_request(body, conversations=conversations)
    if integer(body, "logprobs", 0):
        raise PolicyRequestError(
            f"logprobs is {show_json(body['logprobs'])}; expected 0: only the logprob of the sampled token is available",
            param="logprobs",
        )
    flag(body, "return_token_ids")
    wants_usage(body)
    return replace(
        request,
        temperature=temperature(body),
        top_p=top_p(body),
        max_tokens=integer(body, "max_tokens", 1),
        stop=stops(body, "stop", one=True),
        seed=seed(body),
    )


def read_request(body: Mapping[str, Any], *, conversations: Mapping[str, Sequence[Message]]) -> ChatRequest:
    """See `Dialect.read_request`."""
    del conversations
    return ChatRequest(
        model=model_name(body),
        messages=(),
        prompts=_prompts(body.get("prompt")),
        input_field="prompt",
        n=integer(body, "n", 1) or 1,
        stream=flag(body, "stream") or False,
        body=body,
    )


def _prompts(prompt: Any) -> Sequence[TextPrompt]:
    """The prompts: a string, its token ids, or a list of either."""
    if isinstance(prompt, str) or _is_ids(prompt):
        return [prompt]
    if isinstance(prompt, list) and prompt and all(isinstance(part, str) or _is_ids(part) for part in prompt):
        return cast("list[TextPrompt]", prompt)
    raise PolicyRequestError(
        f"prompt is {show_json(prompt)}; expected a string, a list of token ids, or a list of either", param="prompt"
    )


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(token) is int for token in value)


def write_response(context: ResponseContext, choices: Sequence[Choice]) -> dict[str, Any]:
    """See `Dialect.write_response`."""
    entries: list[dict[str, Any]] = []
    for i, choice in enumerate(choices):
        entry = _entry(context, i, choice.message.get("content") or "", 0, choice.token_ids, choice.logprobs)
        if context.request.body.get("return_token_ids"):
            entry["prompt_token_ids"] = list(context.prompts[i // context.request.n])
        entries.append({**entry, "finish_reason": choice.finish_reason})
    return {**_head(context), "choices": entries, **usage_field(context, choices)}


def _head(context: ResponseContext) -> dict[str, Any]:
    return {
        "id": f"cmpl-{context.call}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": context.model,
    }


def _entry(
    context: ResponseContext, index: int, text: str, offset: int, token_ids: Sequence[int], logprobs: Sequence[float]
) -> dict[str, Any]:
    """A choice or a streamed part of one. ``offset``: where its text begins, in characters."""
    options = context.request.body
    entry: dict[str, Any] = {"index": index, "text": text, "logprobs": None, "finish_reason": None}
    if options.get("logprobs") is not None:
        data = [context.bytes_of(token) for token in token_ids]
        offsets = list(accumulate(map(characters, data), initial=offset))[:-1]
        entry["logprobs"] = {
            "tokens": [token_text(part) for part in data],
            "token_logprobs": list(logprobs),
            "top_logprobs": None,
            "text_offset": offsets,
        }
    if options.get("return_token_ids"):
        entry["token_ids"] = list(token_ids)
    return entry


class _Writer:
    def __init__(self, context: ResponseContext) -> None:
        self._context = context
        self._offsets = [0] * context.request.choices

    def begin(self, index: int) -> bytes:
        return b""

    def think(self, index: int, reasoning: str) -> bytes:
        return b""  # completions do not separate reasoning

    def more(self, index: int, text: str, token_ids: Sequence[int], logprobs: Sequence[float]) -> bytes:
        entry = _entry(self._context, index, text, self._offsets[index], token_ids, logprobs)
        if entry["logprobs"]:
            self._offsets[index] += sum(characters(self._context.bytes_of(token)) for token in token_ids)
        return self._chunk(entry) if text or entry["logprobs"] or "token_ids" in entry else b""

    def finish(self, index: int, choice: Choice, rest: str) -> bytes:
        last = {"index": index, "text": rest, "logprobs": None, "finish_reason": choice.finish_reason}
        return self._chunk(last)

    def end(self, choices: Sequence[Choice]) -> bytes:
        events = b""
        if wants_usage(self._context.request.body) and (counts := usage_field(self._context, choices)):
            events = sse({**_head(self._context), "choices": [], **counts})
        return events + sse("[DONE]")

    def _chunk(self, entry: Mapping[str, Any]) -> bytes:
        usage_comes = {"usage": None} if wants_usage(self._context.request.body) else {}
        return sse({**_head(self._context), "choices": [entry], **usage_comes})


def stream_writer(context: ResponseContext) -> _Writer:
    """See `Dialect.stream_writer`."""
    return _Writer(context)


def read_response(body: Mapping[str, Any]) -> list[UpstreamResponse]:
    """See `Dialect.read_response`."""
    return [
        UpstreamResponse(
            message={"role": "assistant", "content": choice.get("text") or ""},
            finish_reason=choice.get("finish_reason"),
            model=body.get("model"),
            **openai_chat_tokens(body.get("usage"), i),
        )
        for i, choice in enumerate(body.get("choices") or ())
        if choice.get("finish_reason")
    ]


class _Reader:
    """Assembles the chunks into the body of a response without streaming."""

    def __init__(self) -> None:
        self.over = False
        self._body: dict[str, Any] = {}
        self._choices: dict[int, dict[str, Any]] = {}

    def read(self, event: Mapping[str, Any]) -> None:
        for name in ("model", "usage"):
            self._body[name] = event.get(name) or self._body.get(name)
        for part in event.get("choices") or ():
            choice = self._choices.setdefault(part.get("index", 0), {"text": ""})
            choice["text"] += part.get("text") or ""
            choice["finish_reason"] = part.get("finish_reason") or choice.get("finish_reason")

    def responses(self) -> list[UpstreamResponse]:
        return read_response({**self._body, "choices": [choice for _, choice in sorted(self._choices.items())]})


def stream_reader() -> _Reader:
    """See `Dialect.stream_reader`."""
    return _Reader()
