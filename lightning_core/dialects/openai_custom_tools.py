"""Free-form tools, whose input is a text instead of JSON arguments.

The model is shown a function with the parameter ``input``. Its calls become free-form calls on the wire, and back.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

_INPUT = "input"


def custom_function(name: Any, description: Any, *, grammar: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """A free-form tool as a function of chat completions. ``grammar``: the ``syntax`` and ``definition`` of its input."""
    text = "Free-form text."
    if grammar is not None:
        text = f"Text of this grammar ({grammar.get('syntax')}):\n{grammar.get('definition')}"
    parameters = {
        "type": "object",
        "properties": {_INPUT: {"type": "string", "description": text}},
        "required": [_INPUT],
    }
    shown = {"name": name} if description is None else {"name": name, "description": description}
    return {"type": "function", "function": {**shown, "parameters": parameters}}


def read_input(arguments: str) -> str:
    """The input in the ``arguments`` of a call; the whole text if the model wrote something else."""
    try:
        match json.loads(arguments):
            case {"input": str(text)}:
                return text
            case _:
                return arguments
    except ValueError:
        return arguments


def write_arguments(text: str) -> str:
    """The arguments of a call with the input ``text``."""
    return json.dumps({_INPUT: text}, ensure_ascii=False)
