"""Tools that command-line agents send: free-form, in namespaces, deferred behind a search, and of their provider."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import anthropic
import httpx
import openai
import pytest

from lightning_core import trace_to_transitions, transitions_to_rows
from lightning_core.capture import ActiveRollout, scope
from lightning_core.dialects import openai_responses
from lightning_core.errors import PolicyRequestError
from lightning_core.records.ledger import trace_ledger
from lightning_core.testing import playground, tool_call

GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": "start: WORD"}
WRITE = {"type": "custom", "name": "write", "description": "Writes a file.", "format": GRAMMAR}
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"file": {"type": "string"}}}
READ = {"type": "function", "name": "read", "parameters": SCHEMA}
SAY = {"type": "custom", "name": "say"}
CREW = {"type": "namespace", "name": "crew", "description": "Helpers.", "tools": [READ, SAY]}
SEARCH = {"type": "tool_search", "execution": "client", "description": "Finds tools.", "parameters": {"type": "object"}}
WEB = {"type": "web_search", "external_web_access": True}
ASK: list[Any] = [{"role": "user", "content": "go"}]
TEXT = 'line 1\nline "2"\n'


@contextmanager
def as_agent(script: list[str]) -> Iterator[ActiveRollout]:
    """A rollout in the scope of its trained agent."""
    with playground(script, train=["agent"]) as run, scope("agent"):
        yield run


def post(run: ActiveRollout, path: str, body: dict[str, Any]) -> dict[str, Any]:
    headers = {"authorization": f"Bearer {run.api_key}"}
    response = httpx.post(f"{run.endpoint}{path}", json={"model": "policy", **body}, headers=headers)
    assert response.status_code == 200, response.text
    return response.json()


def prompts(run: ActiveRollout) -> list[str]:
    ids = [call.prompt_ids for call in run.trace.calls if call.prompt_ids is not None]
    return [bytes(i for i in prompt.tolist() if i < 256).decode() for prompt in ids]


def rows(run: ActiveRollout) -> int:
    return len(transitions_to_rows(trace_to_transitions(run.trace, agents=["agent"])))


def notes(run: ActiveRollout) -> set[str]:
    return {text.partition(": ")[0] for call in run.trace.calls for text in call.dropped}


def converse(
    tools: Sequence[Any], answer: str, output: dict[str, Any], *, leading: Sequence[Any] = ()
) -> tuple[dict[str, Any], ActiveRollout]:
    """The item of a call in the Responses API, which is sent back with ``output``."""
    with as_agent([answer, "done"]) as run:
        body: dict[str, Any] = {"input": [*leading, *ASK], "tools": tools}
        (item,) = post(run, "/responses", body)["output"]
        result = {**output, "call_id": item["call_id"]}
        post(run, "/responses", {**body, "input": [*body["input"], item, result]})
    return item, run


@pytest.mark.parametrize("arguments", [{"input": TEXT}, {"text": TEXT}])
def test_a_free_form_call_is_an_item_with_its_input_and_one_row(arguments: dict[str, str]):
    """Also if the model wrote other arguments: the client reports them."""
    output = {"type": "custom_tool_call_output", "output": "ok"}
    item, run = converse([WRITE, READ], tool_call("write", **arguments), output)
    assert (item["type"], item["name"]) == ("custom_tool_call", "write")
    assert item["input"] == arguments.get("input", json.dumps(arguments))
    assert "start: WORD" in prompts(run)[0]
    assert rows(run) == (1 if "input" in arguments else 2)


@pytest.mark.parametrize("place", ["tools", "additional_tools"])
@pytest.mark.parametrize(("name", "kind"), [("read", "function_call"), ("say", "custom_tool_call")])
def test_a_tool_in_a_namespace_is_called_by_its_name_and_namespace(place: str, name: str, kind: str):
    leading = [{"type": "additional_tools", "role": "developer", "tools": [CREW]}] if place != "tools" else []
    tools = [READ, WEB, *([CREW] if place == "tools" else [])]
    call = tool_call(f"crew__{name}", input="hi")
    item, run = converse(tools, call, {"type": f"{kind}_output", "output": "ok"}, leading=leading)
    assert (item["type"], item["name"], item["namespace"]) == (kind, name, "crew")
    assert "crew: Helpers." in prompts(run)[0]
    assert rows(run) == 1


def test_a_function_outside_namespaces_has_none():
    item, run = converse([READ, CREW], tool_call("read", file="a"), {"type": "function_call_output", "output": "ok"})
    assert (item["type"], item["name"], "namespace" in item) == ("function_call", "read", False)
    assert rows(run) == 1


def test_a_deferred_tool_is_shown_by_the_search_that_finds_it():
    hidden = {**READ, "name": "hidden", "defer_loading": True}
    found = {"type": "tool_search_output", "execution": "client", "tools": [hidden]}
    item, run = converse([SEARCH, WRITE, hidden], tool_call("tool_search", query="x"), found)
    assert (item["type"], item["execution"], item["arguments"]) == ("tool_search_call", "client", {"query": "x"})
    first, second = prompts(run)
    assert "hidden" not in first
    assert '"hidden"' in second
    assert rows(run) == 1


def test_tools_that_come_later_are_a_message_and_keep_the_row():
    output = {"type": "function_call_output", "output": "ok"}
    with as_agent([tool_call("read", file="a"), tool_call("late", file="b")]) as run:
        (item,) = post(run, "/responses", {"input": ASK, "tools": [READ]})["output"]
        late = {"type": "additional_tools", "tools": [{**READ, "name": "late"}]}
        items = [*ASK, item, {**output, "call_id": item["call_id"]}, late]
        (called,) = post(run, "/responses", {"input": items, "tools": [READ]})["output"]
    assert (called["type"], called["name"]) == ("function_call", "late")
    assert rows(run) == 1


@pytest.mark.parametrize("before", [[], [READ]])
def test_tools_after_a_named_response_are_a_message_and_stay(before: list[Any]):
    with as_agent(["hello", tool_call("crew__say", input="hi"), tool_call("crew__say", input="bye"), "done"]) as run:
        first = post(run, "/responses", {"input": ASK, "tools": before})
        added = [{"type": "additional_tools", "role": "developer", "tools": [CREW]}, *ASK]
        second = post(run, "/responses", {"input": added, "tools": before, "previous_response_id": first["id"]})
        (call,) = second["output"]
        result = {"type": "custom_tool_call_output", "call_id": call["call_id"], "output": "ok"}
        body = {"input": [result], "tools": before, "previous_response_id": second["id"]}
        (again,) = post(run, "/responses", body)["output"]
        shown = prompts(run)
        contexts = [call.context for call in run.trace.calls]
        # A named tool may be one that a message defines.
        post(run, "/responses", {**body, "tool_choice": {"type": "custom", "name": "say", "namespace": "crew"}})
    assert [(item["type"], item["name"], item["namespace"], item["input"]) for item in (call, again)] == [
        ("custom_tool_call", "say", "crew", "hi"),
        ("custom_tool_call", "say", "crew", "bye"),
    ]
    assert [prompt.count("crew: Helpers.") for prompt in shown] == [0, 1, 1]
    assert contexts == ["new", "clean", "clean"]


def test_tools_at_the_start_of_a_conversation_are_kept_by_the_name_of_its_response():
    with as_agent(["hello", tool_call("crew__say", input="hi"), "done"]) as run:
        leading = [{"type": "additional_tools", "role": "developer", "tools": [CREW]}]
        first = post(run, "/responses", {"input": [*leading, *ASK]})
        second = post(run, "/responses", {"input": ASK, "previous_response_id": first["id"]})
        (call,) = second["output"]
        result = {"type": "custom_tool_call_output", "call_id": call["call_id"], "output": "ok"}
        post(run, "/responses", {"input": [result], "previous_response_id": second["id"]})
    assert (call["type"], call["name"], call["namespace"]) == ("custom_tool_call", "say", "crew")
    assert [prompt.count("crew: Helpers.") for prompt in prompts(run)] == [1, 1, 1]
    assert [m["role"] for m in run.trace.calls[1].messages] == ["user", "assistant", "user"]
    assert rows(run) == 1


def test_a_tool_that_a_search_found_keeps_its_kind_after_a_named_response():
    hidden = {**SAY, "name": "hidden", "defer_loading": True}
    with as_agent([tool_call("tool_search", query="x"), "found", tool_call("hidden", input="hi")]) as run:
        first = post(run, "/responses", {"input": ASK, "tools": [SEARCH]})
        found = {"type": "tool_search_output", "call_id": first["output"][0]["call_id"], "tools": [hidden]}
        body = {"input": [found], "tools": [SEARCH], "previous_response_id": first["id"]}
        second = post(run, "/responses", body)
        body = {"input": ASK, "tools": [SEARCH], "previous_response_id": second["id"]}
        (call,) = post(run, "/responses", body)["output"]
    assert (call["type"], call["name"], call["input"]) == ("custom_tool_call", "hidden", "hi")
    assert rows(run) == 1


HELPER = {"type": "namespace", "name": "crew", "tools": [READ]}


@pytest.mark.parametrize(
    ("tools", "found"),
    [
        (
            [{**READ, "name": "crew__read"}, HELPER],
            "tools has the function 'crew__read' and the function 'read' in the namespace 'crew', which are both shown to the model as "
            "'crew__read'; expected a different name for each tool. Rename one of them",
        ),
        ([READ, {**SAY, "name": "read"}], "tools has the function 'read' and the free-form tool 'read'"),
    ],
)
@pytest.mark.parametrize("place", ["tools", pytest.param("input", marks=pytest.mark.long), "earlier"])
def test_different_tools_with_the_same_name_for_the_model_are_refused(tools: list[Any], found: str, place: str):
    with as_agent(["hello"]) as run:
        one, other = ({"type": "additional_tools", "tools": [tool]} for tool in tools)
        bodies = {"tools": {"input": ASK, "tools": tools}, "input": {"input": [*ASK, one, other]}}
        body = bodies.get(place)
        if body is None:
            named = post(run, "/responses", {"input": [one, *ASK]})["id"]
            body = {"input": [other, *ASK], "previous_response_id": named}
        headers = {"authorization": f"Bearer {run.api_key}"}
        response = httpx.post(f"{run.endpoint}/responses", json={"model": "policy", **body}, headers=headers)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["message"].startswith(found)
    assert error["param"] == "tools"


def test_the_same_tool_may_be_given_again_as_in_chat_completions():
    function = {"type": "function", "function": {"name": "read", "parameters": SCHEMA}}
    with as_agent(["a", "b", "c"]) as run:
        post(run, "/chat/completions", {"messages": ASK, "tools": [function, function]})
        post(run, "/responses", {"input": ASK, "tools": [READ, READ]})
        functions = {"type": "namespace", "name": "functions", "tools": [READ]}
        post(run, "/responses", {"input": [{"type": "additional_tools", "tools": [functions]}, *ASK], "tools": [READ]})
    assert len(prompts(run)) == 3


BODIES: dict[str, dict[str, Any]] = {
    "/chat/completions": {"messages": ASK},
    "/responses": {"input": ASK},
    "/messages": {"messages": ASK, "max_tokens": 9},
    "/models/policy:generateContent": {"contents": [{"parts": [{"text": "go"}]}]},
}
"""The least body of each format."""


@pytest.mark.parametrize(
    ("path", "tools", "name"),
    [
        ("/responses", [WEB, READ], "web_search"),
        (
            "/messages",
            [{"type": "web_search_20250305", "name": "web_search"}, {"name": "read", "input_schema": SCHEMA}],
            "web_search_20250305",
        ),
        (
            "/models/policy:generateContent",
            [{"googleSearch": {}}, {"functionDeclarations": [{"name": "read"}]}],
            "googleSearch",
        ),
    ],
)
def test_a_search_of_the_provider_is_left_out_with_a_warning_beside_functions(
    path: str, tools: list[Any], name: str, caplog: pytest.LogCaptureFixture
):
    with as_agent(["a", "b"]) as run:
        for _ in range(2):
            post(run, path, {**BODIES[path], "tools": tools})
    assert "earch" not in prompts(run)[0]
    assert len(notes(run)) == 1
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warning.startswith("agent 'agent' offers tools.")
    assert name in warning
    assert "it is not shown this one" in warning


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_allowed_tools_may_name_a_search_that_was_left_out(mode: str):
    body = {**BODIES["/responses"], "tools": [WEB, READ]}
    with as_agent(["a", "b"]) as run:
        allowed = {
            "type": "allowed_tools",
            "mode": mode,
            "tools": [{"type": "web_search"}, {"type": "function", "name": "read"}],
        }
        post(run, "/responses", {**body, "tool_choice": allowed})
        assert "read" in prompts(run)[0]


@pytest.mark.parametrize("entry", [{"type": "web_search"}, {"type": "mcp", "server_label": "s"}])
def test_allowed_tools_without_a_function_are_refused_by_name(entry: dict[str, str]):
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [entry]}
    body = {**BODIES["/responses"], "model": "policy", "tools": [WEB, READ], "tool_choice": choice}
    with pytest.raises(
        PolicyRequestError, match=rf"tool_choice allows \['(a tool of the type )?{entry['type']}'\]; expected"
    ):
        openai_responses.parse_request(body, conversations={})


HOSTED = [
    ("/chat/completions", [{"type": "web_search"}], "web_search"),
    ("/responses", [WEB], "web_search"),
    ("/responses", [{"type": "code_interpreter", "container": {"type": "auto"}}], "code_interpreter"),
    ("/responses", [{"type": "file_search", "vector_store_ids": ["v"]}, READ], "file_search"),
    ("/responses", [{"type": "mcp", "server_label": "s", "server_url": "http://s.example"}, READ], "mcp"),
    ("/messages", [{"type": "web_search_20250305", "name": "web_search"}], "web_search_20250305"),
    ("/messages", [{"type": "code_execution_20250825", "name": "code_execution"}], "code_execution_20250825"),
    ("/models/policy:generateContent", [{"googleSearch": {}}], "googleSearch"),
    ("/models/policy:generateContent", [{"codeExecution": {}}], "codeExecution"),
]
SHORT = ("web_search", "mcp", "web_search_20250305", "codeExecution")


@pytest.mark.parametrize(
    ("path", "tools", "name"),
    [
        pytest.param(*hosted, marks=() if hosted[2] in SHORT else pytest.mark.long, id=f"{hosted[0]}-{hosted[2]}")
        for hosted in HOSTED
    ],
)
def test_a_tool_that_a_provider_runs_is_refused_by_name_and_is_not_the_agents_failure(
    path: str, tools: list[Any], name: str
):
    """Even if the agent swallows the error: its reward does not depend on the policy."""
    with playground([], train=["agent"], strict=False) as run, scope("agent"):
        headers = {"authorization": f"Bearer {run.api_key}"}
        body = {"model": "policy", **BODIES[path], "tools": tools}
        answer = httpx.post(f"{run.endpoint}{path}", json=body, headers=headers)
    assert answer.status_code == 400
    (failure,) = run.infrastructure
    assert name in failure
    assert "or put it under agents.frozen with a model of the provider" in failure
    assert run.permanent == {failure}, "no other attempt avoids it"
    (entry,) = trace_ledger(run.trace)
    assert entry.kind == "refused"
    assert name in entry.detail


def test_a_chat_client_s_free_form_call_has_its_input_with_and_without_streaming():
    tools: Any = [
        {"type": "custom", "custom": {"name": "write", "format": {"type": "grammar", "grammar": {**GRAMMAR}}}},
        {"type": "function", "function": {"name": "read"}},
    ]
    answer = tool_call("write", input=TEXT)
    with as_agent([answer, "done", answer]) as run:
        client = openai.OpenAI(base_url=run.endpoint, api_key=run.api_key)
        message = client.chat.completions.create(model="m", messages=ASK, tools=tools).choices[0].message
        (call,) = message.tool_calls or ()
        assert call.type == "custom"
        assert (call.custom.name, call.custom.input) == ("write", TEXT)
        result: Any = {"role": "tool", "tool_call_id": call.id, "content": "ok"}
        back: Any = message.to_dict()
        client.chat.completions.create(model="m", messages=[*ASK, back, result], tools=tools)
        chunks = list(client.chat.completions.create(model="m", messages=ASK, tools=tools, stream=True))
    (delta,) = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
    assert delta.to_dict()["custom"] == {"name": "write", "input": TEXT}
    assert rows(run) == 2


def test_a_streamed_free_form_call_has_the_events_of_its_kind():
    with as_agent([tool_call("write", input=TEXT)]) as run:
        client = openai.OpenAI(base_url=run.endpoint, api_key=run.api_key)
        tools: Any = [WRITE]
        with client.responses.stream(model="m", input="go", tools=tools) as stream:
            kinds = [event.type for event in stream]
            (item,) = stream.get_final_response().output
    assert item.type == "custom_tool_call"
    assert item.input == TEXT
    assert kinds[-4:] == [
        "response.custom_tool_call_input.delta",
        "response.custom_tool_call_input.done",
        "response.output_item.done",
        "response.completed",
    ]


def test_a_deferred_tool_of_the_messages_api_is_shown_where_a_result_names_it():
    tools: list[Any] = [
        {"name": "find", "input_schema": SCHEMA},
        {"name": "hidden", "description": "Deep.", "input_schema": SCHEMA, "defer_loading": True},
    ]
    with as_agent([tool_call("find", file="x"), "done"]) as run:
        client = anthropic.Anthropic(base_url=run.endpoint.removesuffix("/v1"), api_key=run.api_key)
        common: dict[str, Any] = {"model": "m", "max_tokens": 99, "tools": tools}
        said = client.messages.create(**common, messages=ASK)
        found = [{"type": "tool_reference", "tool_name": "hidden"}]
        result = {"type": "tool_result", "tool_use_id": said.content[0].id, "content": found}
        back: Any = {"role": "assistant", "content": [block.to_dict() for block in said.content]}
        edits = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
        messages: Any = [*ASK, back, {"role": "user", "content": [result], "output_config": {"effort": "low"}}]
        client.messages.create(**common, messages=messages, extra_body={"context_management": edits})
    first, second = prompts(run)
    assert "Deep." not in first
    assert "Deep." in second
    assert (rows(run), notes(run)) == (1, set())


def test_a_thread_is_refused_with_the_code_on_which_the_sdk_sends_everything():
    with as_agent([]) as run:
        headers = {"x-api-key": run.api_key}
        body = {"model": "m", "max_tokens": 9, "messages": ASK, "thread": {"type": "new"}}
        response = httpx.post(f"{run.endpoint}/messages", json=body, headers=headers)
    assert response.json()["error"]["details"] == {"error_code": "thread_unsupported_request"}
