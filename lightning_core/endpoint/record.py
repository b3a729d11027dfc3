"""The spans of model calls, from the request to the response."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from lightning_core import trace as tr
from lightning_core.backends.backend import SamplingParams
from lightning_core.capture import next_sequence
from lightning_core.capture.address import Address
from lightning_core.capture.call_spans import OpenCallSpan
from lightning_core.chat.chat import RenderedPrompt
from lightning_core.dialects.exchange import ChatRequest, Choice, UpstreamResponse
from lightning_core.endpoint.forwarding.upstream import Remote
from lightning_core.endpoint.request_body import refused_call
from lightning_core.errors import OverloadError, PolicyRequestError, describe
from lightning_core.propagation.providers import host_of
from lightning_core.trace import pack

_PATH = "url.path"


class ModelSpan(OpenCallSpan):
    """The span of a request to one model."""

    def counted(self, model: Any, input_tokens: Any, output_tokens: Any = None, cached_tokens: Any = None) -> None:
        """Record the model and the token counts that an upstream server reports."""
        for name, value, kind in (
            (tr.RESPONSE_MODEL, model, str),
            (tr.INPUT_TOKENS, input_tokens, int),
            (tr.OUTPUT_TOKENS, output_tokens, int),
            (tr.CACHED_TOKENS, cached_tokens, int),
        ):
            if isinstance(value, kind):
                self.set({name: value})

    def abandon(self, error: BaseException) -> None:
        """End the span as failed, or as refused if the request is at fault, unless it has ended."""
        if isinstance(error, (PolicyRequestError, OverloadError)):
            self.set({tr.REFUSED: " ".join(str(error).split())[:500]})
        self.fail(describe(error))
        self.end()


class RefusedSpan(ModelSpan):
    """The span of a request that is refused before it opens another span. It has ended."""

    def __init__(self, address: Address, operation: str, path: str, body: Any, error: BaseException) -> None:
        named = body.get("model") if isinstance(body, Mapping) else None
        model = _clip(named) if isinstance(named, str) else ""
        attributes: dict[str, Any] = {tr.PROVIDER: "lightning", tr.REQUEST_MODEL: model, _PATH: _clip(path)}
        if operation == "chat":
            attributes[tr.SEQUENCE] = next_sequence()
        if isinstance(error, PolicyRequestError) and (turn := refused_call(body, error.param)) is not None:
            attributes[tr.INPUT_MESSAGES] = json.dumps([turn])
        super().__init__(address, operation, model, attributes)
        self.abandon(error)


class AuxiliarySpan(ModelSpan):
    """The span of a request that samples nothing, such as one that counts the tokens of a prompt."""

    def __init__(self, address: Address, operation: str, requested: str, model: str) -> None:
        attributes = {tr.PROVIDER: "lightning", tr.REQUEST_MODEL: requested, tr.RESPONSE_MODEL: model}
        super().__init__(address, operation, model, attributes)


def _clip(text: str) -> str:
    """The start of what a client sent, up to 200 characters."""
    return text[:200]


class EmbeddingsSpan(ModelSpan):
    """The span of a request for embeddings.

    Its input is not recorded: it is not trained on, and can be large.
    """

    def __init__(self, address: Address, body: Mapping[str, Any], model: str) -> None:
        attributes: dict[str, Any] = {tr.PROVIDER: "lightning", tr.REQUEST_MODEL: model}
        if isinstance(size := body.get("dimensions"), int) and size < 1 << 63:
            attributes[tr.EMBEDDING_DIMENSIONS] = size
        if isinstance(form := body.get("encoding_format"), str):
            attributes[tr.EMBEDDING_FORMATS] = [form]
        super().__init__(address, "embeddings", model, attributes)


class CallSpan(ModelSpan):
    """The span of one response. Its id is the id of the call."""

    def __init__(
        self,
        address: Address,
        request: ChatRequest,
        model: str,
        choice: int = 0,
        *,
        trained: bool = False,
        remote: Remote | None = None,
    ) -> None:
        """``trained``: the agent is trained. ``remote``: the server that the call is forwarded to."""
        attributes: dict[str, Any] = {
            tr.SEQUENCE: next_sequence(),
            tr.PROVIDER: "lightning",
            tr.REQUEST_MODEL: request.model,
            tr.RESPONSE_MODEL: model,
        }
        if trained:
            attributes[tr.TRAINED] = True
        if request.prompt is not None:
            attributes[tr.PROMPT] = request.prompt
        if request.notes:
            attributes[tr.DROPPED] = [f"{path}: {reason}" for path, reason in request.notes.items()]
        if remote is not None:
            attributes |= {tr.HOST: host_of(urlsplit(remote.url)), tr.CREDENTIALS: remote.credentials}
        self._request = request
        super().__init__(address, "chat", model, attributes)
        self.references = self.content.add_messages(request.input_messages(choice))
        if request.tools:
            self._share(tools=json.dumps(list(request.tools), ensure_ascii=False))

    def _share(self, **parts: Any) -> None:
        self.references = self.content.add_call(self.references, **parts)

    def sampled(self, prompt: RenderedPrompt, choice: Choice, params: SamplingParams) -> None:
        """Record the prompt, the sampled tokens and the settings they were sampled with."""
        self.set({
            tr.LOGPROBS: pack(choice.logprobs, "<f4"),
            tr.TEMPERATURE: params.temperature,
            tr.TOP_P: params.top_p,
            tr.MAX_TOKENS: params.max_tokens,
            tr.INPUT_TOKENS: len(prompt.ids),
            tr.OUTPUT_TOKENS: len(choice.token_ids),
            tr.CONTEXT: prompt.context,
        })  # fmt: skip
        for name in ("temperature", "top_p"):
            requested, used = getattr(self._request, name), getattr(params, name)
            if requested is not None and requested != used:
                self.set({f"lightning.replaced.{name}": requested})
        if params.constraint is not None:
            self.set({tr.CONSTRAINT: params.constraint})
        if prompt.reason is not None:
            self.set({tr.CONTEXT_REASON: prompt.reason})
        ids = pack(prompt.ids, "<u4"), pack(choice.token_ids, "<u4")
        self.answered(choice.message, choice.finish_reason, ids=ids)

    def trainable(self, *, version: int, first_version: int | None, digest: str) -> None:
        """Record the version of the policy that sampled the response, and the digest of both."""
        self.set({tr.VERSION: version, tr.DIGEST: digest})
        if first_version is not None and first_version != version:
            self.set({tr.FIRST_VERSION: first_version})

    def replays(self, call: str) -> None:
        """Record that the response was taken from ``call`` of another rollout."""
        self.set({tr.REPLAYS: call})

    def forks(self, call: str) -> None:
        """Record that the response replaces the response of ``call``, which is in another rollout."""
        self.set({tr.FORKS: call})

    def answered(
        self, message: Mapping[str, Any], finish_reason: str | None, *, ids: tuple[bytes, bytes] | None = None
    ) -> None:
        """Record the response as the agent receives it; ``ids``: of its prompt and of the response."""
        self._share(response=json.dumps(message, ensure_ascii=False), ids=ids)
        if finish_reason:
            self.set({tr.FINISH_REASONS: [finish_reason]})

    def forwarded(self, response: UpstreamResponse) -> None:
        """Record the response of an upstream server."""
        self.counted(response.model, response.input_tokens, response.output_tokens, response.cached_tokens)
        self.answered(response.message, response.finish_reason)
