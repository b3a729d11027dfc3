"""Every field that an installed SDK can send is supported, ignored, dropped with a note, or refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import pytest
from anthropic.types import message_create_params
from anthropic.types.beta import message_create_params as beta_message_create_params
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params
from typing_extensions import is_typeddict

from lightning_core.backends.backend import SamplingParams
from lightning_core.backends.scripted import ScriptedBackend
from lightning_core.chat.json_text import show_json
from lightning_core.dialects import DIALECTS
from lightning_core.dialects import anthropic_messages as messages
from lightning_core.dialects import openai_chat as chat_completions
from lightning_core.dialects import openai_completions as completions
from lightning_core.dialects import openai_responses as responses
from lightning_core.dialects.dialect import Dialect
from lightning_core.dialects.openai_sampler import GUIDED, SAMPLER
from lightning_core.endpoint.server import PolicyEndpoint, Routing
from lightning_core.records.ledger import trace_ledger
from tests.endpoint.serving import HI, client_in_rollout, client_in_scope, serve, serve_backend

TOOLS: list[Any] = [{"type": "function", "function": {"name": "add"}}]
LEAST: dict[str, dict[str, Any]] = {
    chat_completions.PATH: {"model": "base", "messages": HI},
    responses.PATH: {"model": "base", "input": "hi"},
    messages.PATH: {"model": "base", "messages": HI, "max_tokens": 64},
    completions.PATH: {"model": "base", "prompt": "hi"},
}
"""The minimal request."""

OPENAI = {"frequency_penalty", "presence_penalty", "logit_bias"}
THINKING = {"enable_thinking", "thinking.type", "thinking.budget_tokens"}
"""Fields of other providers' chat completions."""
DOCUMENTED: list[tuple[Dialect, list[Any], set[str]]] = [
    (
        chat_completions,
        [chat_create_params.CompletionCreateParamsStreaming],
        {"return_token_ids", "chat_template_kwargs", *THINKING, *SAMPLER, *GUIDED} - OPENAI,
    ),
    (
        completions,
        [completion_create_params.CompletionCreateParamsStreaming],
        {"return_token_ids", *SAMPLER, *GUIDED} - OPENAI,
    ),
    (responses, [response_create_params.ResponseCreateParamsStreaming], {"client_metadata"}),
    (
        messages,
        [message_create_params.MessageCreateParamsStreaming, beta_message_create_params.MessageCreateParamsStreaming],
        # The API has them; the SDK leaves them to extra_body, or maps them to another field.
        {"temperature", "top_p", "top_k", "output_format"},
    ),
]
"""A wire format, the fields of its SDK's requests, and the additional ones in our table."""

HEADERS = {"betas"}
"""Parameters of the SDKs that are sent as headers."""


def typed_dicts(hint: Any) -> Iterator[Any]:
    """The TypedDicts that a field can contain directly."""
    if is_typeddict(hint):
        yield hint
    elif get_origin(hint) in (Union, UnionType) or getattr(get_origin(hint), "__name__", "") in (
        "Required",
        "NotRequired",
    ):
        for part in get_args(hint):
            if part is not NoneType:
                yield from typed_dicts(part)


def documented(wire: Dialect, params: list[Any]) -> set[str]:
    """Names of all fields; fields of a checked object as ``outer.inner``."""
    table = wire.FIELDS.supported | wire.FIELDS.ignored | wire.FIELDS.dropped.keys() | wire.FIELDS.refused.keys()
    looked_into = {name.partition(".")[0] for name in table if "." in name}
    found: set[str] = set()
    for one in params:
        for name, hint in get_type_hints(one).items():
            if name in looked_into:
                found |= {f"{name}.{inner}" for kind in typed_dicts(hint) for inner in get_type_hints(kind)}
            elif name not in HEADERS:
                found.add(name)
    return found


@pytest.mark.parametrize(("wire", "params", "besides"), DOCUMENTED, ids=lambda v: getattr(v, "PATH", None))
def test_the_table_is_what_the_sdk_documents(wire: Dialect, params: list[Any], besides: set[str]):
    """Fails if a new SDK documents a field that is in no table."""
    table = [*wire.FIELDS.supported, *wire.FIELDS.ignored, *wire.FIELDS.dropped, *wire.FIELDS.refused]
    assert len(table) == len(set(table)), "a field is in exactly one of the four"
    assert documented(wire, params) - set(table) == set()
    assert set(table) - documented(wire, params) == besides


def test_every_dialect_is_checked():
    assert {wire.PATH for wire, _, _ in DOCUMENTED} == {wire.PATH for wire in DIALECTS} == set(LEAST)


@pytest.fixture(scope="module")
def endpoint() -> Iterator[PolicyEndpoint]:
    with serve() as endpoint:
        yield endpoint


REFUSED = [(wire, name) for wire in DIALECTS for name in sorted(wire.FIELDS.refused)]


@pytest.mark.parametrize(("wire", "name"), REFUSED, ids=[f"{wire.PATH[1:]}-{name}" for wire, name in REFUSED])
def test_a_refusal_names_the_field_and_the_reason(endpoint: PolicyEndpoint, wire: Dialect, name: str):
    outer, _, inner = name.partition(".")

    def body(value: Any) -> dict[str, Any]:
        return {**LEAST[wire.PATH], outer: {inner: value} if inner else value}

    refusal = wire.FIELDS.refused[name]
    with client_in_rollout(endpoint) as (run, client):
        answer = client.post(wire.PATH, json=body("asked for"))
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert name in error["message"]
        assert refusal.reason in error["message"]
        if wire is not messages:
            assert error["param"] == name
        for nothing in (None, *refusal.unless):
            assert client.post(wire.PATH, json=body(nothing)).status_code == 200
    assert all(failure.startswith("HostedToolError: ") for failure in run.infrastructure)


VALUES: dict[type, Any] = {bool: True, dict: {"any": "thing"}, list: [{}], str: "auto", int: 7}
DROPPED = [(wire, name) for wire in DIALECTS for name in sorted(wire.FIELDS.dropped)]


@pytest.mark.parametrize(("wire", "name"), DROPPED, ids=[f"{wire.PATH[1:]}-{name}" for wire, name in DROPPED])
def test_a_dropped_field_is_noted_and_changes_nothing(endpoint: PolicyEndpoint, wire: Dialect, name: str):
    outer, _, inner = name.partition(".")
    field = wire.FIELDS.dropped[name]
    with client_in_rollout(endpoint) as (run, client):
        for value in (VALUES[field.kind.types[0]], None, *field.unless):
            body = {**LEAST[wire.PATH], outer: {inner: value} if inner else value}
            assert client.post(wire.PATH, json=body).status_code == 200
    noted, *without_effect = run.trace.calls
    assert noted.dropped == (f"{name}: {field.reason}",)
    assert {call.dropped for call in without_effect} == {()}
    assert len({call.prompt_ids.tobytes() for call in run.trace.calls if call.prompt_ids is not None}) == 1
    with client_in_rollout(endpoint) as (_, client):
        (wrong, *_) = (value for kind, value in VALUES.items() if kind not in (*field.kind.types, int))
        refused = client.post(wire.PATH, json={**LEAST[wire.PATH], outer: {inner: wrong} if inner else wrong})
    assert refused.status_code == 400
    assert f"{name} is {show_json(wrong)}; expected {field.kind.name}" in refused.json()["error"]["message"]


@pytest.mark.parametrize("wire", DIALECTS, ids=lambda wire: wire.PATH)
def test_an_unknown_field_is_noted_at_every_level(endpoint: PolicyEndpoint, wire: Dialect):
    outers = {name.partition(".")[0] for name in wire.FIELDS.supported if "." in name}
    with client_in_rollout(endpoint) as (run, client):
        for body in ({"unheard_of": {}}, *({outer: {"unheard_of": {}}} for outer in outers)):
            assert client.post(wire.PATH, json={**LEAST[wire.PATH], **body}).status_code == 200
    paths = {"unheard_of", *(f"{outer}.unheard_of" for outer in outers)}
    assert {text for call in run.trace.calls for text in call.dropped} == {f"{path}: unknown field" for path in paths}


def test_a_misspelt_field_is_noted_with_the_one_that_it_resembles_and_counted_once_per_call(endpoint: PolicyEndpoint):
    with client_in_rollout(endpoint) as (run, client):
        for _ in range(2):
            client.post("/chat/completions", json={**LEAST["/chat/completions"], "temprature": 0.5, "min_p": 0.1})
    ledger = trace_ledger(run.trace)
    assert {entry.detail: count for entry, count in ledger.items() if entry.kind == "dropped"} == {
        "temprature: unknown field; did you mean 'temperature'?": 2,
        "min_p: the sampler has temperature and top_p only": 2,
    }


@pytest.mark.parametrize("wire", DIALECTS, ids=lambda wire: wire.PATH)
def test_ignored_fields_change_nothing(endpoint: PolicyEndpoint, wire: Dialect):
    bodies: list[dict[str, Any]] = []
    for name in wire.FIELDS.ignored:
        outer, _, inner = name.partition(".")
        bodies.append({outer: {inner: None} if inner else {"any": "thing"}})
    with client_in_rollout(endpoint) as (run, client):
        for body in ({}, *bodies):
            assert client.post(wire.PATH, json={**LEAST[wire.PATH], **body}).status_code == 200
    assert len({call.prompt_ids.tobytes() for call in run.trace.calls if call.prompt_ids is not None}) == 1


class Spy(ScriptedBackend):
    """Records the sampling settings."""

    def __init__(self) -> None:
        super().__init__(lambda prompt: "one; two")
        self.sampling: list[SamplingParams] = []

    async def generate(self, prompt_ids: Any, params: SamplingParams, **options: Any):
        self.sampling.append(params)
        async for delta in super().generate(prompt_ids, params, **options):
            yield delta


MOST = {chat_completions: "max_completion_tokens", responses: "max_output_tokens"}
STOP = {chat_completions: "stop", completions: "stop", messages: "stop_sequences"}


@pytest.mark.parametrize("wire", DIALECTS, ids=lambda wire: wire.PATH)
def test_settings_reach_the_backend(wire: Any):
    """For an agent that is not trained; a trained one samples with the run's settings."""
    backend = Spy()
    settings: dict[str, Any] = {"temperature": 0, "top_p": 0.5, MOST.get(wire, "max_tokens"): 5}
    if "seed" in wire.FIELDS.supported:
        settings["seed"] = 7
    with serve_backend(backend) as endpoint, client_in_rollout(endpoint, seed=1) as (_, client):
        assert client.post(wire.PATH, json={**LEAST[wire.PATH], **settings}).status_code == 200
        trained = Routing(trained=frozenset({"writer"}), temperature=0.9)
        with client_in_rollout(endpoint, trained, seed=1) as (_, client):
            headers = {"lightning-agent": "writer"}
            for _ in range(2):
                assert client.post(wire.PATH, json={**LEAST[wire.PATH], **settings}, headers=headers).status_code == 200
    theirs, ours, again = backend.sampling
    assert (theirs.temperature, theirs.top_p, theirs.max_tokens) == (0.0, 0.5, 5)
    assert (ours.temperature, ours.top_p, ours.max_tokens) == (0.9, 1.0, 5)
    if "seed" in settings:
        assert theirs.seed == 7
    assert ours.seed not in (None, 7)
    assert ours.seed != again.seed, "the same prompt again is another sample"


@pytest.mark.parametrize("wire", list(STOP), ids=lambda wire: wire.PATH)
def test_stop_strings_end_an_answer(wire: Any):
    with serve_backend(Spy()) as endpoint, client_in_rollout(endpoint) as (_, client):
        answer = client.post(wire.PATH, json={**LEAST[wire.PATH], STOP[wire]: [";"]}).json()
        bad = client.post(wire.PATH, json={**LEAST[wire.PATH], STOP[wire]: [""]})
    (choice,) = answer.get("choices") or answer["content"]
    assert (choice.get("text") or choice["message"]["content"]) == "one"
    assert answer.get("stop_reason") == ("stop_sequence" if wire is messages else None)
    assert (bad.status_code, STOP[wire] in bad.json()["error"]["message"]) == (400, True)


WRONG: list[tuple[Any, dict[str, Any], str]] = [
    (wire, {name: value}, name)
    for wire in DIALECTS
    for name, value in [
        ("temperature", -1),
        ("temperature", 1e-9),
        ("temperature", "hot"),
        ("temperature", True),
        ("top_p", 0),
        ("stream", "yes"),
        ("model", 5),
        (MOST.get(wire, "max_tokens"), 0),
        (MOST.get(wire, "max_tokens"), "9"),
    ]
] + [
    (chat_completions, {"messages": [{"role": "wizard", "content": "hi"}]}, "messages.0.role"),
    (chat_completions, {"messages": [{"role": "user", "content": "hi", "name": 5}]}, "messages.0.name"),
    (chat_completions, {"messages": [{"role": "assistant", "tool_calls": 5}]}, "messages.0.tool_calls"),
    (chat_completions, {"messages": [{"role": "assistant", "tool_calls": [{"function": "f"}]}]}, "messages.0.tool_calls.0"),
    (chat_completions, {"messages": [{"role": "assistant", "function_call": {"name": "f"}}]}, "messages.0.function_call"),
    (chat_completions, {"messages": [5]}, "messages.0"),
    (chat_completions, {"tools": [{"type": "custom", "custom": {"name": 5}}]}, "tools.0"),
    (chat_completions, {"tools": [{"type": "function", "function": {"name": "f", "parameters": 5}}]}, "tools.0.function.parameters"),
    (chat_completions, {"logprobs": 1}, "logprobs"),
    (chat_completions, {"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    (chat_completions, {"stream_options": 5}, "stream_options"),
    (chat_completions, {"seed": 1 << 63}, "seed"),
    (chat_completions, {"stop": [5]}, "stop"),
    (chat_completions, {"parallel_tool_calls": "no", "tools": TOOLS}, "parallel_tool_calls"),
    (responses, {"input": [{"role": "wizard", "content": "hi"}]}, "input.0.role"),
    (responses, {"input": [{"role": "user", "content": 5}]}, "input.0.content"),
    (responses, {"instructions": ["be kind"]}, "instructions"),
    (responses, {"include": "logprobs"}, "include"),
    (responses, {"include": ["message.output_text.logprob"]}, "include"),
    (messages, {"thinking": "enabled"}, "thinking"),
    (messages, {"thinking": {"type": "wizard"}}, "thinking.type"),
    (responses, {"tools": [{"type": "function"}]}, "tools.0"),
    (responses, {"previous_response_id": 5}, "previous_response_id"),
    (messages, {"messages": [{"role": "wizard", "content": "hi"}]}, "messages.0.role"),
    (messages, {"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
    (messages, {"system": 5}, "system"),
    (messages, {"tools": [{"name": "f", "input_schema": 5}]}, "tools.0.input_schema"),
    (completions, {"prompt": None}, "prompt"),
    (completions, {"prompt": []}, "prompt"),
    (completions, {"prompt": ""}, "prompt"),
    (completions, {"prompt": [1, "two"]}, "prompt"),
    (completions, {"prompt": [True]}, "prompt"),
    (completions, {"prompt": [258]}, "prompt"),
    (completions, {"prompt": [-1]}, "prompt"),
    (completions, {"logprobs": 1}, "logprobs"),
    (completions, {"best_of": 2}, "best_of"),
    (chat_completions, {"response_format": {"type": "grammar"}}, "response_format"),
    (chat_completions, {"tool_choice": "required"}, "tool_choice"),
    (chat_completions, {"tool_choice": {"type": "function", "function": {"name": "sub"}}, "tools": TOOLS}, "tool_choice"),
    (chat_completions, {"tool_choice": {"type": "allowed_tools"}, "tools": TOOLS}, "tool_choice"),
    (chat_completions, {"n": 0}, "n"),
    (chat_completions, {"top_logprobs": 3, "logprobs": True}, "top_logprobs"),
    (chat_completions, {"tools": ["add"]}, "tools"),
    (responses, {"text": "json"}, "text"),
    (responses, {"input": [None]}, "input.0"),
    (messages, {"output_config": "json"}, "output_config"),
    (responses, {"tools": [{"type": "computer_use_preview"}]}, "tools.0.type"),
    (responses, {"tool_choice": {"type": "web_search"}}, "tool_choice"),
    (responses, {"tool_choice": "required"}, "tool_choice"),
    (responses, {"text": {"format": {"type": "grammar"}}}, "text.format"),
    (responses, {"input": [{"type": "item_reference", "id": "msg_1"}]}, "input.0"),
    (responses, {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input.0.content.0"),
    (responses, {"input": 3}, "input"),
    (responses, {"input": []}, "input"),
    (messages, {"max_tokens": None}, "max_tokens"),
    (messages, {"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools.0.type"),
    (messages, {"tool_choice": {"type": "any"}}, "tool_choice"),
    (messages, {"tool_choice": {"type": "grammar"}}, "tool_choice"),
    (messages, {"output_config": {"format": {"type": "grammar"}}}, "output_config.format"),
    (messages, {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages.0.content.0"),
    (messages, {"messages": [*HI, {"role": "assistant", "content": "The answer is ("}]}, "ends with an assistant message"),
    (messages, {"messages": []}, "messages"),
    (messages, {"tools": [{"name": "add", "input_schema": {"type": "object"}}] * 2}, "two tools with the name 'add'"),
]  # fmt: skip


@pytest.mark.parametrize(("wire", "wrong", "name"), WRONG)
def test_a_wrong_value_is_refused_with_its_name(
    endpoint: PolicyEndpoint, wire: Dialect, wrong: dict[str, Any], name: str
):
    with client_in_rollout(endpoint) as (run, client):
        answer = client.post(wire.PATH, json={**LEAST[wire.PATH], **wrong})
    assert answer.status_code == 400
    assert name in answer.json()["error"]["message"]
    if wire is messages:
        assert answer.json()["error"]["type"] == "invalid_request_error"
    else:
        assert answer.json()["error"]["param"] == name
    assert all(failure.startswith("HostedToolError: ") for failure in run.infrastructure)


@pytest.mark.parametrize("stream", [False, True])
def test_the_bytes_of_logprobs_add_up_to_the_text_inside_characters_too(stream: bool) -> None:
    with serve(lambda p: "hällo ✓") as endpoint, client_in_scope(endpoint) as (_, client):
        made: Any = client.chat.completions.create(model="m", messages=HI, logprobs=True, stream=stream)
        parts = [part.choices[0].logprobs for part in made] if stream else [made.choices[0].logprobs]
        found: Any = client.responses.create(model="m", input="hi", include=["message.output_text.logprobs"])
    for tokens in ([t for part in parts if part for t in part.content], found.output[0].content[0].logprobs):
        assert bytes(byte for token in tokens for byte in token.bytes).decode() == "hällo ✓"
        assert [token.token for token in tokens[:4]] == ["h", "\ufffd", "\ufffd", "l"]
