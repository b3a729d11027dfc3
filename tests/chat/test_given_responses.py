"""Every template: a response of another model becomes the tokens that this one would sample, and messages have known places."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lightning_core.chat.chat import Memory
from lightning_core.chat.messages import functions_of, text_of
from lightning_core.chat.templates.teacher_response import continuation
from lightning_core.errors import PolicyRequestError
from tests.chat.chat_families import FAMILIES, Family, make_chat, make_tokenizer
from tests.chat.native_templates import FORMATS, LOCAL, OTHERS, family, folder

LOOK: Any = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks.",
        "parameters": {"type": "object", "properties": {"at": {"type": "string", "description": "where"}}},
    },
}
CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "look", "arguments": '{"at": "the door"}'}}
PROMPT: list[Any] = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "look there"}]
CALLING: Any = {"role": "assistant", "content": None, "tool_calls": [CALL]}
DONE: Any = {"role": "assistant", "content": "It is closed."}
THOUGHT = {"reasoning_content": "Let me see."}
RESULT: Any = {"role": "tool", "tool_call_id": "abcdefghi", "content": "  it is closed\n"}

NEED_REASONING = ("nemotron_3_5_lightning", "nemotron_3_nano", "nemotron_3_super", "nemotron_3_ultra", "minimax_m2")
"""Their generation prompt begins the reasoning, and a response without one is written without that."""
NEVER = {
    "deepseek_r1": "as a continuation",  # it leaves reasoning out of all messages
    "deepseek_r1_distill": "as a continuation",
    "deepseekv3": "as a continuation",
    "llava_next": "does not end the response",
}
ALL: dict[str, Any] = {f.name: f for f in FAMILIES}
ALL |= dict.fromkeys((*LOCAL, *((*FORMATS, *OTHERS) if folder() else ())))


SHORT = {*(f.name for f in FAMILIES), *LOCAL, *NEED_REASONING, *NEVER, *[*ALL][::3]}


@pytest.fixture(params=[pytest.param(name, marks=() if name in SHORT else pytest.mark.long) for name in ALL])
def own(request: pytest.FixtureRequest) -> Family:
    return ALL[request.param] or family(request.param)


def test_a_response_is_read_back_from_its_tokens(own: Family) -> None:
    chat, tokenizer = make_chat(own), make_tokenizer(own)
    for given, tools in ((DONE, None), (CALLING, [LOOK])):
        response = {**given, **THOUGHT} if own.name in NEED_REASONING else given
        memory = Memory()
        prompt = chat.render(PROMPT, tools, memory)
        if own.name in NEVER:
            with pytest.raises(PolicyRequestError, match=NEVER[own.name]):
                chat.encode_response(prompt, response, tools)
            continue
        ids = chat.encode_response(prompt, response, tools)
        read = chat.parse(ids, tools=bool(tools), thinking=prompt.thinking, declared=tools)
        assert text_of(read).strip() == text_of(response)
        assert functions_of(read) == functions_of(response)
        assert ids[-1] in chat.stop_token_ids
        assert not chat.stop_token_ids.intersection(ids[:-1])

        if tools:
            chat.remember(prompt, ids, response, memory)
            later = chat.render([*PROMPT, response, RESULT], tools, memory)
            assert later.context == "clean"
            assert list(later.ids[: len(prompt.ids) + len(ids)]) == [*prompt.ids, *ids]
            if (delimiters := chat.template.delimiters) is not None:
                assert delimiters.thought(later.ending) == delimiters.thought(later.text)
            spans = chat.message_spans(later, tools)
            assert spans is not None
            start, stop = spans[3]
            assert tokenizer.decode(list(later.ids[start:stop])).strip() == "it is closed"
            assert 1 not in spans, "encoded before"


def test_messages_of_a_whole_prompt_have_places(own: Family) -> None:
    chat, tokenizer = make_chat(own), make_tokenizer(own)
    prompt = chat.render(PROMPT, None, Memory())
    written: list[str] = []

    def write() -> str:
        written.append(prompt.text)
        return written[-1]

    spans = chat.message_spans(replace(prompt, write=write), None)
    assert len(written) == 1
    assert spans is not None
    start, stop = spans[1]
    assert tokenizer.decode(list(prompt.ids[start:stop])).strip() == "look there"


@pytest.mark.parametrize(
    ("conversation", "later", "expected"),
    [
        ("P: yes<e>\n", "", "yes<e>"),
        ("P: yes<e>\n<s>", "", "yes<e>"),
        ("P: yes<e>P: no<e>", "", "as several messages"),
        ("Q: yes<e>", "", "as a continuation"),
        ("P: yes", "P: yes<s>more", "yes<s>"),
        ("P: yes", "P: yes more", "does not end the response"),
        ("P: yes", "P: <s>", "does not end the response"),
    ],
)
def test_the_text_of_a_response_ends_with_its_first_stop(conversation: str, later: str, expected: str) -> None:
    def text() -> str:
        return continuation("P: ", conversation, ["<e>", "<s>"], lambda: later)

    if expected.startswith(("as", "does")):
        with pytest.raises(PolicyRequestError, match=expected):
            text()
    else:
        assert text() == expected
