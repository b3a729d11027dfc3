"""What a request demands of the form of its answer: JSON, a schema, a tool call.

The model is told of it in the prompt. A schema constrains the sampling besides (``SamplingParams.json_schema``). A tool call is asked for
and not forced: an answer without one is the agent's own failure, and what its training is there to mend.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_core.errors import PolicyRequestError

ANY_TOOL = ""
"""Stands for the name of the tool to call where each of them will do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demands:
    """Everything None and False asks for nothing."""

    schema: Mapping[str, Any] | None = None
    """A JSON schema that the answer is to satisfy; the empty one means any JSON object."""
    tool: str | None = None
    """The name of the tool to call, or `ANY_TOOL`."""
    one_call: bool = False
    """At most one tool call in an answer."""

    def in_words(self) -> str:
        """The instruction that the system message ends with; empty where nothing is asked for."""
        lines: list[str] = []
        if self.tool is not None:
            lines.append(
                f"Answer by calling the function {self.tool}." if self.tool else "Answer by calling a function."
            )
        if self.one_call:
            lines.append("Call at most one function in an answer.")
        if self.schema is not None:
            what = f"satisfies this JSON schema:\n{json.dumps(self.schema)}" if self.schema else "is a JSON object."
            lines.append(f"Write your final answer as JSON, with no text around it, such that it {what}")
        return "\n".join(lines)


def check_tool(name: str | None, tools: Sequence[Mapping[str, Any]] | None) -> str | None:
    """``name``, if it is among ``tools`` (or is `ANY_TOOL`, and there are some). Raises `PolicyRequestError` otherwise."""
    names = [str((tool.get("function") or {}).get("name")) for tool in tools or ()]
    if name is not None and (name not in names if name else not names):
        raise PolicyRequestError(
            f"tool_choice demands a call of {name or 'a tool'!r}, but the request's tools are {names!r}",
            param="tool_choice",
        )
    return name
