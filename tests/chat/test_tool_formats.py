"""Tool calls in text: each format as its makers write it, several calls, and malformed calls left as text."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_core.chat.tool_calls.call_ids import IdStyle
from lightning_core.chat.tool_calls.tool_formats import FORMATS, ToolCall, ToolFormat, read_message
from lightning_core.chat.tool_calls.unread_calls import has_unread_call

BY_NAME = {form.name: form for form in FORMATS}
DS = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>%s\n```json\n%s\n```<｜tool▁call▁end｜>"
X = '{"x": 1}'
A_TEXT = f'{{"name": "a", "arguments": {X}}}'
A, B = ToolCall("a", {"x": 1}), ToolCall("b", {})

READ = [
    ("hermes", '<tool_call>\n{"name": "a", "arguments": {"x": 1}}\n</tool_call>', "", [A]),
    ("hermes", f'so <tool_call>{A_TEXT}</tool_call> then <tool_call>{{"name": "b"}}</tool_call>.', "so  then .", [A, B]),
    ("hermes", '<tool_call>[{"name": "a", "arguments": {"x": 1}}, {"name": "b", "arguments": {}}]</tool_call>', "", [A, B]),
    ("hermes", '<tool_call>\n{"name": "a", "arguments": {"x": 1}}\n', "", [A]),
    ("hermes", '<tool_call>{"name": "a", "arguments": {"x": 1}}\n<tool_call>{"name": "b"}', "", [A, B]),
    ("hermes", '<tool_call>{"name": "a", "arguments": {"x": "</tool_call>"}}</tool_call>', "", [ToolCall("a", {"x": "</tool_call>"})]),
    ("hermes", '<tool_call>{oops</tool_call> <tool_call>{"name": "b"}</tool_call>', "<tool_call>{oops</tool_call> ", [B]),
    ("phi", '<|tool_call|>[{"name": "a", "arguments": {"x": 1}}, {"name": "b", "arguments": {}}]<|/tool_call|>', "", [A, B]),
    ("mistral", '[TOOL_CALLS] [{"name": "a", "arguments": {"x": 1}, "id": "abcdefghi"}]', "", [A._replace(id="abcdefghi")]),
    ("mistral", 'see [TOOL_CALLS][{"name": "a", "arguments": {"x": 1}}, {"name": "b", "arguments": {}}]', "see ", [A, B]),
    ("mistral", '[TOOL_CALLS]a[ARGS]{"x": 1}[TOOL_CALLS]b[ARGS]{}', "", [A, B]),
    ("mistral", '[TOOL_CALLS]a[CALL_ID]abcdefghi[ARGS]{"x": 1}', "", [A._replace(id="abcdefghi")]),
    ("mistral", '[TOOL_CALLS]a{"x": 1}', "", [A]),
    ("llama", '{"name": "a", "parameters": {"x": 1}}', "", [A]),
    ("llama", ' {"type": "function", "name": "a", "parameters": {"x": 1}}; {"name": "b", "parameters": {}} ', "", [A, B]),
    ("llama", '<|python_tag|>{"name": "a", "parameters": {"x": 1}}', "", [A]),
    ("llama", '{"name": "a", "parameters": {"x": "<|python_tag|>"}}', "", [ToolCall("a", {"x": "<|python_tag|>"})]),
    ("deepseek", f"<｜tool▁calls▁begin｜>{DS % ('a', X)}\n{DS % ('b', '{}')}<｜tool▁calls▁end｜>", "", [A, B]),
    ("deepseek", '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>a<｜tool▁sep｜>{"x": 1}<｜tool▁call▁end｜><｜tool▁calls▁end｜>', "", [A]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "content", "calls"), READ)
def test_calls_are_read_and_the_text_around_them_is_kept(name: str, text: str, content: str, calls: list[ToolCall]):
    assert BY_NAME[name].read(text) == (content, calls)


@pytest.mark.parametrize(
    ("escaped", "read"),
    [("\\ud83d", "\ufffd"), ("\\ude00 ü", "\ufffd ü"), ("\\ud83dA", "\ufffdA"), ("\\ud83d\\ude00", "😀")],
)
def test_lone_surrogates_in_a_call_are_replaced(escaped: str, read: str):
    """A response that contains them is not UTF-8, and a client could not send them back."""
    for arguments in (f'{{"x": "{escaped}"}}', f'"{{\\"x\\": \\"{escaped}\\"}}"'):  # an object, and JSON in a string
        text = f'<tool_call>{{"name": "{escaped}", "arguments": {arguments}}}</tool_call>'
        (found,) = read_message(BY_NAME["hermes"], text)["tool_calls"]
        assert found["function"]["name"] == read
        assert json.loads(found["function"]["arguments"]) == {"x": read}


MALFORMED = [
    ("hermes", "<tool_call>{oops</tool_call>"),
    ("hermes", '<tool_call>{"arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": 3, "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "a", "arguments": [1]}</tool_call>'),
    ("hermes", '<tool_call>{"name": "a", "arguments": {"x": NaN}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "a", "arguments": {"x": 1}'),
    ("hermes", '<tool_call>{"name": "a", "arguments": {}} and so on</tool_call>'),
    ("hermes", "<tool_call>" + "[" * 100_000),
    ("phi", '<|tool_call|>[{"name": "a"'),
    ("mistral", "[TOOL_CALLS]"),
    ("mistral", '[TOOL_CALLS][{"name": "a", "arguments": {"x": 1}'),
    ("mistral", '[TOOL_CALLS]{"name": "a", "arguments": {}}'),
    ("llama", '{"name": "Ada", "age": 36}'),
    ("llama", '{"answer": 3}'),
    ("llama", 'see {"name": "a", "parameters": {}}'),
    ("llama", '{"name": "a", "parameters": {}} and so on'),
    ("llama", '<|python_tag|>brave_search.call(query="x")'),
    ("deepseek", '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>a\n```json\n{"x": '),
    ("deepseek", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>a {}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"),
]


@pytest.mark.parametrize(("name", "text"), MALFORMED)
def test_what_is_malformed_stays_in_the_text(name: str, text: str):
    assert BY_NAME[name].read(text) == (text, [])
    assert read_message(BY_NAME[name], text) == {"role": "assistant", "content": text}


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)
NAMES = st.from_regex(r"[a-z_][a-z0-9_]{0,8}", fullmatch=True)
# Python's and XML's keys are names.
BY_NAME_ONLY = {"qwen_xml", "glm", "minimax", "dsml", "dsml_v4", "dsml_v4_1", "lfm2", "pythonic", "gemma"}
# Without escapes, a text must not contain what ends it.
PLAIN = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<>"))


def jsons(form: ToolFormat) -> st.SearchStrategy[Any]:
    text = PLAIN if form.name in BY_NAME_ONLY else st.text()
    keys = NAMES if form.name == "gemma" else text
    return st.recursive(
        st.none() | st.booleans() | st.integers() | text,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3),
        max_leaves=5,
    )


def calls_in(form: ToolFormat) -> st.SearchStrategy[list[ToolCall]]:
    untyped = form.name in ("qwen_xml", "glm", "minimax")
    # A format without types writes everything as text.
    values = PLAIN if untyped else jsons(form)
    keys = NAMES if form.name in BY_NAME_ONLY else st.text()
    call = st.builds(ToolCall, NAMES, st.dictionaries(keys, values, max_size=3), st.none(), st.just(untyped))
    return st.lists(call, min_size=1, max_size=3)


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
@given(data=st.data())
@settings(deadline=None, max_examples=20)
def test_what_is_written_is_read_again(form: ToolFormat, data: st.DataObject):
    calls = data.draw(calls_in(form))
    written = form.write(calls)
    thought, answer = ("", written) if form.split is None else form.split(written, True)
    content, read = form.read(answer or "")
    assert (thought, content.strip(), [call._replace(id=None) for call in read]) == ("", "", calls)


MARKS = [mark for form in FORMATS for mark in form.marks]
PIECES = st.lists(
    st.sampled_from([*MARKS, '{"name": "a"', ', "arguments": {}}', "[", "]", "{", "}", " ", "x", "```json", "\n"]),
    max_size=12,
).map("".join)


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
@given(text=PIECES)
@settings(deadline=None, max_examples=50)
def test_reading_never_fails_and_loses_nothing_but_calls(form: ToolFormat, text: str):
    content, calls = form.read(text)
    if not calls:
        assert content == text
    message: dict[str, Any] = read_message(form, text)
    assert len(message.get("tool_calls", [])) == len(calls)
    for call in message.get("tool_calls", []):
        assert json.loads(call["function"]["arguments"]) == {}


@given(text=PIECES)
@settings(deadline=None, max_examples=100)
def test_channels_lose_no_text_and_streaming_never_takes_an_answer_back(text: str):
    split = BY_NAME["harmony"].split
    assert split is not None
    thought, answer = split(text, True)
    assert f"{thought}{answer}".count("x") == text.count("x")
    sent = ""
    for n in range(len(text)):
        begun, part = split(text[:n], False)
        if part is not None:
            assert begun == thought
            mark = min((at for m in BY_NAME["harmony"].opens if (at := part.find(m)) >= 0), default=len(part))
            sent = max(sent, part[:mark], key=len)
    assert (answer or "").startswith(sent)


def test_ids_are_made_and_those_that_templates_accept_are_kept():
    calls = read_message(BY_NAME["hermes"], '<tool_call>{"name": "a", "id": "abcdefghi"}</tool_call>')["tool_calls"]
    assert calls[0]["id"].startswith("call_")
    text = '[TOOL_CALLS][{"name": "a", "id": "abcdefghi"}, {"name": "b", "id": "no"}, {"name": "b"}]'
    ids = [c["id"] for c in read_message(BY_NAME["mistral"], text, ids=IdStyle.SHORT)["tool_calls"]]
    assert ids[0] == "abcdefghi"
    assert [len(i) for i in ids] == [9, 9, 9]
    assert len(set(ids)) == 3


def test_an_id_that_the_model_repeats_is_replaced():
    """Kimi's model numbers its calls; two results with one id would be ambiguous."""
    text = BY_NAME["kimi"].write([ToolCall("a", {}, "functions.a:0"), ToolCall("a", {}, "functions.a:0")])
    first, second = (c["id"] for c in read_message(BY_NAME["kimi"], text, ids=IdStyle.NUMBERED)["tool_calls"])
    assert first == "functions.a:0"
    assert second.startswith("call_")


TOOLS = [{"type": "function", "function": {"name": "a", "parameters": {}}}]


@pytest.mark.parametrize(
    "text", [text for name, text, _, calls in READ if calls and name not in ("pythonic", "harmony")]
)
def test_a_call_in_the_form_of_another_model_is_found_in_text(text: str) -> None:
    assert has_unread_call({"role": "assistant", "content": text}, TOOLS)
    assert not has_unread_call(
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "a"}}]}, TOOLS
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"I call it:\n```json\n{A_TEXT}\n```", True),
        (f"with {{x}}: {A_TEXT}", True),
        (f'{{"type": "function", "function": {A_TEXT}}}', True),
        ('{"name": "no_such_tool", "arguments": {}}', True),
        ("<tool_call>{oops", True),
        ("", False),
        ("The answer is {4}.", False),
        ("Done.<|end|>", False),
        ('{"name": "Ada", "age": 36}', False),
        ('{"name": "Ada", "parameters": {}, "age": 36}', False),
        ('See {"name": "no_such_tool", "arguments": {}}', False),
        ('{"answer": "call a", "arguments": {}}', False),
    ],
)
def test_json_is_a_call_if_it_has_arguments_and_the_name_of_a_tool(text: str, expected: bool) -> None:
    assert has_unread_call({"role": "assistant", "content": text}, TOOLS) is expected
