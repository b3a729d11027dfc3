"""Reasoning is separated in all three wire formats; streaming sends neither reasoning nor partial tool calls."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from anthropic import Anthropic

from lightning_core.backends.backend import SamplingParams
from lightning_core.capture.address import Address
from lightning_core.chat.chat import Memory
from lightning_core.chat.templates.reasoning import THINK
from lightning_core.dialects.exchange import ChatRequest
from lightning_core.dialects.requirements import OutputRequirements
from lightning_core.endpoint.agents.routing import Routing
from lightning_core.endpoint.constraints import constrain
from lightning_core.endpoint.sessions import Session
from lightning_core.endpoint.streaming import HeldText, cut
from tests.chat.chat_families import FAMILIES, Family, FamilyBackend, encode, make_chat
from tests.chat.test_templates import BY_NAME, CALLS, TOOLS, USER, every_family, serve, trained_tokens

THOUGHT = "<think>\nlet me see\n</think>\n\n"
CALL = CALLS["hermes"][0]


@pytest.mark.parametrize(
    ("text", "opened", "reasoning", "answer"),
    [
        ("<think>\na\n</think>\n\nb", False, "a", "b"),
        ("a\n</think>\n\nb", True, "a", "b"),
        ("<think>\na</think>b", True, "a", "b"),
        ("<think>\n\n</think>\n\nb", False, "", "b"),
        ("a </think> b", False, "", "a </think> b"),
        ("b <think>a</think>", False, "", "b <think>a</think>"),
        ("<think>a", False, "a", None),
        ("a", True, "a", None),
        ("<thi", False, "", "<thi"),
    ],
)
def test_reasoning_is_split_from_the_answer(text: str, opened: bool, reasoning: str, answer: str | None):
    assert THINK.split(text, opened=opened) == (reasoning, answer)


def script(prompt: str) -> str:
    return THOUGHT + ("the answer" if "forty" in prompt else CALL) + "<|im_end|>"


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_items_of_the_responses_api(stream: bool):
    tools: list[Any] = [{"type": "function", **TOOLS[0]["function"]}]
    with serve(BY_NAME["qwen3"], script) as (run, client, _):

        def ask(items: list[Any]) -> Any:
            if not stream:
                return client.responses.create(model="m", input=items, tools=tools)
            streamed = ""
            with client.responses.stream(model="m", input=items, tools=tools) as events:
                for event in events:
                    streamed += event.delta if event.type == "response.output_text.delta" else ""
                final = events.get_final_response()
            assert streamed == final.output_text
            return final

        first = ask([USER])
        reasoning, call = first.output
        assert (reasoning.type, reasoning.content[0].text, call.type) == ("reasoning", "let me see", "function_call")
        assert first.usage.output_tokens_details.reasoning_tokens == len(
            encode(BY_NAME["qwen3"], THOUGHT.rstrip(), letter_by_letter=True)
        )
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "forty"}
        items = [item.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for item in first.output]
        second = ask([USER, *items, result])
        assert second.output_text == "the answer"
        assert [item.type for item in second.output] == ["reasoning", "message"]
    assert [c.context for c in run.trace.calls] == ["new", "clean"]
    trained, sampled = trained_tokens(run)
    assert trained == sampled


@pytest.mark.parametrize("stream", [False, True])
def test_thinking_blocks_of_the_messages_api(stream: bool):
    function = TOOLS[0]["function"]
    tools: list[Any] = [{"name": "add", "description": "Adds.", "input_schema": function["parameters"]}]
    with serve(BY_NAME["qwen3"], script) as (run, client, key):
        url, headers = str(client.base_url).removesuffix("/v1/"), {h: str(v) for h, v in client.default_headers.items()}
        sent = {h: headers[h] for h in ("traceparent", "lightning-agent")}
        with Anthropic(base_url=url, api_key=key, max_retries=0, default_headers=sent) as anthropic:

            def ask(messages: list[Any]) -> Any:
                if not stream:
                    return anthropic.messages.create(model="m", max_tokens=500, messages=messages, tools=tools)
                with anthropic.messages.stream(model="m", max_tokens=500, messages=messages, tools=tools) as events:
                    streamed = "".join(events.text_stream)
                    final = events.get_final_message()
                assert streamed == "".join(b.text for b in final.content if b.type == "text")
                return final

            first = ask([USER])
            thinking, call = first.content
            assert (thinking.type, thinking.thinking) == ("thinking", "let me see")
            assert (call.type, call.input) == ("tool_use", {"a": 1})
            blocks = [b.model_dump(exclude_none=True) for b in first.content]
            result = {"type": "tool_result", "tool_use_id": call.id, "content": "forty"}
            second = ask([USER, {"role": "assistant", "content": blocks}, {"role": "user", "content": [result]}])
            assert [(b.type, getattr(b, "text", None)) for b in second.content] == [
                ("thinking", None),
                ("text", "the answer"),
            ]
    assert [c.context for c in run.trace.calls] == ["new", "clean"]


def test_reasoning_that_was_cut_off_is_not_an_answer():
    with serve(BY_NAME["qwen3"], script) as (run, client, _):
        create = client.chat.completions.create
        choice = create(model="m", messages=[USER], max_tokens=7).choices[0]
        chunks = list(create(model="m", messages=[USER], max_tokens=7, stream=True))
    assert choice.finish_reason == "length"
    assert choice.message.content == ""
    assert (choice.message.model_extra or {})["reasoning_content"] == "let m"
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == ""
    assert run.trace.calls[0].output_ids is not None
    assert len(run.trace.calls[0].output_ids) == 7


def test_a_stop_string_ends_reasoning_too():
    with serve(BY_NAME["qwen3"], script) as (_, client, _):
        choice = client.chat.completions.create(model="m", messages=[USER], stop="me").choices[0]
    assert choice.message.content == ""
    assert (choice.message.model_extra or {})["reasoning_content"] == "let"


def held(
    family: Family, text: str, *, stops: tuple[str, ...] = (), thinking: bool = False
) -> tuple[list[str], dict[str, Any]]:
    """The text of a response as it is streamed, token by token, the rest at the end, and the final message."""
    chat = make_chat(family)
    ids = encode(family, text, letter_by_letter=True)
    state = HeldText(
        chat.text,
        lambda text: chat.split(text, thinking=thinking, final=False),
        stops,
        tools=chat.tool_format,
    )
    parts = [state.more(ids[: n + 1])[1] for n in range(len(ids))]
    message = chat.read(cut(chat.text(ids), stops)[0], tools=True, thinking=thinking)
    return [*parts, state.rest(message)[1]], message


@every_family
def test_a_call_in_the_making_is_held_back(family: Family):
    call = CALLS.get(family.name, CALLS[family.format])[1]
    if family.format == "llama":
        parts, message = held(family, call)
        assert (parts, len(message["tool_calls"])) == ([""] * len(parts), 2)
        call = f"<|python_tag|>{call}"
    parts, message = held(family, f"a < b [so] {{x}}, wörld: \n{call}")
    assert len(message["tool_calls"]) == 2
    assert "".join(parts) == message["content"] == "a < b [so] {x}, wörld:"
    assert parts[-1] == "", "text is streamed at once"


@every_family
def test_text_that_only_looks_like_a_call_is_sent_at_the_end(family: Family):
    opening = make_chat(family).tool_format.opens[0]
    for text in (
        f"so {opening[:-1]}",
        f"so {opening[:-1]} no",
        f"so {opening} no",
        '{"x": 1}',
        f"{opening[:3]}{opening[:3]}",
        "so ✓",
    ):
        parts, message = held(family, text)
        assert "".join(parts) == message["content"] == text


@pytest.mark.parametrize("family", [f for f in FAMILIES if f.reasons], ids=lambda family: family.name)
@pytest.mark.parametrize("thinking", [False, True])
def test_reasoning_is_not_streamed_as_text(family: Family, thinking: bool):
    text = THOUGHT.removeprefix("<think>") if thinking else THOUGHT
    parts, message = held(family, f"{text}the answer; more", stops=(";",), thinking=thinking)
    assert "".join(parts) == message["content"] == "the answer"
    assert message["reasoning_content"] == "let me see"


def test_generation_config_names_stop_tokens(tmp_path: Any):
    pytest.importorskip("torch")
    from transformers import GenerationConfig

    from lightning_core.model.source import eos_token_ids, load_model
    from tests.tiny_model import make_tiny_model

    folder = make_tiny_model(tmp_path)
    import torch

    for named, expected in ((5, {5}), ([5, 6], {5, 6}), (None, set[int]())):
        GenerationConfig(eos_token_id=named).save_pretrained(folder)
        if named is None:
            config = json.loads((folder / "config.json").read_text())
            (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": None}))
        assert eos_token_ids(load_model(folder, torch.float32)) == expected


def test_a_constraint_does_not_render_the_prompt_again() -> None:
    own = FAMILIES[0]
    chat, messages = make_chat(own), [{"role": "user", "content": "x"}]
    prompt = chat.render(messages, None, Memory())
    required = OutputRequirements(schema={"type": "string"})
    request = ChatRequest(model="policy", messages=messages, requirements=required, body={})
    session = Session(root=Address(rollout="1" * 32, span="2" * 16), routing=Routing(), seed=None)

    def write() -> str:
        raise AssertionError

    backend, params = FamilyBackend(own, str), SamplingParams(max_tokens=9)
    constrained = constrain(params, backend, session, request, chat, replace(prompt, write=write))
    assert constrained.json_schema == '{"type": "string"}'
