"""Prompts that the endpoint adds to the requests of agents, read by real clients' requests."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import anthropic
import httpx
import openai
import pytest
from google import genai
from google.genai import types

from lightning_core.capture import ActiveRollout, current_address, run_as, scope
from lightning_core.config import load_config
from lightning_core.endpoint.server import PolicyEndpoint, Routing
from lightning_core.errors import ConfigError
from lightning_core.prompts.agent_prompts import AgentPrompts, make_prompt
from lightning_core.testing.playground import tool_call
from lightning_core.trace import REWARD_FUNCTION
from tests.endpoint.serving import key_in_rollout, prompts_of, rows_of, serve, serve_upstream

CALL = {"id": "a", "type": "function", "function": {"name": "run", "arguments": '{"sql": "SELECT 1"}'}}
DEMONSTRATION = [
    {"role": "user", "content": "How many?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "a", "content": '{"rows": 1}'},
    {"role": "assistant", "content": "One."},
]
WRITER = make_prompt("writer", extend="Answer with SQL only.", demonstrations=[DEMONSTRATION])
PLANNER = make_prompt("plan*", replace="You plan.")
PROMPTS = AgentPrompts({"writer": WRITER, "plan*": PLANNER})
ROUTING = Routing(trained=frozenset({"writer"}), frozen={"planner": "base", "other": "base"}, prompts=PROMPTS)
TOOL = {
    "name": "run",
    "description": "Run it.",
    "parameters": {"type": "object", "properties": {"sql": {"type": "string"}}},
}


@contextmanager
def headers_of(
    endpoint: PolicyEndpoint, routing: Routing = ROUTING, agent: str = "writer"
) -> Iterator[tuple[ActiveRollout, str, dict[str, str]]]:
    with key_in_rollout(endpoint, routing) as (run, key), scope(agent):
        address = current_address()
        assert address is not None
        yield run, key, address.to_headers()


def turn(role: str, text: str) -> str:
    return f"{role}\n{text}\n"


SEEN = [
    ("system", "Be brief.\n\nAnswer with SQL only."),
    ("user", "How many?"),
    ("assistant", ""),
    ("tool", '{"rows": 1}'),
]
"""The start of each conversation of the writer, as roles and texts."""


def seen(run: ActiveRollout, index: int = -1) -> list[tuple[str, str]]:
    return [(m["role"], m["content"]) for m in run.trace.calls[index].messages]


def ask_chat(url: str, key: str, headers: dict[str, str], model: str) -> None:
    client = openai.OpenAI(base_url=url, api_key=key, default_headers=headers, max_retries=0).chat.completions
    messages: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "And now?"}]
    tools: Any = [{"type": "function", "function": TOOL}]
    first = client.create(model=model, messages=messages, tools=tools).choices[0].message
    call = first.tool_calls[0]
    messages += [first, {"role": "tool", "tool_call_id": call.id, "content": "2"}]
    client.create(model=model, messages=messages, tools=tools, stream=False)


def ask_responses(url: str, key: str, headers: dict[str, str], model: str) -> None:
    """With the id of the first response, which has the demonstrations."""
    client = openai.OpenAI(base_url=url, api_key=key, default_headers=headers, max_retries=0).responses
    tools: Any = [{"type": "function", **TOOL}]
    first = client.create(model=model, instructions="Be brief.", input="And now?", tools=tools)
    call = next(item for item in first.output if item.type == "function_call")
    output: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "2"}]
    client.create(model=model, instructions="Be brief.", input=output, previous_response_id=first.id, tools=tools)


def ask_messages(url: str, key: str, headers: dict[str, str], model: str) -> None:
    base = url.removesuffix("/v1")
    client = anthropic.Anthropic(base_url=base, api_key=key, default_headers=headers, max_retries=0).messages
    messages: list[Any] = [{"role": "user", "content": "And now?"}]
    tools: Any = [{"name": "run", "description": "Run it.", "input_schema": TOOL["parameters"]}]
    system: Any = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    common: dict[str, Any] = {"model": model, "max_tokens": 200, "system": system, "tools": tools}
    first = client.create(messages=messages, **common)
    use = next(block for block in first.content if block.type == "tool_use")
    messages += [
        {"role": "assistant", "content": [block.model_dump() for block in first.content]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": use.id, "content": "2"}]},
    ]
    client.create(messages=messages, **common)


def ask_gemini(url: str, key: str, headers: dict[str, str], model: str) -> None:
    options = types.HttpOptions(base_url=url.removesuffix("/v1"), headers=headers)
    with genai.Client(api_key=key, http_options=options, vertexai=False) as client:
        declared: Any = [
            {"function_declarations": [{**TOOL, "parameters": None, "parameters_json_schema": TOOL["parameters"]}]}
        ]
        config = types.GenerateContentConfig(
            system_instruction="Be brief.", tools=declared, automatic_function_calling={"disable": True}
        )
        contents: list[Any] = [types.Content(role="user", parts=[types.Part(text="And now?")])]
        first = client.models.generate_content(model=model, contents=contents, config=config)
        contents += [
            first.candidates[0].content,
            types.Content(role="user", parts=[types.Part.from_function_response(name="run", response={"rows": 2})]),
        ]
        client.models.generate_content(model=model, contents=contents, config=config)


FORMATS = {"chat": ask_chat, "responses": ask_responses, "messages": ask_messages, "gemini": ask_gemini}


@pytest.mark.parametrize("name", FORMATS)
def test_the_model_reads_the_prompt_and_a_conversation_stays_one_row(name: str) -> None:
    answers = [tool_call("run", sql="SELECT 2"), "Two."]
    with serve(answers) as endpoint, headers_of(endpoint) as (run, key, headers):
        FORMATS[name](endpoint.url, key, headers, "any")
    first, second = run.trace.calls
    assert seen(run, 0) == [*SEEN, ("assistant", "One."), ("user", "And now?")]
    assert seen(run, 1)[: len(SEEN) + 2] == seen(run, 0)
    assert "SELECT 1" in json.dumps(first.messages[2]["tool_calls"])
    for (role, text), prompt in zip(SEEN[:2], prompts_of(run)[:1] * 2, strict=False):
        assert turn(role, text) in prompt
    assert (first.context, second.context) == ("new", "clean" if name != "gemini" else second.context)
    assert rows_of(run) == [2], "the second prompt extends the tokens of the first response"
    spans = [span for span in run.spans if span.attributes.get("lightning.prompt")]
    assert [span.attributes["lightning.prompt"] for span in spans] == [WRITER.label] * 2


@pytest.mark.parametrize("name", FORMATS)
def test_forwarded_requests_carry_the_prompt(name: str) -> None:
    """The upstream is a second endpoint, which records what it is asked."""
    frozen = Routing(frozen={"writer": "theirs"}, prompts=PROMPTS)
    answers = [tool_call("run", sql="SELECT 2"), "Two."]
    with (
        serve_upstream(answers) as (far, upstream),
        serve(upstream=upstream) as endpoint,
        headers_of(endpoint, frozen) as (run, key, headers),
    ):
        FORMATS[name](endpoint.url, key, headers, "any")
    asked = [(m["role"], m["content"]) for m in far.trace.calls[0].messages]
    assert asked == [*SEEN, ("assistant", "One."), ("user", "And now?")] == seen(run, 0)
    if name != "responses":
        assert [(m["role"], m["content"]) for m in far.trace.calls[1].messages][: len(asked)] == asked
    assert far.trace.calls[1].messages[0]["content"] == "Be brief.\n\nAnswer with SQL only."
    assert sum("How many?" in str(m["content"]) for m in far.trace.calls[1].messages) == 1


def test_agents_are_distinguished() -> None:
    with serve() as endpoint, key_in_rollout(endpoint, ROUTING) as (run, key):
        for agent in ("writer", "planner", "other"):
            with scope(agent):
                headers = current_address().to_headers()  # type: ignore[union-attr]
            client = openai.OpenAI(base_url=endpoint.url, api_key=key, default_headers=headers, max_retries=0)
            client.chat.completions.create(
                model="any" if agent == "writer" else "base",
                messages=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Go."}],
            )
    systems = {call.agent: call.messages[0]["content"] for call in run.trace.calls}
    assert systems == {
        "writer": "Be brief.\n\nAnswer with SQL only.",
        "planner": "You plan.",
        "other": "Be brief.",
    }


def test_a_judge_of_the_reward_function_gets_no_prompt() -> None:
    routing = Routing(prompts=AgentPrompts({"*": make_prompt("*", replace="You plan.")}))
    with serve() as endpoint, key_in_rollout(endpoint, routing) as (run, key):
        for name, enter in (("planner", scope), (REWARD_FUNCTION, run_as)):
            with enter(name):
                headers = current_address().to_headers()  # type: ignore[union-attr]
            client = openai.OpenAI(base_url=endpoint.url, api_key=key, default_headers=headers, max_retries=0)
            client.chat.completions.create(model="base", messages=[{"role": "user", "content": "Right?"}])
    roles = {call.agent: [m["role"] for m in call.messages] for call in run.trace.calls}
    assert roles == {"planner": ["system", "user"], REWARD_FUNCTION: ["user"]}


def test_an_agent_without_a_system_prompt_gets_one() -> None:
    with serve() as endpoint, headers_of(endpoint) as (run, key, headers):
        openai.OpenAI(base_url=endpoint.url, api_key=key, default_headers=headers).chat.completions.create(
            model="any", messages=[{"role": "user", "content": "And now?"}]
        )
    assert seen(run)[0] == ("system", "Answer with SQL only.")


def test_a_demonstration_that_another_rollout_sampled_is_no_leak() -> None:
    shown = [[{"role": "user", "content": "How many?"}, {"role": "assistant", "content": "One."}]]
    prompts = AgentPrompts({"writer": make_prompt("writer", demonstrations=shown)})
    reasons: list[str] = []
    with serve(lambda prompt: "One.") as endpoint:
        for routing, said in (
            (replace(ROUTING, prompts=AgentPrompts()), ["How many?"]),
            (replace(ROUTING, prompts=prompts), ["And now?"]),
            (replace(ROUTING, prompts=AgentPrompts()), ["How many?", "One.", "And now?"]),
        ):
            with headers_of(endpoint, routing) as (run, key, headers):
                messages: Any = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(said)]
                client = openai.OpenAI(base_url=endpoint.url, api_key=key, default_headers=headers, max_retries=0)
                client.chat.completions.create(model="any", messages=messages)
            reasons.append((run.trace.calls[0].context_reason or "").partition(":")[0])
    assert reasons == ["", "examples", "leaked"]


def test_counted_tokens_include_the_prompt() -> None:
    with serve() as endpoint, headers_of(endpoint) as (_, key, headers):
        base = endpoint.url.removesuffix("/v1")
        client = anthropic.Anthropic(base_url=base, api_key=key, default_headers=headers, max_retries=0).messages
        messages: Any = [{"role": "user", "content": "And now?"}]
        counted = client.count_tokens(model="any", messages=messages).input_tokens
        used = client.create(model="any", max_tokens=9, messages=messages).usage.input_tokens
    assert counted == used > 100


def test_forwarded_counts_include_the_prompt() -> None:
    frozen = Routing(frozen={"writer": "theirs"}, prompts=PROMPTS)
    with (
        serve_upstream("unused") as (_, upstream),
        serve(upstream=upstream) as endpoint,
        headers_of(endpoint, frozen) as (_, key, headers),
    ):
        base = endpoint.url.removesuffix("/v1")
        client = anthropic.Anthropic(base_url=base, api_key=key, default_headers=headers, max_retries=0).messages
        messages: Any = [{"role": "user", "content": "And now?"}]
        counted = client.count_tokens(model="any", messages=messages).input_tokens
        options = types.HttpOptions(base_url=base, headers=headers)
        with genai.Client(api_key=key, http_options=options, vertexai=False) as google:
            of_gemini = google.models.count_tokens(model="any", contents="And now?").total_tokens
    assert counted == of_gemini
    assert counted > 100


def test_a_replaced_prompt_leaves_no_other_at_the_start() -> None:
    """Developer messages at the start of Responses' items and of chats are a system prompt too; later ones are not."""
    asked: Any = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": "Go."},
        {"role": "developer", "content": "Now."},
    ]
    routing = Routing(prompts=PROMPTS)
    with serve() as endpoint, headers_of(endpoint, routing, agent="planner") as (run, key, headers):
        client = openai.OpenAI(base_url=endpoint.url, api_key=key, default_headers=headers, max_retries=0)
        client.responses.create(model="base", instructions="Be kind.", input=asked)
        client.chat.completions.create(model="base", messages=asked)
    for index, role in enumerate(("system", "developer")):
        assert seen(run, index) == [(role, "You plan."), ("user", "Go."), ("developer", "Now.")]


def test_a_request_without_a_chat_is_refused() -> None:
    with serve() as endpoint, headers_of(endpoint) as (_, key, headers):
        client = openai.OpenAI(base_url=endpoint.url, api_key=key, default_headers=headers, max_retries=0)
        with pytest.raises(
            openai.BadRequestError, match=r"a prompt under prompts\.writer, but a request to /completions"
        ):
            client.completions.create(model="any", prompt="x")


def test_a_refused_tool_call_is_found_behind_the_demonstrations() -> None:
    """The path in the error counts the demonstrations, and so does the record of the turn at fault."""
    broken = {"role": "model", "parts": [{"functionCall": {"name": "run", "args": [1]}}]}
    user = {"role": "user", "parts": [{"text": "x"}]}
    with serve() as endpoint, headers_of(endpoint) as (run, key, headers):
        answer = httpx.post(
            f"{endpoint.url}/models/any:generateContent",
            json={"contents": [user, broken, user]},
            headers={**headers, "authorization": f"Bearer {key}"},
        )
    assert answer.status_code == 400
    (refused,) = run.trace.calls
    assert refused.messages == (broken,)


def test_prompts_from_files_become_a_part_of_the_configuration(tmp_path: Any) -> None:
    (tmp_path / "demos.jsonl").write_text(json.dumps({"messages": DEMONSTRATION}) + "\n")
    (tmp_path / "prompts.yaml").write_text(f"writer: {{extend: SQL, demonstrations: {tmp_path}/demos.jsonl}}\n")
    config = load_config({"policy": {"model": "m"}, "prompts": str(tmp_path / "prompts.yaml")})
    assert config.prompts["writer"].extend == "SQL"
    assert config.prompts["writer"].demonstrations == [DEMONSTRATION]
    with pytest.raises(ConfigError, match=r"prompts\.w: .* expected extend or replace, not both"):
        load_config({"policy": {"model": "m"}, "prompts": {"w": {"extend": "a", "replace": "b"}}})
    system = [[{"role": "system", "content": "x"}]]
    with pytest.raises(ConfigError, match=r"message 1 is .* expected an object with the role user, assistant or tool"):
        load_config({"policy": {"model": "m"}, "prompts": {"w": {"demonstrations": system}}})
