"""The wire format of Google's Gemini API: ``generateContent`` and ``streamGenerateContent``, as Vertex AI has them too.

The model and whether to stream are in the URL. `with_url` adds both to the body, as the other formats have them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any
from urllib.parse import quote, urlsplit

from lightning_core.chat.json_text import show_json
from lightning_core.chat.messages import Message
from lightning_core.dialects.dialect import sse
from lightning_core.dialects.exchange import (
    ChatRequest,
    Choice,
    ResponseContext,
    UpstreamResponse,
    model_name,
)
from lightning_core.dialects.fields import (
    FLAG,
    NOT_STORED,
    NUMBER,
    OBJECT,
    OFF_POLICY,
    ONLY_SAMPLED,
    PENALTY,
    TEXT_ONLY,
    DroppedField,
    Fields,
    UnsupportedField,
    check_choice,
    flag,
    integer,
    number,
    objects,
    stops,
    strings,
    text,
)
from lightning_core.dialects.gemini_contents import (
    CONTENT,
    DECLARATION,
    PART,
    TOOL,
    call_part,
    functions,
    system_text,
    to_chat,
    to_parts,
)
from lightning_core.dialects.gemini_schema import camel_case, lower_types, response_schema
from lightning_core.dialects.openai_chat_shape import check_tools
from lightning_core.dialects.requirements import ANY_TOOL, OutputRequirements, check_tool_choice
from lightning_core.dialects.thinking import google_thinking
from lightning_core.dialects.usage import gemini_tokens, gemini_usage
from lightning_core.errors import PolicyRequestError

PATH = "/models/{model}:generateContent"
STREAM = "streamGenerateContent"
METHODS = ("generateContent", STREAM)
KEY_HEADER = "x-goog-api-key"
FORWARDED_HEADERS = ("x-goog-user-project",)

_CONFIG = "generationConfig"
_USE_SCHEMA = UnsupportedField("use responseMimeType with responseJsonSchema")
FIELDS = Fields(
    supported=frozenset({
        "contents", "systemInstruction", "tools", "toolConfig.functionCallingConfig",
        *(f"{_CONFIG}.{name}" for name in (
            "temperature", "topP", "maxOutputTokens", "stopSequences", "candidateCount", "seed", "responseMimeType", "responseSchema",
            "responseJsonSchema", "thinkingConfig",
        )),
    }),
    ignored=frozenset({
        "labels", "safetySettings", "serviceTier", "store", "toolConfig.retrievalConfig",
        *(f"{_CONFIG}.{name}" for name in (
            "audioTimestamp", "enableEnhancedCivicAnswers", "mediaResolution", "modelSelectionConfig", "routingConfig",
        )),
    }),
    dropped={
        **dict.fromkeys((f"{_CONFIG}.presencePenalty", f"{_CONFIG}.frequencyPenalty"), PENALTY),
        "modelArmorConfig": DroppedField("the endpoint does not moderate", kind=OBJECT),
        "toolConfig.includeServerSideToolInvocations": DroppedField("there are no hosted tools", unless=(False,), kind=FLAG),
        f"{_CONFIG}.topK": DroppedField(OFF_POLICY, kind=NUMBER),
    },
    refused={
        **dict.fromkeys(("cachedContent", "continuationToken", "outputConfig"), UnsupportedField(NOT_STORED)),
        f"{_CONFIG}.logprobs": UnsupportedField(ONLY_SAMPLED, unless=(0,)),
        f"{_CONFIG}.responseLogprobs": UnsupportedField("use another wire format for logprobs", unless=(False,)),
        f"{_CONFIG}.responseFormat": UnsupportedField(_USE_SCHEMA.reason, unless=([],)),
        f"{_CONFIG}.responseModalities": UnsupportedField(TEXT_ONLY, unless=(["TEXT"], [])),
        f"{_CONFIG}.enableAffectiveDialog": UnsupportedField(TEXT_ONLY, unless=(False,)),
        **{
            f"{_CONFIG}.{name}": UnsupportedField(TEXT_ONLY)
            for name in ("audioTranscriptionConfig", "imageConfig", "speechConfig", "translationConfig")
        },
    },
)  # fmt: skip
CALLING = Fields(
    supported=frozenset({"mode", "allowedFunctionNames"}),
    refused={"streamFunctionCallArguments": UnsupportedField("arguments are sent whole", unless=(False,))},
)
THINKING = Fields(supported=frozenset({"includeThoughts", "thinkingBudget", "thinkingLevel"}))

NESTED = {
    "contents.N": CONTENT,
    "contents.N.parts.N": PART,
    "tools.N": TOOL,
    "tools.N.functionDeclarations.N": DECLARATION,
    "toolConfig.functionCallingConfig": CALLING,
    "generationConfig.thinkingConfig": THINKING,
}

_ENTERED = frozenset({
    "contents", "systemInstruction", "parts", "functionCall", "functionResponse", "tools", "functionDeclarations", "toolConfig",
    "functionCallingConfig", "generationConfig", "thinkingConfig",
})  # fmt: skip
FROM_URL = ("model", "stream")
_MODES = ("MODE_UNSPECIFIED", "AUTO", "ANY", "NONE", "VALIDATED")
_FINISH_REASONS = {"STOP": "stop", "MAX_TOKENS": "length"}
_WRITTEN_REASONS = {"stop": "STOP", "length": "MAX_TOKENS", "tool_calls": "STOP"}
_STATUSES = {
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    408: "DEADLINE_EXCEEDED",
    429: "RESOURCE_EXHAUSTED",
    502: "UNAVAILABLE",
}
_NAME = re.compile(r"(?:^|.*?/)models/(?P<model>.+)|(?:.*/)?(?P<last>[^/]+)")


def model_of(name: str) -> str:
    """The model in a resource name, such as ``models/M`` and ``projects/P/locations/L/publishers/google/models/M``."""
    match = _NAME.fullmatch(name)
    return "" if match is None else match["model"] or match["last"]


def with_url(body: Any, path: str, *, stream: bool) -> Any:
    """``body`` with the model in ``path``, which ends with ``:METHOD``, and with ``stream``."""
    if not isinstance(body, Mapping):
        return body
    return {**body, "model": model_of(path.rpartition(":")[0]), "stream": stream}


def url_for_model(url: str, *, model: str, method: str) -> str:
    """``url`` of an upstream server with another model and method, and without its query."""
    split = urlsplit(url)
    name = split.path.rpartition(":")[0]
    head = name.removesuffix(model_of(name))
    return f"{split._replace(path=head, query='').geturl()}{quote(model)}:{method}"


def parse_request(body: Mapping[str, Any], *, conversations: Mapping[str, Sequence[Message]]) -> ChatRequest:
    """See `Dialect.parse_request`."""
    del conversations
    present = _given(body)
    FIELDS.check(present)
    contents = objects(present, "contents")
    if not contents:
        raise PolicyRequestError("contents is empty; expected at least one content", param="contents")
    if contents[-1].get("role") == "model":
        raise PolicyRequestError(
            "contents ends with a content of the model, which cannot be continued; end with one of the user",
            param="contents",
        )
    config = {f"{_CONFIG}.{name}": value for name, value in (present.get(_CONFIG) or {}).items()}
    tools = functions(present, check=True)
    check_tools(tools, unique=True)
    tool, shown = _tool_choice(present, tools)
    schema, schema_field = _schema(config)
    messages, system = to_chat(contents, check=True), system_text(present.get("systemInstruction"), check=True)
    _thoughts(present)  # checks the configuration
    return ChatRequest(
        model=model_name(body),
        messages=[{"role": "system", "content": system}, *messages] if system else messages,
        input_field="contents",
        tools=shown or None,
        temperature=number(config, f"{_CONFIG}.temperature", 1e-6, 100.0, zero=True),
        top_p=number(config, f"{_CONFIG}.topP", 1e-6, 1.0),
        max_tokens=integer(config, f"{_CONFIG}.maxOutputTokens", 1),
        n=integer(config, f"{_CONFIG}.candidateCount", 1) or 1,
        stop=stops(config, f"{_CONFIG}.stopSequences"),
        stop_field=f"{_CONFIG}.stopSequences",
        seed=integer(config, f"{_CONFIG}.seed", -(1 << 63), (1 << 63) - 1),
        template_settings=google_thinking(
            (present.get(_CONFIG) or {}).get("thinkingConfig") or {}, f"{_CONFIG}.thinkingConfig"
        ),
        stream=flag(body, "stream") or False,
        requirements=OutputRequirements(schema=schema, schema_field=schema_field, tool=tool),
        body=body,
    )


def read_request(body: Mapping[str, Any], *, conversations: Mapping[str, Sequence[Message]]) -> ChatRequest:
    """See `Dialect.read_request`."""
    del conversations
    present = _given(body)
    messages = to_chat(objects(present, "contents"), check=False)
    system = system_text(present.get("systemInstruction"), check=False)
    config = present.get(_CONFIG)
    count = config.get("candidateCount") if isinstance(config, Mapping) else None
    stream = flag(body, "stream") or False
    method = f"{STREAM}?alt=sse" if stream else METHODS[0]
    return ChatRequest(
        model=model_name(body),
        messages=[{"role": "system", "content": system}, *messages] if system else messages,
        tools=functions(present, check=False) or None,
        n=count if isinstance(count, int) and count > 0 else 1,
        stream=stream,
        upstream_url=partial(url_for_model, model=model_name(body), method=method),
        body={name: value for name, value in body.items() if name not in FROM_URL},
    )


def _given(body: Mapping[str, Any]) -> Mapping[str, Any]:
    """The request of the client, in camel case."""
    return camel_case({name: value for name, value in body.items() if name not in FROM_URL}, _ENTERED)


def _tool_choice(
    present: Mapping[str, Any], tools: Sequence[Mapping[str, Any]]
) -> tuple[str | None, Sequence[Mapping[str, Any]]]:
    """The required tool, and the tools that the model is shown."""
    path = "toolConfig.functionCallingConfig"
    config = (present.get("toolConfig") or {}).get("functionCallingConfig") or {}
    OBJECT.check(config, path)
    CALLING.check(config, path)
    mode = config.get("mode") or "AUTO"
    check_choice(mode, _MODES, f"{path}.mode")
    allowed = strings({path: config.get("allowedFunctionNames")}, path)
    names = [tool["function"]["name"] for tool in tools]
    if unknown := [name for name in allowed if name not in names]:
        where = f"{path}.allowedFunctionNames"
        raise PolicyRequestError(
            f"{where} has {show_json(unknown)}; expected only names in {show_json(names)}", param=where
        )
    if mode == "NONE":
        return None, ()
    if mode == "ANY" and len(allowed) == 1:
        return allowed[0], tools
    shown = [tool for tool in tools if tool["function"]["name"] in allowed] if allowed else tools
    return check_tool_choice(ANY_TOOL if mode == "ANY" else None, shown), shown


def _schema(config: Mapping[str, Any]) -> tuple[Mapping[str, Any] | None, str]:
    """The JSON schema of the response (empty for any JSON object, None for text), and its field."""
    mime, names = f"{_CONFIG}.responseMimeType", [f"{_CONFIG}.responseSchema", f"{_CONFIG}.responseJsonSchema"]
    kind = text(config, mime) or "text/plain"
    settings = [(name, config[name]) for name in names if config.get(name) is not None]
    check_choice(kind, ("text/plain", "application/json"), mime)
    if not settings:
        return (None if kind == "text/plain" else {}), mime
    (name, schema), *more = settings
    if more or not isinstance(schema, Mapping) or kind == "text/plain":
        raise PolicyRequestError(
            f"{' and '.join(n for n, _ in settings)} with {mime} {show_json(kind)}: found {show_json(schema)}; expected one schema, "
            f"an object, with {mime} 'application/json'",
            param=name,
        )
    return (response_schema(schema) if name == names[0] else lower_types(schema)), name


def _thoughts(present: Mapping[str, Any]) -> bool:
    """Whether the response contains reasoning."""
    path = f"{_CONFIG}.thinkingConfig"
    config = (present.get(_CONFIG) or {}).get("thinkingConfig") or {}
    OBJECT.check(config, path)
    THINKING.check(config, path)
    return flag({f"{path}.includeThoughts": config.get("includeThoughts")}, f"{path}.includeThoughts") or False


def write_response(context: ResponseContext, choices: Sequence[Choice]) -> dict[str, Any]:
    """See `Dialect.write_response`."""
    thoughts = _thoughts(_given(context.request.body))
    candidates = [
        _candidate(i, to_parts(choice.message, thoughts=thoughts), choice) for i, choice in enumerate(choices)
    ]
    return _response(context, candidates, sum(len(choice.token_ids) for choice in choices))


def _candidate(index: int, parts: Sequence[Mapping[str, Any]], choice: Choice | None) -> dict[str, Any]:
    """A candidate, partial if there is no ``choice`` yet."""
    candidate = {"content": {"role": "model", "parts": parts}, "index": index}
    return (
        candidate
        if choice is None
        else {**candidate, "finishReason": _WRITTEN_REASONS.get(choice.reason, choice.reason.upper())}
    )


def _response(context: ResponseContext, candidates: Sequence[Mapping[str, Any]], sampled: int) -> dict[str, Any]:
    return {
        "candidates": candidates,
        **gemini_usage(context, sampled),
        "modelVersion": context.model,
        "responseId": context.call,
    }


class _Writer:
    def __init__(self, context: ResponseContext) -> None:
        self._context = context
        self._thoughts = _thoughts(_given(context.request.body))
        self._sampled = 0

    def _send(self, index: int, parts: Sequence[Mapping[str, Any]], choice: Choice | None = None) -> bytes:
        return sse(_response(self._context, [_candidate(index, parts, choice)], self._sampled))

    def begin(self, index: int) -> bytes:
        return b""

    def think(self, index: int, reasoning: str) -> bytes:
        return self._send(index, [{"text": reasoning, "thought": True}]) if self._thoughts else b""

    def more(self, index: int, text: str, token_ids: Sequence[int], logprobs: Sequence[float]) -> bytes:
        self._sampled += len(token_ids)
        return self._send(index, [{"text": text}]) if text else b""

    def finish(self, index: int, choice: Choice, rest: str) -> bytes:
        parts = [{"text": rest}] if rest else []
        parts += [call_part(call) for call in choice.message.get("tool_calls") or ()]
        # Chats of the client leave out turns with a content without parts.
        return self._send(index, parts or [{"text": ""}], choice)

    def end(self, choices: Sequence[Choice]) -> bytes:
        return b""


def stream_writer(context: ResponseContext) -> _Writer:
    """See `Dialect.stream_writer`."""
    return _Writer(context)


def read_response(body: Mapping[str, Any]) -> list[UpstreamResponse]:
    """See `Dialect.read_response`. The response to a prompt that the server blocked is empty."""
    if (body.get("promptFeedback") or {}).get("blockReason"):
        return [UpstreamResponse(message={"role": "assistant", "content": ""}, finish_reason="content_filter")]
    responses: list[UpstreamResponse] = []
    for candidate in body.get("candidates") or ():
        reason = candidate.get("finishReason")
        if not reason:
            return []
        content = {**(candidate.get("content") or {}), "role": "model"}
        (message,) = to_chat([content], check=False)
        finish = _FINISH_REASONS.get(reason, str(reason).lower())
        responses.append(
            UpstreamResponse(
                message=message,
                finish_reason="tool_calls" if finish == "stop" and message.get("tool_calls") else finish,
                model=body.get("modelVersion"),
                **gemini_tokens(body.get("usageMetadata"), len(responses)),
            )
        )
    return responses


class _Reader:
    """Assembles the events into the body of a response without streaming."""

    over = False
    """Google's streams end without a last event."""

    def __init__(self) -> None:
        self._body: dict[str, Any] = {}
        self._candidates: dict[int, dict[str, Any]] = {}

    def read(self, event: Mapping[str, Any]) -> None:
        self._body |= event
        for candidate in event.get("candidates") or ():
            known = self._candidates.setdefault(candidate.get("index", 0), {"content": {"parts": []}})
            known["content"]["parts"] += (candidate.get("content") or {}).get("parts") or ()
            known["finishReason"] = candidate.get("finishReason") or known.get("finishReason")

    def responses(self) -> list[UpstreamResponse]:
        return read_response({**self._body, "candidates": [self._candidates[i] for i in sorted(self._candidates)]})


def stream_reader() -> _Reader:
    """See `Dialect.stream_reader`."""
    return _Reader()


def error_body(message: str, *, status: int, param: str | None = None) -> dict[str, Any]:
    """See `Dialect.error_body`.

    Google's errors have no ``param``; the message names the field.
    """
    kind = _STATUSES.get(status, "INVALID_ARGUMENT" if status < 500 else "INTERNAL")
    return {"error": {"code": status, "message": message, "status": kind}}


def error_event(message: str) -> bytes:
    """See `Dialect.error_event`."""
    return sse(error_body(message, status=500))
