"""Converts contents, parts and tools of Google's Gemini API to a chat and back."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from lightning_core.chat.json_text import show_json
from lightning_core.chat.messages import READS_TEXT, Message
from lightning_core.dialects.fields import (
    FLAG,
    NO_HOSTED_TOOLS,
    NO_SEARCH,
    OBJECT,
    TEXT_ONLY,
    DroppedField,
    Fields,
    UnsupportedField,
    check_function,
    check_left_out,
    objects,
    text,
)
from lightning_core.dialects.gemini_schema import json_schema
from lightning_core.dialects.openai_chat_shape import check_result, check_role
from lightning_core.errors import PolicyRequestError

_ROLES = ("user", "model", "function")
_KINDS = ("text", "functionCall", "functionResponse")
"""Of parts: a part is one of them."""
_RAW = "_arguments"
"""Contains arguments that are not a JSON object, because the API has objects only."""

_ONE_MESSAGE = UnsupportedField("a tool result is one message", unless=(False,))
_HOSTED = UnsupportedField(NO_HOSTED_TOOLS)
_MEDIA = UnsupportedField(TEXT_ONLY)

CONTENT = Fields(supported=frozenset({"role", "parts"}))
PART = Fields(
    supported=frozenset({
        "text", "thought", "functionCall.id", "functionCall.name", "functionCall.args", "functionResponse.id", "functionResponse.name",
        "functionResponse.response",
    }),
    # Reasoning sampled here is known to the endpoint; other models' reasoning is not shown to this model.
    ignored=frozenset({
        "audioMetadata", "documentMetadata", "mediaProcessing", "mediaResolution", "partMetadata", "speechMetadata",
        "spreadsheetMetadata", "thoughtSignature", "videoMetadata", "functionResponse.scheduling",
    }),
    refused={
        "audioTranscription": _MEDIA,
        "codeExecutionResult": _HOSTED,
        "executableCode": _HOSTED,
        "fileData": _MEDIA,
        "functionCall.partialArgs": UnsupportedField("a call has whole arguments", unless=([],)),
        "functionCall.willContinue": UnsupportedField("a call has whole arguments", unless=(False,)),
        "functionResponse.parts": UnsupportedField(TEXT_ONLY, unless=([],)),
        "functionResponse.willContinue": _ONE_MESSAGE,
        "inlineData": _MEDIA,
        "toolCall": _HOSTED,
        "toolResponse": _HOSTED,
    },
)  # fmt: skip
TOOL = Fields(
    supported=frozenset({"functionDeclarations"}),
    dropped={
        name: DroppedField(NO_SEARCH, kind=OBJECT)
        for name in (
            "enterpriseWebSearch", "exaAiSearch", "googleMaps", "googleSearch", "googleSearchRetrieval", "parallelAiSearch", "urlContext",
        )
    },
    refused={
        name: UnsupportedField(NO_HOSTED_TOOLS, unless=([],) if name == "mcpServers" else ())
        for name in ("codeExecution", "computerUse", "fileSearch", "mcpServers", "retrieval")
    },
)  # fmt: skip
DECLARATION = Fields(
    supported=frozenset({"name", "description", "parameters", "parametersJsonSchema"}),
    # A function's result is not constrained, so the model is not shown its schema.
    ignored=frozenset({"response", "responseJsonSchema"}),
    refused={
        "behavior": UnsupportedField("the agent waits for the result of a call", unless=("UNSPECIFIED", "BLOCKING"))
    },
)


def to_chat(contents: Sequence[Mapping[str, Any]], *, check: bool) -> Sequence[Message]:
    """The chat messages of ``contents``. Contents of the model that follow each other are one message.

    A call without an id gets one from its position; a result without an id belongs to the first call of its function that has
    none. Raises `PolicyRequestError` for unsupported content; with ``check`` False it becomes text.
    """
    chat: list[Message] = []
    calls = _Calls()
    said: dict[str, Any] | None = None
    for i, content in enumerate(contents):
        path = f"contents.{i}"
        if check:
            CONTENT.check(content, path)
            check_role(content.get("role") or "user", _ROLES, path)
        parts = _parts(content, f"{path}.parts", check=check)
        if content.get("role") != "model":
            said = None
            chat += _user(parts, calls, f"{path}.parts", check=check)
            continue
        if said is None:
            said = {"role": "assistant", "content": ""}
            chat.append(said)
        _add(said, parts, calls, f"{path}.parts", check=check)
    return chat


class _Calls:
    """The tool calls of a conversation so far."""

    def __init__(self) -> None:
        self._made: dict[str, str] = {}
        self._waiting: dict[str, list[str]] = {}

    def add(self, call: Mapping[str, Any]) -> str:
        """The id of ``call``."""
        # Nine letters and digits: some templates accept no other ids.
        identity = str(call.get("id") or f"call{len(self._made):05d}")
        self._made[identity] = str(call.get("name"))
        self._waiting.setdefault(str(call.get("name")), []).append(identity)
        return identity

    def answer(self, result: Mapping[str, Any], path: str, *, check: bool) -> str:
        """The id of the call that ``result`` is the result of."""
        identity = str(result.get("id") or "")
        waiting = self._waiting.get(str(result.get("name")), [])
        if not identity and waiting:
            return waiting.pop(0)
        if check:
            if not identity:
                raise PolicyRequestError(
                    f"{path}.name is {show_json(result.get('name'))}; expected the name of an earlier functionCall without a result "
                    f"({', '.join(name for name, ids in self._waiting.items() if ids) or 'there is none'})",
                    param=f"{path}.name",
                )
            check_result(identity, self._made, f"{path}.id")
        if identity in waiting:
            waiting.remove(identity)
        return str(identity or result.get("name"))


def _parts(content: Mapping[str, Any], path: str, *, check: bool) -> list[Mapping[str, Any]]:
    parts = content.get("parts")
    if parts is not None and not (isinstance(parts, list) and all(isinstance(part, Mapping) for part in parts)):
        raise PolicyRequestError(f"{path} is {show_json(parts)}; expected a list of objects", param=path)
    if check:
        for i, part in enumerate(parts or ()):
            PART.check(part, f"{path}.{i}")
            if (thought := part.get("thought")) is not None:
                FLAG.check(thought, f"{path}.{i}.thought")
            if len(kinds := [kind for kind in _KINDS if part.get(kind) is not None]) > 1:
                raise PolicyRequestError(
                    f"{path}.{i} has {' and '.join(kinds)}; expected one of them in a part", param=f"{path}.{i}"
                )
            for kind, value in (("functionCall", "args"), ("functionResponse", "response")):
                called: Any = part.get(kind)
                if isinstance(called, Mapping):
                    text(called, "id", f"{path}.{i}.{kind}")
                    if called.get(value) is not None:
                        OBJECT.check(called[value], f"{path}.{i}.{kind}.{value}")
    return parts or []


def _add(message: dict[str, Any], parts: Sequence[Mapping[str, Any]], calls: _Calls, path: str, *, check: bool) -> None:
    """Add a content of the model to ``message``."""
    for i, part in enumerate(parts):
        match part:
            case {"functionCall": {"name": str(name)} as call}:
                arguments = call.get("args") or {}
                raw = arguments.get(_RAW) if isinstance(arguments, Mapping) else None
                function = {
                    "name": name,
                    "arguments": raw if isinstance(raw, str) else json.dumps(arguments, ensure_ascii=False),
                }
                made = {"id": calls.add(call), "type": "function", "function": function}
                message.setdefault("tool_calls", []).append(made)
            case {"thought": True}:
                pass
            case _:
                message["content"] += _text(part, f"{path}.{i}", check=check)


def _user(parts: Sequence[Mapping[str, Any]], calls: _Calls, path: str, *, check: bool) -> list[Message]:
    """One message for each function's result, and one for each run of text between them."""
    chat: list[Message] = []
    for i, part in enumerate(parts):
        match part:
            case {"functionResponse": {"name": str()} as result}:
                identity = calls.answer(result, f"{path}.{i}.functionResponse", check=check)
                written = json.dumps(result.get("response") or {}, ensure_ascii=False)
                chat.append({"role": "tool", "tool_call_id": identity, "content": written})
            case _:
                text = _text(part, f"{path}.{i}", check=check)
                if chat and chat[-1]["role"] == "user":
                    text = chat.pop()["content"] + text
                chat.append({"role": "user", "content": text})
    return chat or [{"role": "user", "content": ""}]


def system_text(content: Any, *, check: bool) -> str:
    """The text of ``systemInstruction``."""
    path = "systemInstruction"
    if content is None:
        return ""
    if not isinstance(content, Mapping):
        raise PolicyRequestError(f"{path} is {show_json(content)}; expected an object with parts", param=path)
    if check:
        CONTENT.check(content, path)
    parts = _parts(content, f"{path}.parts", check=check)
    return "".join(_text(part, f"{path}.parts.{i}", check=check) for i, part in enumerate(parts))


def _text(part: Mapping[str, Any], path: str, *, check: bool) -> str:
    match part:
        case {"text": str(text)}:
            return text
        case _ if not check:
            return json.dumps(part)
        case _:
            raise PolicyRequestError(
                f"{path} is {show_json(part)}; expected text, or a functionCall of the model or functionResponse of the user with a name: "
                f"{READS_TEXT}",
                param=path,
            )


def to_parts(message: Message, *, thoughts: bool) -> list[dict[str, Any]]:
    """The parts of an assistant message, with its reasoning if ``thoughts``."""
    parts: list[dict[str, Any]] = []
    if thoughts and message.get("reasoning_content"):
        parts.append({"text": message["reasoning_content"], "thought": True})
    if message.get("content"):
        parts.append({"text": message["content"]})
    for call in message.get("tool_calls") or ():
        parts.append(call_part(call))
    return parts or [{"text": ""}]


def call_part(call: Mapping[str, Any]) -> dict[str, Any]:
    """The part with a tool call."""
    written = call["function"]["arguments"]
    try:
        arguments = json.loads(written)
    except ValueError:
        arguments = None
    if not isinstance(arguments, dict):
        arguments = {_RAW: written}
    return {"functionCall": {"id": call["id"], "name": call["function"]["name"], "args": arguments}}


def functions(body: Mapping[str, Any], *, check: bool) -> list[Mapping[str, Any]]:
    """The functions in ``tools``, as chat completions define them."""
    tools: list[Mapping[str, Any]] = []
    declarations = objects(body, "tools")
    if check and (searches := [name for tool in declarations for name in tool if name in TOOL.dropped]):
        check_left_out(searches, left=any(tool.get("functionDeclarations") for tool in declarations))
    for i, tool in enumerate(declarations):
        path = f"tools.{i}"
        if check:
            TOOL.check(tool, path)
        declared = tool.get("functionDeclarations")
        if declared is None and not check:
            tools.append(tool)
        if not isinstance(declared, (list, type(None))) or not all(isinstance(f, Mapping) for f in declared or ()):
            where = f"{path}.functionDeclarations"
            raise PolicyRequestError(f"{where} is {show_json(declared)}; expected a list of objects", param=where)
        tools += [_function(f, f"{path}.functionDeclarations.{j}", check=check) for j, f in enumerate(declared or ())]
    return tools


def _function(declared: Mapping[str, Any], path: str, *, check: bool) -> Mapping[str, Any]:
    if check:
        DECLARATION.check(declared, path)
        check_function(declared, path)
        check_function(declared, path, "parametersJsonSchema")
    parameters = declared.get("parametersJsonSchema")
    if parameters is None:
        parameters = json_schema(declared.get("parameters"))
    elif declared.get("parameters") is not None and check:
        raise PolicyRequestError(
            f"{path} has parameters and parametersJsonSchema; expected one of them", param=f"{path}.parameters"
        )
    function = {name: declared[name] for name in ("name", "description") if declared.get(name) is not None}
    return {"type": "function", "function": {**function, "parameters": {} if parameters is None else parameters}}
