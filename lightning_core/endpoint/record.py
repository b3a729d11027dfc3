"""How a model call becomes a span: opened when the request arrives, filled with what was sampled, closed with the answer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from opentelemetry.trace import Span, Status, StatusCode

from lightning_core import trace as tr
from lightning_core.backends.backend import SamplingParams
from lightning_core.capture import next_sequence
from lightning_core.capture.spans import start_span
from lightning_core.chat.chat import Prompt
from lightning_core.endpoint.dialects.exchange import Answer, ChatRequest, Choice
from lightning_core.trace import Address, describe, pack


class ModelSpan:
    """The span of what one model was asked for."""

    def __init__(self, address: Address, operation: str, model: str, attributes: Mapping[str, Any]) -> None:
        self._span: Span = start_span(address, model, operation, agent=address.agent, attributes=attributes)
        self.id = f"{self._span.get_span_context().span_id:016x}"

    def counted(self, model: Any, input_tokens: Any, output_tokens: Any = None) -> None:
        """Note the model and the token counts that somebody else's server tells of."""
        for name, value, kind in (
            (tr.RESPONSE_MODEL, model, str),
            (tr.INPUT_TOKENS, input_tokens, int),
            (tr.OUTPUT_TOKENS, output_tokens, int),
        ):
            if isinstance(value, kind):
                self._span.set_attribute(name, value)

    def abandon(self, error: BaseException) -> None:
        """Close the span as failed, unless it is closed already."""
        if self._span.is_recording():
            self._span.set_status(Status(StatusCode.ERROR, describe(error)))
            self._span.end()

    def end(self) -> None:
        """Close the span. Safe to call twice."""
        if self._span.is_recording():
            self._span.end()


class EmbeddingsSpan(ModelSpan):
    """The span of a request for embeddings. What was embedded is not kept: it is no part of what is trained, and can be large."""

    def __init__(self, address: Address, body: Mapping[str, Any], model: str) -> None:
        attributes: dict[str, Any] = {tr.PROVIDER: "lightning", tr.REQUEST_MODEL: model}
        if isinstance(size := body.get("dimensions"), int) and size < 1 << 63:
            attributes[tr.EMBEDDING_DIMENSIONS] = size
        if isinstance(form := body.get("encoding_format"), str):
            attributes[tr.EMBEDDING_FORMATS] = [form]
        super().__init__(address, "embeddings", model, attributes)


class CallSpan(ModelSpan):
    """The span of one response; its id is the call's id."""

    def __init__(self, address: Address, request: ChatRequest, model: str, choice: int = 0) -> None:
        attributes: dict[str, Any] = {
            tr.SEQUENCE: next_sequence(),
            tr.PROVIDER: "lightning",
            tr.REQUEST_MODEL: request.model,
            tr.RESPONSE_MODEL: model,
            tr.INPUT_MESSAGES: json.dumps(list(request.asked(choice)), ensure_ascii=False),
        }
        if request.tools:
            attributes[tr.TOOL_DEFINITIONS] = json.dumps(list(request.tools), ensure_ascii=False)
        self._request = request
        super().__init__(address, "chat", model, attributes)

    def sampled(self, prompt: Prompt, choice: Choice, params: SamplingParams) -> None:
        """Note what was sampled, and from what."""
        self._span.set_attributes({
            tr.PROMPT_IDS: pack(prompt.ids, "<u4"),
            tr.OUTPUT_IDS: pack(choice.token_ids, "<u4"),
            tr.LOGPROBS: pack(choice.logprobs, "<f4"),
            tr.TEMPERATURE: params.temperature,
            tr.TOP_P: params.top_p,
            tr.INPUT_TOKENS: len(prompt.ids),
            tr.OUTPUT_TOKENS: len(choice.token_ids),
            tr.CONTEXT: prompt.context,
        })  # fmt: skip
        for name in ("temperature", "top_p"):
            asked, used = getattr(self._request, name), getattr(params, name)
            if asked is not None and asked != used:
                self._span.set_attribute(f"lightning.replaced.{name}", asked)
        if params.constraint is not None:
            self._span.set_attribute(tr.CONSTRAINT, params.constraint)
        if prompt.reason is not None:
            self._span.set_attribute(tr.CONTEXT_REASON, prompt.reason)
        self.answered(choice.message, choice.finish_reason)

    def trainable(self, *, version: int, first_version: int | None, digest: str) -> None:
        """Note that the policy sampled it: with which version of its weights, and the digest of all of it."""
        self._span.set_attributes({tr.VERSION: version, tr.DIGEST: digest})
        if first_version is not None and first_version != version:
            self._span.set_attribute(tr.FIRST_VERSION, first_version)

    def answered(self, message: Mapping[str, Any], finish_reason: str | None) -> None:
        """Note the answer as the agent gets it."""
        self._span.set_attribute(tr.OUTPUT_MESSAGES, json.dumps([message], ensure_ascii=False))
        if finish_reason:
            self._span.set_attribute(tr.FINISH_REASONS, [finish_reason])

    def forwarded(self, answer: Answer) -> None:
        """Note what somebody else's server answered."""
        self.counted(answer.model, answer.input_tokens, answer.output_tokens)
        self.answered(answer.message, answer.finish_reason)
