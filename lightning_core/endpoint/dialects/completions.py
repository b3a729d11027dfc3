"""OpenAI's older completions on the wire: prompts without a chat, as text or as token ids.

The tokens of a prompt are those of its text; no chat template is applied, and no tools are called. Choices are numbered prompt by prompt.
``return_token_ids`` is vLLM's extension.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from lightning_core.endpoint.dialects.chat_completions import KEY_HEADER as KEY_HEADER
from lightning_core.endpoint.dialects.chat_completions import PASSED_HEADERS as PASSED_HEADERS
from lightning_core.endpoint.dialects.chat_completions import error_body as error_body
from lightning_core.endpoint.dialects.chat_completions import error_event as error_event
from lightning_core.endpoint.dialects.chat_completions import usage, wants_usage
from lightning_core.endpoint.dialects.dialect import sse
from lightning_core.endpoint.dialects.exchange import (
    Answer,
    ChatRequest,
    Choice,
    Message,
    PlainPrompt,
    Reply,
    model_name,
)
from lightning_core.endpoint.dialects.fields import (
    OFF_POLICY,
    Fields,
    Refusal,
    flag,
    integer,
    seed,
    stops,
    temperature,
    top_p,
)
from lightning_core.errors import PolicyRequestError

PATH = "/completions"

FIELDS = Fields(
    honoured=frozenset({
        "model", "prompt", "temperature", "top_p", "max_tokens", "n", "stop", "stream", "stream_options.include_usage", "seed",
        "logprobs", "return_token_ids",
    }),
    inert=frozenset({"stream_options.include_obfuscation", "user"}),
    refused={
        "best_of": Refusal("every answer is handed out", unless=(1,)),
        "echo": Refusal("an answer is what was sampled, without its prompt", unless=(False,)),
        "suffix": Refusal("a model here writes what comes after a prompt, not what comes between"),
        "frequency_penalty": Refusal(OFF_POLICY, unless=(0,)),
        "presence_penalty": Refusal(OFF_POLICY, unless=(0,)),
        "logit_bias": Refusal(OFF_POLICY, unless=({},)),
    },
)  # fmt: skip


def parse_request(body: Mapping[str, Any], *, said: Mapping[str, Sequence[Message]]) -> ChatRequest:
    """See `Dialect.parse_request`."""
    FIELDS.check(body)
    request = read_request(body, said=said)
    if integer(body, "logprobs", 0):
        raise PolicyRequestError(
            f"logprobs is {body['logprobs']!r}; only 0 can be honoured: the sampled token's, and no others",
            param="logprobs",
        )
    flag(body, "return_token_ids")
    wants_usage(body)
    return replace(
        request,
        temperature=temperature(body),
        top_p=top_p(body),
        max_tokens=integer(body, "max_tokens", 1),
        stop=stops(body, "stop"),
        seed=seed(body),
    )


def read_request(body: Mapping[str, Any], *, said: Mapping[str, Sequence[Message]]) -> ChatRequest:
    """See `Dialect.read_request`."""
    del said
    return ChatRequest(
        model=model_name(body),
        messages=(),
        prompts=_prompts(body.get("prompt")),
        prompt_field="prompt",
        n=integer(body, "n", 1) or 1,
        stream=flag(body, "stream") or False,
        body=body,
    )


def _prompts(prompt: Any) -> Sequence[PlainPrompt]:
    """A string, its token ids, or a list of either."""
    if isinstance(prompt, str) or _is_ids(prompt):
        return [prompt]
    if isinstance(prompt, list) and prompt and all(isinstance(one, str) or _is_ids(one) for one in prompt):
        return cast("list[PlainPrompt]", prompt)
    raise PolicyRequestError(
        f"prompt is {prompt!r}; expected a string, a list of token ids, or a list of either", param="prompt"
    )


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(token) is int for token in value)


def write_answer(reply: Reply, choices: Sequence[Choice]) -> dict[str, Any]:
    """See `Dialect.write_answer`."""
    entries: list[dict[str, Any]] = []
    for i, choice in enumerate(choices):
        entry = _entry(reply, i, choice.message.get("content") or "", 0, choice.token_ids, choice.logprobs)
        if reply.request.body.get("return_token_ids"):
            entry["prompt_token_ids"] = list(reply.prompts[i // reply.request.n])
        entries.append({**entry, "finish_reason": choice.finish_reason})
    return {**_head(reply), "choices": entries, "usage": usage(reply, choices)}


def _head(reply: Reply) -> dict[str, Any]:
    return {"id": f"cmpl-{reply.call}", "object": "text_completion", "created": int(time.time()), "model": reply.model}


def _entry(
    reply: Reply, index: int, text: str, offset: int, token_ids: Sequence[int], logprobs: Sequence[float]
) -> dict[str, Any]:
    """A choice or a part of one. ``offset`` is where its tokens' text begins, in characters."""
    asked = reply.request.body
    entry: dict[str, Any] = {"index": index, "text": text, "logprobs": None, "finish_reason": None}
    if asked.get("logprobs") is not None:
        tokens = [reply.decode([token]) for token in token_ids]
        offsets: list[int] = []
        for token in tokens:
            offsets.append(offset)
            offset += len(token)
        entry["logprobs"] = {
            "tokens": tokens,
            "token_logprobs": list(logprobs),
            "top_logprobs": None,
            "text_offset": offsets,
        }
    if asked.get("return_token_ids"):
        entry["token_ids"] = list(token_ids)
    return entry


class _Writer:
    def __init__(self, reply: Reply) -> None:
        self._reply = reply
        self._offsets = [0] * reply.request.choices

    def begin(self, index: int) -> bytes:
        return b""

    def think(self, index: int, reasoning: str) -> bytes:
        return b""  # a completion has no reasoning apart

    def more(self, index: int, text: str, token_ids: Sequence[int], logprobs: Sequence[float]) -> bytes:
        entry = _entry(self._reply, index, text, self._offsets[index], token_ids, logprobs)
        if entry["logprobs"]:
            self._offsets[index] += sum(len(token) for token in entry["logprobs"]["tokens"])
        return self._chunk(entry) if text or entry["logprobs"] or "token_ids" in entry else b""

    def finish(self, index: int, choice: Choice, rest: str) -> bytes:
        last = {"index": index, "text": rest, "logprobs": None, "finish_reason": choice.finish_reason}
        return self._chunk(last)

    def end(self, choices: Sequence[Choice]) -> bytes:
        events = b""
        if wants_usage(self._reply.request.body):
            events = sse({**_head(self._reply), "choices": [], "usage": usage(self._reply, choices)})
        return events + sse("[DONE]")

    def _chunk(self, entry: Mapping[str, Any]) -> bytes:
        usage_comes = {"usage": None} if wants_usage(self._reply.request.body) else {}
        return sse({**_head(self._reply), "choices": [entry], **usage_comes})


def stream_writer(reply: Reply) -> _Writer:
    """See `Dialect.stream_writer`."""
    return _Writer(reply)


def read_answer(body: Mapping[str, Any]) -> list[Answer]:
    """See `Dialect.read_answer`."""
    counts = body.get("usage") or {}
    return [
        Answer(
            message={"role": "assistant", "content": choice.get("text") or ""},
            finish_reason=choice.get("finish_reason"),
            model=body.get("model"),
            # One count for all choices: it is told once.
            input_tokens=counts.get("prompt_tokens") if i == 0 else None,
            output_tokens=counts.get("completion_tokens") if i == 0 else None,
        )
        for i, choice in enumerate(body.get("choices") or ())
        if choice.get("finish_reason")
    ]


class _Reader:
    """Puts the chunks together to the body that would have come without streaming."""

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

    def answers(self) -> list[Answer]:
        return read_answer({**self._body, "choices": [choice for _, choice in sorted(self._choices.items())]})


def stream_reader() -> _Reader:
    """See `Dialect.stream_reader`."""
    return _Reader()
