"""OpenAI's older completions: the openai client and LangChain's ``OpenAI`` over real HTTP, against a scripted backend."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from langchain_openai import OpenAI as LangChainOpenAI

from lightning_core import reward, trace_to_transitions, transitions_to_rows
from lightning_core.capture import scope
from lightning_core.testing import Playground
from tests.endpoint.serving import TRAINED, client_in_scope, serve, serve_upstream


def echo(prompt: str) -> str:
    return f"<{prompt}>"


def test_a_prompt_is_its_tokens_and_nothing_else():
    with serve(lambda p: "töld") as endpoint, client_in_scope(endpoint) as (run, client):
        answer = client.completions.create(model="gpt-x", prompt="once <|im_start|>", logprobs=0)
        reward(0.5, call=answer.id)
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason) == ("töld", "stop")
    (call,) = run.trace.calls
    assert (call.agent, call.model, call.policy_version, call.temperature) == ("writer", "policy", 0, 0.7)
    assert call.prompt_ids is not None
    assert call.output_ids is not None
    assert call.prompt_ids.tolist() == [*b"once ", 256], "no template, and special tokens are encoded as such"
    assert call.output_ids.tolist() == [*"töld".encode(), 257]
    assert call.messages == ({"role": "user", "content": "once <|im_start|>"},)
    assert call.response == {"role": "assistant", "content": "töld"}
    assert call.context == "new"
    assert choice.logprobs is not None
    assert choice.logprobs.token_logprobs == [-0.5] * 6
    assert choice.logprobs.tokens == ["t", "\ufffd", "\ufffd", "l", "d", ""]
    assert choice.logprobs.text_offset == [0, 1, 2, 2, 3, 4]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (6, 6)
    assert run.trace.rewards[0].call == call.id
    (row,) = transitions_to_rows(trace_to_transitions(run.trace, agents={"writer"}))
    assert int(row.mask.sum()) == 6


def test_token_ids_are_taken_as_they_are():
    with serve(echo) as endpoint, client_in_scope(endpoint) as (run, client):
        answer = client.completions.create(model="m", prompt=[104, 105, 256], extra_body={"return_token_ids": True})
    raw: Any = answer.choices[0]
    (call,) = run.trace.calls
    assert call.prompt_ids is not None
    assert call.output_ids is not None
    assert call.prompt_ids.tolist() == raw.prompt_token_ids == [104, 105, 256]
    assert call.output_ids.tolist() == raw.token_ids
    assert call.messages == ({"role": "user", "content": json.dumps([104, 105, 256])},)


def test_prompts_times_n_are_choices_in_order_and_calls_of_their_own():
    with serve(echo) as endpoint, client_in_scope(endpoint, seed=5) as (run, client):
        answer = client.completions.create(model="m", prompt=["a", "b", "c"], n=2)
        ids = client.completions.create(model="m", prompt=[[100], [101]])
    assert [(c.index, c.text) for c in answer.choices] == list(enumerate(["<a>", "<a>", "<b>", "<b>", "<c>", "<c>"]))
    assert [c.text for c in ids.choices] == ["<d>", "<e>"]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 6 * 4)
    assert len(trace_to_transitions(run.trace, agents={"writer"})) == 8
    assert [call.messages[0]["content"] for call in run.trace.calls[:6]] == ["a", "a", "b", "b", "c", "c"]


@pytest.mark.parametrize("text", ["hällo wörld ✓", "", " spaced \n", "<tool_call>{}</tool_call>"])
def test_a_stream_adds_up_to_the_answer(text: str):
    options: dict[str, Any] = {"model": "m", "prompt": ["hi", "ho"], "logprobs": 0, "stop": "\n"}
    with serve(lambda p: text) as endpoint, client_in_scope(endpoint) as (run, client):
        answer = client.completions.create(**options)
        chunks = list(client.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    *parts, last = chunks
    assert last.choices == []
    assert last.usage == answer.usage
    assert all(part.usage is None and "usage" in part.model_fields_set for part in parts)
    for whole in answer.choices:
        mine = [part.choices[0] for part in parts if part.choices[0].index == whole.index]
        assert "".join(part.text for part in mine) == whole.text == text.partition("\n")[0]
        assert [part.finish_reason for part in mine if part.finish_reason] == [whole.finish_reason] == ["stop"]
        with_logprobs = [part.logprobs for part in mine if part.logprobs is not None]
        assert whole.logprobs is not None
        for name in ("tokens", "token_logprobs", "text_offset"):
            assert [v for part in with_logprobs for v in getattr(part, name)][
                : len(whole.logprobs.tokens or ())
            ] == getattr(whole.logprobs, name)
    assert len(run.trace.calls) == 4


def test_a_prompt_too_long_is_refused_by_its_name():
    with (
        serve(max_context=5) as endpoint,
        client_in_scope(endpoint) as (run, client),
        pytest.raises(openai.BadRequestError, match=r"6 tokens; expected fewer than the context length of 5") as caught,
    ):
        client.completions.create(model="m", prompt=["ok", "x" * 6])
    assert caught.value.param == "prompt"
    assert [call.error is not None for call in run.trace.calls] == [True, True]
    assert trace_to_transitions(run.trace, agents={"writer"}) == []


@pytest.mark.parametrize("stream", [False, True])
def test_an_untrained_agent_s_call_passes_through_unchanged_and_is_recorded(stream: bool):
    with (
        serve_upstream(echo) as (far_run, upstream),
        serve(upstream=upstream) as near,
        client_in_scope(near, agent="critic") as (run, client),
    ):
        answer: Any = client.completions.create(model="davinci", prompt=["a", "b"], n=2, stream=stream)
        if stream:
            list(answer)
        with pytest.raises(openai.BadRequestError, match="suffix"):
            list(client.completions.create(model="davinci", prompt="a", suffix="z", stream=stream))
    *calls, refused = run.trace.calls
    assert [(c.agent, c.prompt_ids, (c.response or {})["content"]) for c in calls] == [
        ("critic", None, text) for text in ("<a>", "<a>", "<b>", "<b>")
    ]
    assert refused.error is not None
    assert [call.refused is None for call in far_run.trace.calls] == [True] * 4 + [False]


@pytest.mark.parametrize("stream", [False, True])
def test_langchain_s_plain_model(playground: Playground, stream: bool):
    model = LangChainOpenAI(model="gpt-3.5-turbo-instruct", api_key="sk-own", max_retries=0)  # pyright: ignore
    with playground.rollout(train=["writer"]) as run, scope("writer"):
        run_model = model.bind(model="policy")
        text = "".join(run_model.stream("hi")) if stream else run_model.invoke("hi")
    assert text == "answer to hi"
    (call,) = run.trace.calls
    assert call.agent == "writer"
    assert call.prompt_ids is not None
    assert call.prompt_ids.tolist() == [*b"hi"]


def test_a_chat_never_continues_a_plain_prompt():
    with serve(echo) as endpoint, client_in_scope(endpoint, TRAINED) as (run, client):
        client.completions.create(model="m", prompt="hi")
        client.chat.completions.create(
            model="m", messages=[{"role": "assistant", "content": "<hi>"}, {"role": "user", "content": "so?"}]
        )
    assert [call.context for call in run.trace.calls] == ["new", "new"]
