"""The form that a request requires of the response: JSON, a JSON schema, or a tool call.

Requirements are added to the prompt as an instruction, and constrain sampling; see `constrain`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_core.chat.json_text import MOST_SHOWN, show_json
from lightning_core.dialects.fields import Fields, check_variant, text
from lightning_core.errors import PolicyRequestError, shorten

ANY_TOOL = ""
"""Stands for the name of the tool to call if any tool may be called."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputRequirements:
    """Requirements of one request; the defaults require nothing."""

    schema: Mapping[str, Any] | None = None
    """A JSON schema of the response; the empty one means any JSON object."""
    schema_field: str = "response_format"
    """The field of the body with the schema."""
    description: str | None = None
    """The purpose of the schema, for the model."""
    tool: str | None = None
    """The name of the tool to call, or `ANY_TOOL`."""
    one_call: bool = False
    """Whether a response has at most one tool call."""

    @property
    def constrain(self) -> bool:
        """Whether they may be a constraint on sampling."""
        return self.schema is not None or self.tool is not None or self.one_call

    def instructions(self) -> dict[str, str]:
        """The lines at the end of the system message, by the setting that asks for each; empty if nothing is required."""
        lines: dict[str, str] = {}
        if self.tool is not None:
            lines["tool_choice"] = (
                f"Answer by calling the function {self.tool}." if self.tool else "Answer by calling a function."
            )
        if self.one_call:
            lines["parallel_tool_calls"] = "Call at most one function in an answer."
        if self.schema is not None:
            what = f"satisfies this JSON schema:\n{json.dumps(self.schema)}" if self.schema else "is a JSON object."
            form = f"Write your final answer as JSON, with no text around it, such that it {what}"
            lines["schema"] = form + (f"\nThe JSON is for: {self.description}" if self.description else "")
        return lines


def read_form(form: Any, path: str, variants: Mapping[str, Fields], *, inner: str | None = None) -> Mapping[str, Any]:
    """The schema and its description in ``form``, the field at ``path``, as OpenAI's formats have it.

    ``inner``: the field of ``form`` with both; None: ``form`` has them. Raises `PolicyRequestError` for another form.
    """
    if form is None:
        return {}
    if isinstance(form, Mapping):
        check_variant(variants, form, path)
        more, place = (form, path) if inner is None else (form.get(inner), f"{path}.{inner}")
        match form.get("type"), more:
            case "text", _:
                return {}
            case "json_object", _:
                return {"schema": {}}
            case "json_schema", {"schema": dict(schema)}:
                return {"schema": schema, "description": text(more, "description", place)}
            case _:
                pass
    raise PolicyRequestError(
        f"{path} is {show_json(form)}; expected the type text, json_object, or json_schema with a schema", param=path
    )


def other_kind(entry: Any) -> str:
    """Stands for the name of an entry of allowed tools that is not a function."""
    return (
        f"a tool of the type {shorten(str(entry.get('type')), MOST_SHOWN)}"
        if isinstance(entry, Mapping)
        else show_json(entry)
    )


def allowed_tools(
    names: Sequence[str], tools: Sequence[Mapping[str, Any]], *, left_out: Sequence[str] = ()
) -> list[Mapping[str, Any]]:
    """The tools that ``tool_choice`` allows, without ``left_out``, which the model is not shown.

    Raises `PolicyRequestError` if one of ``names`` is not in ``tools``, or if there are none.
    """
    known = [str(tool["function"].get("name")) for tool in tools]
    if not names or any(name not in known for name in names):
        raise PolicyRequestError(
            f"tool_choice allows {show_json([*names, *left_out])}; expected at least one name of the tools of the request, which are "
            f"{show_json(known)}",
            param="tool_choice",
        )
    return [tool for tool, name in zip(tools, known, strict=True) if name in names]


def check_tool_choice(name: str | None, tools: Sequence[Mapping[str, Any]] | None) -> str | None:
    """Raise `PolicyRequestError` if no tool has ``name``; returns ``name``."""
    names = [str((tool.get("function") or {}).get("name")) for tool in tools or ()]
    if name is not None and (name not in names if name else not names):
        raise PolicyRequestError(
            f"tool_choice requires a call of {show_json(name or 'a tool')}, but the tools of the request are {show_json(names)}",
            param="tool_choice",
        )
    return name
