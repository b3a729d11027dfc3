"""Tokens are encoded once with any chat template: conversations, tool calls, reasoning and stop tokens of each family."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from openai import OpenAI

from lightning_core import rollout, trace_to_transitions, transitions_to_rows
from lightning_core.capture import ActiveRollout, current_address, scope
from lightning_core.chat.chat import Chat, Memory, RenderedPrompt
from lightning_core.endpoint.server import PolicyEndpoint, Routing
from tests.chat.chat_families import FAMILIES, Family, FamilyBackend, encode, make_chat, make_tokenizer

BY_NAME = {family.name: family for family in FAMILIES}
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds.",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer", "description": "A number."}}},
        },
    }
]
SYSTEM = {"role": "system", "content": "Be brief."}
USER: Any = {"role": "user", "content": "hi"}
REWRITTEN = "the template renders earlier turns differently than it did"
UNREASONED = "the template leaves out earlier reasoning"

# Model output as its makers document it: one call, and two.
DS = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{}\n```<｜tool▁call▁end｜>"
XML = "<tool_call>\n<function=add>\n<parameter=a>\n%s\n</parameter>\n</function>\n</tool_call>"
ONE, TWO = '{"a": 1}', '{"a": 2}'
CALLS: dict[str, tuple[str, str]] = {
    "hermes": (
        f'<tool_call>\n{{"name": "add", "arguments": {ONE}}}\n</tool_call>',
        f'<tool_call>\n{{"name": "add", "arguments": {ONE}}}\n</tool_call>\n'
        f'<tool_call>\n{{"name": "add", "arguments": {TWO}}}\n</tool_call>',
    ),
    "llama": (
        f'{{"name": "add", "parameters": {ONE}}}',
        f'{{"name": "add", "parameters": {ONE}}}; {{"name": "add", "parameters": {TWO}}}',
    ),
    "mistral": (
        f'[TOOL_CALLS][{{"name": "add", "arguments": {ONE}}}]',
        f'[TOOL_CALLS][{{"name": "add", "arguments": {ONE}}}, {{"name": "add", "arguments": {TWO}}}]',
    ),
    "mistral_v13": (f"[TOOL_CALLS]add[ARGS]{ONE}", f"[TOOL_CALLS]add[ARGS]{ONE}[TOOL_CALLS]add[ARGS]{TWO}"),
    "phi": (
        f'<|tool_call|>[{{"name": "add", "arguments": {ONE}}}]<|/tool_call|>',
        f'<|tool_call|>[{{"name": "add", "arguments": {ONE}}}, {{"name": "add", "arguments": {TWO}}}]<|/tool_call|>',
    ),
    "qwen_xml": (XML % 1, f"{XML % 1}\n{XML % 2}"),
    "deepseek": (
        "<｜tool▁calls▁begin｜>" + DS.replace("{}", ONE) + "<｜tool▁calls▁end｜>",
        "<｜tool▁calls▁begin｜>" + DS.replace("{}", ONE) + "\n" + DS.replace("{}", TWO) + "<｜tool▁calls▁end｜>",
    ),
}  # fmt: skip

every_family = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)


def sample(
    family: Family, memory: Memory, prompt: RenderedPrompt, text: str, *, stop: str | None = None
) -> dict[str, Any]:
    """The message for a response ``text`` to ``prompt``, in tokens that the tokenizer would not have chosen."""
    chat = make_chat(family)
    output = encode(family, text + (family.stops[-1] if stop is None else stop), letter_by_letter=True)
    response = chat.parse(output, tools=True, thinking=prompt.thinking)
    chat.remember(prompt, output, response, memory)
    return response


def recorded(memory: Memory) -> list[tuple[int, ...]]:
    places = [*memory._roots.values()]
    for place in places:
        places += [below for under in (place.below or {}).values() for below in under]
    turns = sorted((place.turn for place in places if place.turn), key=lambda turn: turn.order)
    return [tuple(turn.kept.read().tolist()) for turn in turns]


def thinking(family: Family, thought: str, answer: str) -> str:
    return ("" if family.opens_thought else "<think>\n") + f"{thought}\n</think>\n\n{answer}"


@every_family
@pytest.mark.parametrize("system", [False, True])
def test_three_turns_keep_the_sampled_ids(family: Family, system: bool):
    chat, memory = make_chat(family), Memory()
    messages: list[Any] = [SYSTEM, USER] if system else [USER]
    prompt = chat.render(messages, None, memory)
    text = prompt.text
    if family.system or not system:
        text = make_tokenizer(family).apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert list(prompt.ids) == encode(family, text)
    assert prompt.context == "new"
    assert not system or "Be brief." in text
    # A model that always reasons; its template drops the reasoning.
    forgets = family.opens_thought
    for turn in (1, 2):
        answer = f"answer {turn}"
        messages.append(sample(family, memory, prompt, thinking(family, "hm", answer) if forgets else answer))
        assert messages[-1]["content"] == answer
        messages.append({"role": "user", "content": f"question {turn}"})
        prompt = chat.render(messages, None, memory)
        assert (prompt.context, prompt.reason) == (("forked", UNREASONED) if forgets else ("clean", None))
        before = recorded(memory)[-1]
        if prompt.context == "clean":
            assert prompt.ids[: len(before)] == before
            # Some templates write a space before the answer, which this model did not sample.
            assert "".join(make_tokenizer(family).decode(list(prompt.ids)).split()) == "".join(prompt.text.split())
        else:
            assert list(prompt.ids) == encode(family, prompt.text)
        assert prompt.text.count("question") == turn


@every_family
def test_each_stop_token_ends_a_response_and_is_part_of_it_once(family: Family):
    chat = make_chat(family)
    tokenizer = make_tokenizer(family)
    stops = (*family.stops, *family.more_stops)
    assert chat.stop_token_ids == set(tokenizer.convert_tokens_to_ids(list(stops)))
    for stop in stops:
        memory = Memory()
        prompt = chat.render([USER], None, memory)
        text = thinking(family, "hm", "answer") if family.opens_thought else "answer"
        response = sample(family, memory, prompt, text, stop=stop)
        assert response["content"] == "answer"
        second = chat.render([USER, response, USER], None, memory)
        if family.opens_thought:
            assert second.context == "forked"
            continue
        assert second.context == "clean"
        sampled = recorded(memory)[0]
        assert second.ids[: len(sampled)] == sampled
        assert sampled[-1] == tokenizer.convert_tokens_to_ids(stop)
        assert second.ids[len(sampled)] not in chat.stop_token_ids, (
            "the template's own stop token is not written after it"
        )
    memory = Memory()
    prompt = chat.render([USER], None, memory)
    response = sample(family, memory, prompt, "answ", stop="")
    if not family.opens_thought:
        sampled = recorded(memory)[0]
        second = chat.render([USER, response, USER], None, memory)
        assert second.ids[: len(sampled)] == sampled
        assert second.ids[len(sampled)] in chat.stop_token_ids, "a response that was cut off is ended by the template"


@contextmanager
def serve(family: Family, script: Callable[[str], str]) -> Iterator[tuple[ActiveRollout, OpenAI, str]]:
    """A rollout of the agent ``writer``, whose model is of the family and scripted; a client for it and its key."""
    routing = Routing(trained=frozenset({"writer"}))
    with PolicyEndpoint(FamilyBackend(family, script), make_chat(family)) as endpoint, rollout({"id": "t"}) as run:
        key = endpoint.new_key()
        endpoint.open(key, run.address, routing)
        with scope("writer"):
            address = current_address()
            assert address is not None
            headers = address.to_headers()
            with OpenAI(base_url=endpoint.url, api_key=key, max_retries=0, default_headers=headers) as client:
                yield run, client, key
        endpoint.close(key)


def trained_tokens(run: ActiveRollout) -> tuple[int, int]:
    """Number of trained tokens in a rollout's rows, and number of sampled ones."""
    rows = transitions_to_rows(trace_to_transitions(run.trace, agents={"writer"}))
    return sum(int(r.mask.sum()) for r in rows), sum(
        len(c.output_ids) for c in run.trace.calls if c.output_ids is not None
    )


@every_family
def test_reserialized_arguments_realign(family: Family):
    chat, memory = make_chat(family), Memory()
    prompt = chat.render([USER], TOOLS, memory)
    text = CALLS.get(family.name, CALLS[family.format])[0]
    response = sample(family, memory, prompt, thinking(family, "hm", text) if family.opens_thought else text)
    call = response["tool_calls"][0]
    other = {**call, "id": "call_of_another_kind", "function": {**call["function"], "arguments": '{\n "a":1 }'}}
    result = {"role": "tool", "tool_call_id": other["id"], "content": "forty"}
    second = chat.render([USER, {"role": "assistant", "name": "clerk", "tool_calls": [other]}, result], TOOLS, memory)
    assert second.context == ("forked" if family.opens_thought else "clean")
    third = chat.render([USER, {"role": "assistant", "content": " ", "tool_calls": [other]}, result], TOOLS, memory)
    assert third.context == ("forked" if family.opens_thought else "realigned")


def test_tools_that_a_template_moves_to_the_last_question_fork():
    family = BY_NAME["mistral_v3"]
    chat, memory = make_chat(family), Memory()
    response = sample(family, memory, chat.render([USER], TOOLS, memory), "answer")
    second = chat.render([USER, response, {"role": "user", "content": "more"}], TOOLS, memory)
    assert (second.context, second.reason) == ("forked", REWRITTEN)
    assert second.text.count("[AVAILABLE_TOOLS]") == 1


@pytest.mark.parametrize("family", [BY_NAME["gemma3"], BY_NAME["chatml"]], ids=lambda family: family.name)
def test_a_template_without_a_readable_format_gets_it_spelled_out(family: Family):
    chat = Chat(make_tokenizer(family))
    prompt = chat.render([SYSTEM, USER], TOOLS, Memory())
    assert '"name": "add"' in prompt.text
    assert 'answer with <tool_call>{"name": <name>, "arguments": <object>}</tool_call>' in prompt.text
    assert "<function=" not in prompt.text
    text = f"so {CALLS['hermes'][0]}"
    history = [
        USER,
        chat.parse(encode(family, text), tools=True),
        {"role": "tool", "tool_call_id": "c", "content": "forty"},
    ]
    later = chat.render(history, TOOLS, Memory()).text
    assert '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>' in later
    assert "<tool_response>\nforty\n</tool_response>" in later


KEPT = {
    # handling of reasoning: in a loop of tool calls, with the next question, and how much of it is in that prompt
    "qwen3": ("clean", "forked", 0),
    "smollm3": ("clean", "clean", 2),
    "deepseek_r1": ("forked", "clean", 0),
}


@pytest.mark.parametrize("name", KEPT)
def test_reasoning_is_separated_and_kept_as_long_as_the_template_keeps_it(name: str):
    family = BY_NAME[name]
    call = CALLS[family.format][0]

    def script(prompt: str) -> str:
        opened = prompt.rstrip().endswith("<think>")
        text = "the answer" if "forty" in prompt else call
        if opened or not family.opens_thought:
            text = thinking(family, f"let me see {prompt.count('forty')}", text)
        return text + family.stops[-1]

    with serve(family, script) as (run, client, _):
        create = client.chat.completions.create
        messages: list[Any] = [USER]
        for _ in range(2):
            message = create(model="m", messages=messages, tools=TOOLS).choices[0].message
            assert "think" not in (message.content or "")
            thought = (message.model_extra or {}).get("reasoning_content")
            # After results, R1's prompt does not open reasoning, and neither does this model.
            assert thought == (
                None if family.opens_thought and len(messages) > 1 else f"let me see {len(messages) // 2}"
            )
            # Most clients send the message back without reasoning.
            messages.append(message.model_dump(exclude_none=True, exclude={"reasoning_content"}))
            messages += [{"role": "tool", "tool_call_id": c.id, "content": "forty"} for c in message.tool_calls or ()]
        messages.append({"role": "user", "content": "more"})
        create(model="m", messages=messages, tools=TOOLS)
        chunks = list(create(model="m", messages=messages, tools=TOOLS, stream=True))
    deltas = [c.choices[0].delta for c in chunks]
    assert "".join(d.content or "" for d in deltas) == "the answer"
    assert [d.model_extra["reasoning_content"] for d in deltas if d.model_extra] == ["let me see 1"]
    first, loop, question, again = run.trace.calls
    in_loop, afterwards, count = KEPT[name]
    assert [c.context for c in run.trace.calls] == ["new", in_loop, afterwards, afterwards]
    assert all(c.context_reason == UNREASONED for c in (loop, question, again) if c.context == "forked")
    assert question.prompt_ids is not None
    assert make_tokenizer(family).decode(question.prompt_ids.tolist()).count("let me see") == count
    assert first.output_ids is not None
    assert make_tokenizer(family).decode(first.output_ids.tolist()).startswith(thinking(family, "let me see 0", ""))
    trained, sampled = trained_tokens(run)
    assert trained == sampled
