"""Tools that command-line agents send: free-form, in namespaces, deferred behind a search, and of their provider."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import anthropic
import httpx
import openai
import pytest

from lightning_core.capture import Run
from lightning_core.testing import playground
from lightning_core.testing.playground import tool_call
from lightning_core.transitions import trace_to_transitions, transitions_to_rows

GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": "start: WORD"}
WRITE = {"type": "custom", "name": "write", "description": "Writes a file.", "format": GRAMMAR}
READ = {"type": "function", "name": "read", "parameters": {"type": "object", "properties": {"file": {"type": "string"}}}}
NAMESPACE = {"type": "namespace", "name": "crew", "description": "Helpers.", "tools": [READ, {"type": "custom", "name": "say"}]}
SEARCH = {"type": "tool_search", "execution": "client", "description": "Finds tools.", "parameters": {"type": "object"}}
WEB = {"type": "web_search", "external_web_access": True}
ASK: list[Any] = [{"role": "user", "content": "go"}]
TEXT = "line 1\nline \"2\"\n"


def post(run: Run, path: str, body: dict[str, Any]) -> dict[str, Any]:
    response = httpx.post(f"{run.endpoint}{path}", json={"model": "policy", **body}, headers={"authorization": f"Bearer {run.api_key}"})
    assert response.status_code == 200, response.text
    return response.json()


def prompts(run: Run) -> list[str]:
    return [bytes(i for i in call.prompt_ids.tolist() if i < 256).decode() for call in run.trace.calls if call.prompt_ids is not None]


def contexts(run: Run) -> list[str | None]:
    return [call.context for call in run.trace.calls]


def rows(run: Run) -> int:
    return len(transitions_to_rows(trace_to_transitions(run.trace)))


def converse(tools: Sequence[Any], answer: str, output: Any, *, leading: Sequence[Any] = ()) -> tuple[dict[str, Any], Run]:
    """The item of a call in the Responses API, sent back with ``output``."""
    with playground([answer, "done"], train=["agent"]) as run:
        with run_as("agent"):
            body: dict[str, Any] = {"input": [*leading, *ASK], "tools": tools}
            (item,) = post(run, "/responses", body)["output"]
            post(run, "/responses", {**body, "input": [*body["input"], item, {**output, "call_id": item["call_id"]}]})
    return item, run


def run_as(agent: str) -> Any:
    from lightning_core.capture import scope

    return scope(agent)


@pytest.mark.parametrize("arguments", [json.dumps({"input": TEXT}), json.dumps({"text": TEXT})])
def test_a_free_form_call_is_an_item_with_its_input_and_one_row(arguments: str):
    written = tool_call("write", **json.loads(arguments))
    item, run = converse([WRITE, READ], written, {"type": "custom_tool_call_output", "output": "ok"})
    assert (item["type"], item["name"]) == ("custom_tool_call", "write")
    assert item["input"] == (TEXT if "input" in arguments else arguments)
    assert "start: WORD" in prompts(run)[0]
    assert rows(run) == 1
