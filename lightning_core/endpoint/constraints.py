"""What a request requires of the form of its response, as a constraint on sampling."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from lightning_core.backends.backend import Backend, SamplingParams
from lightning_core.chat.chat import Chat, RenderedPrompt
from lightning_core.chat.json_text import show_json
from lightning_core.chat.output_grammar import AllowedCalls, ToolSchemaError
from lightning_core.dialects.exchange import ChatRequest
from lightning_core.dialects.requirements import ANY_TOOL
from lightning_core.endpoint.sessions import Session
from lightning_core.errors import COUNTED, ConstraintError, PolicyRequestError

logger = logging.getLogger(__name__)

_ANY_OBJECT = {"type": "object"}


def constrain(
    params: SamplingParams,
    backend: Backend,
    session: Session,
    request: ChatRequest,
    chat: Chat,
    prompt: RenderedPrompt,
) -> SamplingParams:
    """``params`` with the constraint of ``request``: a JSON schema, a required tool, or at most one call.

    Calls that cannot be constrained are an instruction only, which is logged. Raises `PolicyRequestError` if a schema cannot be a
    constraint, or if ``backend`` does not support the parameters.
    """
    required = request.requirements
    tools = [tool for tool in request.functions if required.tool in (None, ANY_TOOL, tool["function"]["name"])]
    restricts_calls = bool(tools) and (required.tool is not None or required.one_call)
    if required.schema is not None or restricts_calls:
        calls = AllowedCalls(tools=tools, required=required.tool is not None, one=required.one_call) if tools else None
        try:
            constrained = _with_grammar(params, request, chat, prompt, calls)
            backend.check(constrained)
        except ConstraintError as error:
            if required.schema is not None:
                raise explain(error, request) from error
            _warn(session, request, str(explain(error, request) if isinstance(error, ToolSchemaError) else error))
        else:
            return constrained
    backend.check(params)
    return params


def explain(error: ConstraintError, request: ChatRequest) -> PolicyRequestError:
    """``error`` with the field of ``request`` that has the schema, or with the tool."""
    required = request.requirements
    if isinstance(error, ToolSchemaError):
        tool = _tool_of(error.schema, request.functions)
        return PolicyRequestError(f"the parameters of {tool}: {error}", param="tools")
    field = "tools" if required.schema is None else required.schema_field
    return PolicyRequestError(str(error) if field in str(error) else f"{field}: {error}", param=field)


def _tool_of(schema: Mapping[str, Any], tools: Sequence[Mapping[str, Any]]) -> str:
    """The tool whose parameters, or one of them, became ``schema``, by the keywords that both have."""
    shared: dict[str, int] = {}
    for tool in tools:
        parameters: dict[str, Any] = tool["function"].get("parameters") or {}
        properties: Any = parameters.get("properties")  # of any type: the schema is one that does not compile
        own: list[Any] = list(properties.values()) if isinstance(properties, dict) else []
        for part in (parameters, *(part for part in own if isinstance(part, dict))):
            if part and all(schema.get(key) == value for key, value in part.items()):
                name = tool["function"]["name"]
                shared[name] = max(len(part), shared.get(name, 0))
    return f"the tool {show_json(max(shared, key=lambda name: shared[name]))}" if shared else "a tool"


def _with_grammar(
    params: SamplingParams, request: ChatRequest, chat: Chat, prompt: RenderedPrompt, calls: AllowedCalls | None
) -> SamplingParams:
    """``params`` with the schema and the grammar of the response. Raises `ConstraintError` if the calls have no grammar."""
    schema, field = request.requirements.schema, request.requirements.schema_field
    whole = None if schema is None else schema or _ANY_OBJECT
    try:
        grammar = None if whole is None and calls is None else chat.output_grammar(whole, calls, prompt.ending)
    except ValueError as error:
        if schema is None:
            raise ConstraintError(str(error)) from error
        together = f"tools and {field}, which the model cannot have together"
        raise ConstraintError(f"the request has {together}: {error}. Send one of them") from error
    return replace(params, grammar=grammar, json_schema=None if whole is None else json.dumps(whole))


def _warn(session: Session, request: ChatRequest, why: str) -> None:
    """Log that what ``request`` requires of its calls is only an instruction."""
    what = "a required tool" if request.requirements.tool is not None else "at most one call"
    if (times := session.logged.count((what, why))) is not None:
        logger.warning(
            "a request requires %s%s, which is only an instruction in its prompt here: %s",
            what,
            times,
            why,
            extra=COUNTED,
        )
