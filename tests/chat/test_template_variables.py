"""Variables of the chat template: configured, per policy, and per request, which wins."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from lightning_core import load_config, rollout
from lightning_core.capture import ActiveRollout
from lightning_core.chat.chat import Chat, Memory
from lightning_core.config.resolve import policy_settings
from lightning_core.endpoint.server import PolicyEndpoint, Routing
from lightning_core.errors import ConfigError
from tests.chat.chat_families import FAMILIES, Family, FamilyBackend, encode, make_tokenizer

CHATML = next(family for family in FAMILIES if family.name == "chatml")
SOURCE = (
    "{% if depth is defined %}depth {{ depth }}\n{% endif %}{% if reasoning_effort is defined %}effort {{ reasoning_effort }}\n{% endif %}"
    "{% if thinking is defined %}thinking {{ thinking }}\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FAMILY = Family(name="variables", eos=CHATML.eos, specials=CHATML.specials, stops=CHATML.stops, source=SOURCE)
USER: Any = {"role": "user", "content": "hi"}


def prompt(chat: Chat, **variables: Any) -> str:
    return chat.render([USER], None, Memory(), variables=variables).text


def test_a_request_replaces_configured_variables():
    chat = Chat(make_tokenizer(FAMILY), template_kwargs={"depth": 1})
    assert prompt(chat).startswith("depth 1\n<|im_start|>")
    assert prompt(chat, depth=2).startswith("depth 2\n<|im_start|>")
    assert prompt(chat, reasoning_effort="low").startswith("depth 1\neffort low\n")
    assert prompt(chat, height=2) == prompt(chat)


def test_a_variable_decides_whether_the_prompt_begins_the_reasoning():
    qwen = next(family for family in FAMILIES if family.name == "qwen3")
    thinks, answers = (Chat(make_tokenizer(qwen), template_kwargs={"enable_thinking": on}) for on in (True, False))
    assert prompt(answers) == prompt(thinks, enable_thinking=False) == prompt(thinks) + "<think>\n\n</think>\n\n"


def test_other_variables_in_a_later_turn_encode_the_conversation_again():
    chat, memory = Chat(make_tokenizer(FAMILY)), Memory()
    first = chat.render([USER], None, memory, variables={"depth": 1})
    output = encode(FAMILY, "answer<|im_end|>")
    response = chat.parse(output, tools=False)
    chat.remember(first, output, response, memory)
    history = [USER, response, USER]
    assert chat.render(history, None, memory, variables={"depth": 1}).context == "clean"
    assert chat.render(history, None, memory, variables={"depth": 2}).context == "forked"


def test_special_tokens_in_a_variable_are_plain_text():
    chat, tokenizer = Chat(make_tokenizer(FAMILY)), make_tokenizer(FAMILY)
    ids = chat.render([USER], None, Memory(), variables={"depth": "<|im_end|>"}).ids
    assert list(ids).count(tokenizer.convert_tokens_to_ids("<|im_end|>")) == 1
    assert tokenizer.decode(list(ids)).startswith("depth <|im_end|>\n")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("enable_thinkin", "chat_template_kwargs.enable_thinkin is not a variable of the model's chat template"),
        ("tools", "chat_template_kwargs.tools is set by Lightning; remove it"),
    ],
)
def test_a_configured_variable_without_effect_is_an_error(name: str, message: str):
    with pytest.raises(ConfigError, match=message):
        Chat(make_tokenizer(FAMILY), template_kwargs={name: True})


def test_a_policy_has_its_own_variables_or_the_common_ones():
    config = load_config({
        "policy": {"model": "m", "chat_template_kwargs": {"enable_thinking": False}},
        "policies": {"a": {"agents": ["x"]}, "b": {"agents": ["y"], "chat_template_kwargs": {}}},
    })  # fmt: skip
    a, b = policy_settings(config).values()
    assert (a.chat_template_kwargs, b.chat_template_kwargs) == ({"enable_thinking": False}, {})


@pytest.fixture
def client() -> Iterator[tuple[ActiveRollout, httpx.Client]]:
    """A client of an endpoint whose template has the variables ``depth`` (configured) and ``reasoning_effort``."""
    backend = FamilyBackend(FAMILY, lambda prompt: f"{prompt.partition('<')[0]}<|im_end|>")
    chat = Chat(make_tokenizer(FAMILY), template_kwargs={"depth": 1})
    with PolicyEndpoint(backend, chat) as endpoint, rollout({"id": "t"}) as run:
        key = endpoint.new_key()
        endpoint.open(key, run.address, Routing())
        headers = {"authorization": f"Bearer {key}"}
        with httpx.Client(base_url=endpoint.url, headers=headers, timeout=30) as client:
            yield run, client
        endpoint.close(key)


GEMINI = "/models/policy:generateContent"
CONTENTS = {"contents": [{"role": "user", "parts": [{"text": "hi"}]}]}
COMPLETION = {"model": "policy", "messages": [USER]}


@pytest.mark.parametrize(
    ("path", "body", "seen"),
    [
        ("/chat/completions", COMPLETION, "depth 1\n"),
        ("/chat/completions", {**COMPLETION, "reasoning_effort": "low"}, "depth 1\neffort low\n"),
        ("/chat/completions", {**COMPLETION, "chat_template_kwargs": {"depth": 2}}, "depth 2\n"),
        (
            "/chat/completions",
            {**COMPLETION, "reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}},
            "depth 1\neffort high\n",
        ),
        ("/responses", {"model": "policy", "input": "hi", "reasoning": {"effort": "low"}}, "depth 1\neffort low\n"),
        ("/messages", {**COMPLETION, "max_tokens": 99, "output_config": {"effort": "low"}}, "depth 1\neffort low\n"),
        ("/messages", {**COMPLETION, "max_tokens": 99, "thinking": {"type": "disabled"}}, "depth 1\nthinking False\n"),
        (
            "/messages",
            {**COMPLETION, "max_tokens": 99, "thinking": {"type": "enabled", "budget_tokens": 50}},
            "depth 1\nthinking True\n",
        ),
        ("/messages", {**COMPLETION, "max_tokens": 99, "thinking": {"type": "adaptive"}}, "depth 1\n"),
        ("/chat/completions", {**COMPLETION, "thinking": {"type": "disabled"}}, "depth 1\nthinking False\n"),
        ("/chat/completions", {**COMPLETION, "enable_thinking": True}, "depth 1\nthinking True\n"),
        (
            "/responses",
            {"model": "policy", "input": "hi", "reasoning": {"effort": "none"}},
            "depth 1\neffort none\nthinking False\n",
        ),
        (
            GEMINI,
            {**CONTENTS, "generationConfig": {"thinkingConfig": {"thinkingBudget": 0}}},
            "depth 1\nthinking False\n",
        ),
        (GEMINI, {**CONTENTS, "generationConfig": {"thinkingConfig": {"thinkingBudget": -1}}}, "depth 1\n"),
        (
            GEMINI,
            {**CONTENTS, "generationConfig": {"thinkingConfig": {"thinkingLevel": "LOW"}}},
            "depth 1\neffort low\n",
        ),
    ],
)
def test_variables_of_a_request_are_in_its_recorded_prompt(
    client: tuple[ActiveRollout, httpx.Client], path: str, body: dict[str, Any], seen: str
):
    run, http = client
    assert http.post(path, json=body).status_code == 200
    (call,) = run.trace.calls
    assert call.prompt_ids is not None
    text = make_tokenizer(FAMILY).decode(call.prompt_ids.tolist())
    assert text == f"{seen}<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert call.dropped == ()


def test_a_variable_that_the_template_does_not_have_is_noted(client: tuple[ActiveRollout, httpx.Client]):
    run, http = client
    body = {**COMPLETION, "chat_template_kwargs": {"enable_thinking": False, "depth": 2}}
    assert http.post("/chat/completions", json=body).status_code == 200
    assert run.trace.calls[0].dropped == (
        "chat_template_kwargs.enable_thinking: not a variable of the model's chat template",
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (3, "chat_template_kwargs is 3; expected an object"),
        ({"tools": []}, "chat_template_kwargs.tools cannot be set by a request"),
    ],
)
def test_variables_that_cannot_be_set_are_refused(client: tuple[ActiveRollout, httpx.Client], given: Any, message: str):
    answer = client[1].post("/chat/completions", json={**COMPLETION, "chat_template_kwargs": given})
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, message)


@pytest.mark.parametrize("thinking", [{"type": "much"}, "enabled", {"type": 1}])
def test_thinking_of_another_type_is_refused_by_name(client: tuple[ActiveRollout, httpx.Client], thinking: Any):
    answer = client[1].post("/chat/completions", json={**COMPLETION, "thinking": thinking})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] in ("thinking", "thinking.type")
