"""Every template that writes tool calls: its calls are read, and continued in the tokens that were sampled."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest

from lightning_core.chat.chat import Chat, Memory, RenderedPrompt
from lightning_core.chat.templates.template_probe import after_prompt
from lightning_core.endpoint.streaming import HeldText
from tests.chat.chat_families import Family, encode, make_chat, make_tokenizer
from tests.chat.native_templates import FORMATS, LOCAL, MADE, OTHERS, each_with_some, family, folder
from tests.chat.test_templates import serve, trained_tokens

needs_wheel = pytest.mark.skipif(folder() is None, reason="needs trl's wheel: pip install --no-deps trl")
NATIVE = {**FORMATS, **LOCAL, **{name: made.format for name, made in MADE.items()}}
TEMPLATES: list[Any] = [*LOCAL, *MADE, *(pytest.param(name, marks=needs_wheel) for name in FORMATS)]
every_template = pytest.mark.parametrize("name", TEMPLATES)


PROPERTIES: dict[str, Any] = {
    "text": {"type": "string", "description": "A text."},
    "count": {"type": "integer", "description": "A number."},
    "share": {"type": "number", "description": "A fraction."},
    "sure": {"type": "boolean", "description": "A truth."},
    "maybe": {"type": ["string", "null"], "description": "Or nothing."},
    "nested": {
        "type": "object",
        "description": "An object.",
        "properties": {"a": {"type": "string", "description": "a"}},
    },
    "items": {"type": "array", "description": "A list.", "items": {"type": "string", "description": "i"}},
}
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "set_it",
            "description": "Sets.",
            "parameters": {"type": "object", "properties": PROPERTIES},
        },
    }
]
USER: Any = {"role": "user", "content": "hi"}
ARGUMENTS: list[dict[str, Any]] = [
    {},
    {"text": "plain"},
    {"text": ""},
    {"text": 'say "hi"\n  twice, {x: [1]} & <b>'},
    {"text": "12", "count": -3, "share": 2.5, "sure": True, "maybe": None},
    {"text": "it's a \\ backslash"},
    {"text": "null", "sure": False, "maybe": "x"},
    {"text": "ünïcödé ✓ 東京 😀"},
    {"text": "a </parameter> b </arg_value> c </tool_call> d ```"},
    {"nested": {"a": "b", "deep": {"list": [1, "two", {"three": 3.5}]}}, "items": ["x", "y, z"]},
]
LOSSY = ("lfm2_2_5", "lfm2_2_5_v2")
"""Templates that do not escape quotes in a text, so that no parser could tell where it ends."""


# Messages of harmony before another one
HM = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
SO = "<|channel|>commentary<|message|>so<|end|><|start|>assistant"
FORKS = {"deepseekv3": "the template renders earlier turns differently than it did"}
"""Templates that write an earlier turn in another form: without the reasoning that the prompt began."""

REASONED = "qwen3_5_nothink"
"""The template whose prompt ends the reasoning, so that it has no place for what the model reasons then."""


def call(arguments: dict[str, Any], index: int = 0) -> dict[str, Any]:
    function = {"name": "set_it", "arguments": json.dumps(arguments)}
    return {"id": f"call_{index}", "type": "function", "function": function}


def result(identifier: str, text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": identifier, "name": "set_it", "content": text}


def given(message: dict[str, Any]) -> list[Any]:
    """The names and arguments of the calls in a message."""
    return [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in message.get("tool_calls", ())]


def template_writes(name: str, arguments: dict[str, Any]) -> str:
    """A call as the template writes it in a response, up to its end."""
    chat = make_chat(family(name))
    function = {"name": "set_it", "arguments": arguments}
    message = {"role": "assistant", "content": "", "tool_calls": [{**call({}), "function": function}]}
    # A result follows, since some templates write the last message in another form.
    prompt = chat.template.render([USER], TOOLS, generate=True)
    text = chat.template.render([USER, message, result("call_0", "the result")], TOOLS, generate=True)
    text = after_prompt(prompt, text)
    ends = [text.index(stop) for stop in chat.template.stops if stop in text]
    text = text[: min(ends)]
    around = chat.template.delimiters
    # DeepSeek's template leaves out the reasoning that its prompt begins.
    return f"{around.close}{text}" if around and around.opens(prompt) and around.close not in text else text


def sample(chat: Chat, fam: Family, memory: Memory, prompt: RenderedPrompt, text: str, stop: str) -> dict[str, Any]:
    """The message for ``text``, sampled in tokens that the tokenizer would not choose."""
    output = encode(fam, text + stop, letter_by_letter=True)
    message = chat.parse(output, tools=True, thinking=prompt.thinking, declared=TOOLS)
    chat.remember(prompt, output, message, memory)
    return message


def call_stop(name: str) -> str:
    """The token with which a model ends a response with calls."""
    template = make_chat(family(name)).template
    stops = template.stops - template.enders
    return next(iter(stops), family(name).eos)


@every_template
def test_the_format_is_found_in_the_template(name: str):
    assert make_chat(family(name)).tool_format.name == NATIVE[name]


@each_with_some(TEMPLATES, "arguments", ARGUMENTS, 3)
def test_a_call_that_the_template_writes_is_read_with_its_types(name: str, arguments: dict[str, Any]):
    if name in LOSSY and "'" in str(arguments.get("text")):
        pytest.skip("the template does not escape quotes")
    chat = make_chat(family(name))
    text = template_writes(name, arguments)
    thinking = chat.render([USER], TOOLS, Memory()).thinking
    message = chat.read(text, tools=True, thinking=thinking, declared=TOOLS)
    assert given(message) == [("set_it", arguments)]
    assert not (message["content"] or "").strip()


def write_two(name: str, prompt: RenderedPrompt, *, said: str = "") -> str:
    """Two calls in one response, after reasoning and the text ``said`` where the format has a place for them."""
    chat = make_chat(family(name))
    form, around = chat.tool_format, chat.template.delimiters
    body = template_writes(name, {"text": "a"})
    if around is not None:
        body = body.partition(around.close)[2].lstrip() if around.close in body else body
    if form.name == "harmony":
        return f"{HM}{SO.replace('so', said) if said else ''}{body}<|call|><|start|>assistant{body}"
    if form.bare:
        return f"{body[:-1]}, {body[1:]}" if form.bare == "[" else f"{body}; {body}"
    thought = "" if around is None else f"{'' if prompt.thinking else around.open}hm{around.close}"
    return f"{thought}{said}\n{body}\n{body}"


@every_template
def test_two_calls_and_the_text_and_reasoning_before_them_are_read(name: str):
    chat = make_chat(family(name))
    prompt = chat.render([USER], TOOLS, Memory())
    message = chat.read(write_two(name, prompt, said="so"), tools=True, thinking=prompt.thinking, declared=TOOLS)
    assert given(message) == [("set_it", {"text": "a"})] * 2
    if not chat.tool_format.bare:
        assert message["content"] == "so"
        around = chat.template.delimiters
        assert message.get("reasoning_content") == ("hm" if around or chat.tool_format.split else None)


@every_template
def test_the_results_of_two_sampled_calls_continue_their_tokens(name: str):
    fam, memory = family(name), Memory()
    chat = make_chat(fam)
    prompt = chat.render([USER], TOOLS, memory)
    text = write_two(name, prompt)
    message = sample(chat, fam, memory, prompt, text, call_stop(name))
    ids = [made["id"] for made in message["tool_calls"]]
    assert len(set(ids)) == 2
    sampled = (*prompt.ids, *encode(fam, text + call_stop(name), letter_by_letter=True))
    later = chat.render([USER, message, *(result(made, f"result {made}") for made in ids)], TOOLS, memory)
    written = make_tokenizer(fam).decode(list(later.ids))
    assert written.count("result " + ids[0]) == written.count("result " + ids[1]) == 1
    forks = {
        "gptoss": "the template writes one tool call a message, and the response has several",
        REASONED: FORKS["deepseekv3"],
    }
    if name in forks:
        assert (later.context, later.reason) == ("forked", forks[name])
    else:
        assert later.context in ("clean", "realigned"), later.reason
        assert later.ids[: len(sampled)] == sampled


@every_template
def test_sampled_calls_are_continued_token_by_token(name: str):
    """Two rounds of calls, then an answer and another question."""
    fam, memory = family(name), Memory()
    chat = make_chat(fam)
    messages: list[Any] = [USER]
    prompt = chat.render(messages, TOOLS, memory)
    for turn in (1, 2):
        text = template_writes(name, {"count": turn})
        message = sample(chat, fam, memory, prompt, text, call_stop(name))
        assert given(message) == [("set_it", {"count": turn})]
        sampled = (*prompt.ids, *encode(fam, text + call_stop(name), letter_by_letter=True))
        messages += [message, result(message["tool_calls"][0]["id"], f"result {turn}")]
        prompt = chat.render(messages, TOOLS, memory)
        if name in FORKS:
            assert (prompt.context, prompt.reason) == ("forked", FORKS[name])
            continue
        assert prompt.context in ("clean", "realigned"), prompt.reason
        assert prompt.ids[: len(sampled)] == sampled
        tail = make_tokenizer(fam).decode(list(prompt.ids[len(sampled) :]))
        assert f"result {turn}" in tail
        assert tail.count("result") - tail.count("tool_result") >= 1


@every_template
def test_text_before_a_call_is_not_repeated_after_its_result(name: str):
    fam, memory = family(name), Memory()
    chat = make_chat(fam)
    prompt = chat.render([USER], TOOLS, memory)
    written = template_writes(name, {"text": "a"})
    if NATIVE[name] in ("llama", "pythonic"):
        pytest.skip("a call is the whole response")
    around = chat.template.delimiters
    written = written.partition(around.close)[2].lstrip() if around and around.close in written else written
    lead = around.close if prompt.thinking and around else ""
    said = SO.replace("so", "a preamble") if NATIVE[name] == "harmony" else "a preamble\n"
    message = sample(chat, fam, memory, prompt, f"{lead}{said}{written}", call_stop(name))
    assert message["content"] == "a preamble"
    later = chat.render([USER, message, result(message["tool_calls"][0]["id"], "forty")], TOOLS, memory)
    assert later.context in ("clean", "realigned") or later.reason == FORKS.get(name)
    assert make_tokenizer(fam).decode(list(later.ids)).count("a preamble") == 1
    # Without a memory, the template writes it all.
    again = chat.render([USER, message, result(message["tool_calls"][0]["id"], "forty")], TOOLS, Memory())
    text = make_tokenizer(fam).decode(list(again.ids))
    assert text.count("a preamble") == text.count("forty") == 1
    assert text.index("a preamble") < text.index("forty")


@every_template
def test_two_calls_of_another_model_keep_their_results(name: str):
    chat = make_chat(family(name))
    calls = [call({"text": f"value-{i}"}, i) for i in range(2)]
    history = [
        USER,
        {"role": "assistant", "content": "so", "tool_calls": calls},
        *(result(f"call_{i}", f"answer-{i}") for i in range(2)),
    ]
    for tools in (TOOLS, None):  # also if no tools are offered any more
        text = make_tokenizer(family(name)).decode(list(chat.render(history, tools, Memory()).ids))
        for part in ("so", "value-0", "value-1", "answer-0", "answer-1"):
            assert part in text


@each_with_some(TEMPLATES, "think", [False, True], 1)
def test_a_response_that_is_cut_anywhere_never_fails_and_loses_no_text(name: str, think: bool):
    fam = family(name)
    chat = make_chat(fam)
    arguments = {"text": 'x "y"\n</tool_call>', "count": 3, "nested": {"a": "b"}}
    text = template_writes(name, arguments)
    for n in range(len(text) + 1):
        message = chat.read(text[:n], tools=True, thinking=think, declared=TOOLS)
        if think or chat.tool_format.split is not None:
            continue  # the beginning may be reasoning
        kept = message["content"] or ""
        if message.get("tool_calls"):
            assert given(message) == [("set_it", arguments)]
        elif "reasoning_content" not in message and "think" not in text[:n]:
            assert kept == text[:n]


@every_template
def test_a_streamed_response_equals_the_whole_one(name: str):
    fam = family(name)
    chat = make_chat(fam)
    thinking = chat.render([USER], TOOLS, Memory()).thinking
    around = chat.template.delimiters
    calls = template_writes(name, {"text": "a"})
    lead = around.close if around and thinking else ""
    texts = [
        calls,
        f"{lead}an answer, at length",
        f"{lead}an answer {calls}",
        f"{lead}{calls} and more",
        f"{lead}{calls[: len(calls) // 2]}",
    ]
    if NATIVE[name] == "harmony":
        final = "<|channel|>final<|message|>an answer"
        texts = [f"{HM}{calls}", f"{HM}{final}", f"{HM}{SO}{calls}", f"{HM}{SO}{HM}{calls}", f"{HM}{calls[:-3]}"]
        texts += ["plain", "<|channel|>final oops", f"{SO}{final}"]
    for text in texts:
        ids = encode(fam, text, letter_by_letter=True)
        state = HeldText(chat.text, partial(chat.split, thinking=thinking, final=False), (), tools=chat.tool_format)
        parts = [state.more(ids[: n + 1]) for n in range(len(ids))]
        message = chat.read(chat.text(ids), tools=True, thinking=thinking, declared=TOOLS)
        parts.append(state.rest(message))
        assert "".join(text for _, text in parts) == (message["content"] or "")
        assert "".join(thought for thought, _ in parts) == message.get("reasoning_content", "")


@needs_wheel
@pytest.mark.parametrize("name", OTHERS)
def test_no_text_of_a_conversation_is_lost(name: str):
    """Templates without calls of their own, and those of vision models that iterate over content parts."""
    chat = make_chat(family(name))
    history = [
        {"role": "system", "content": "the-system"},
        {"role": "user", "content": "the-user"},
        {"role": "assistant", "content": "the-text", "tool_calls": [call({"text": "the-value"})]},
        result("call_0", "the-result"),
    ]
    text = make_tokenizer(family(name)).decode(list(chat.render(history, TOOLS, Memory()).ids))
    for part in ("the-system", "the-user", "the-text", "the-value", "the-result", "set_it"):
        assert part in text


@every_template
def test_reasoning_before_a_call_stays_in_the_next_prompt_as_it_was_sampled(name: str):
    fam, memory = family(name), Memory()
    chat, tokenizer = make_chat(fam), make_tokenizer(fam)
    around = chat.template.delimiters
    if around is None and NATIVE[name] != "harmony":
        pytest.skip("the model does not reason")
    prompt = chat.render([USER], TOOLS, memory)
    written = template_writes(name, {"text": "a"})
    if around is None:
        text = f"{HM}{written}"
    else:
        call_only = written.partition(around.close)[2] if around.close in written else written
        text = f"{'' if prompt.thinking else around.open}hm\n{around.close}{call_only}"
    message = sample(chat, fam, memory, prompt, text, call_stop(name))
    assert (message["reasoning_content"], len(message["tool_calls"])) == ("hm", 1)
    back = {k: v for k, v in message.items() if k != "reasoning_content"}
    later = chat.render([USER, back, result(message["tool_calls"][0]["id"], "forty")], TOOLS, memory)
    if name == REASONED:
        assert later.context == "forked"
        return
    assert later.context in ("clean", "realigned"), later.reason
    assert text + call_stop(name) in tokenizer.decode(list(later.ids))


@needs_wheel
@pytest.mark.parametrize(("name", "opening"), [("diffusion_gemma", "<|tool_response>"), ("glm4moe", "<|observation|>")])
def test_a_token_that_starts_the_result_is_kept_after_another_stop_token(name: str, opening: str):
    """The model ended its call with its end of text, not with the token that starts the result."""
    fam, memory = family(name), Memory()
    chat, tokenizer = make_chat(fam), make_tokenizer(fam)
    for stop in (fam.eos, opening):
        prompt = chat.render([USER], TOOLS, memory)
        text = template_writes(name, {"text": "a"})
        message = sample(chat, fam, memory, prompt, text, stop)
        later = chat.render([USER, message, result(message["tool_calls"][0]["id"], "forty")], TOOLS, memory)
        sampled = len(prompt.ids) + len(encode(fam, text + stop, letter_by_letter=True))
        tail = tokenizer.decode(list(later.ids[sampled:]))
        assert tail.startswith(opening) == (stop != opening)
        assert "forty" in tail


@each_with_some(TEMPLATES, "stream", [False, True], 1)
def test_an_agent_calls_a_tool_over_http(name: str, stream: bool):
    """One call, its result and an answer, in the format of the model. The response is recorded as it was sampled."""
    fam = family(name)
    written = template_writes(name, {"text": "a", "count": 3})
    around = make_chat(fam).template.delimiters

    def script(prompt: str) -> str:
        begun = around is not None and around.opens(prompt)
        if "the-result" not in prompt:
            return written + call_stop(name)
        if NATIVE[name] == "harmony":
            return f"{HM}<|channel|>final<|message|>done{fam.eos}"
        return f"{around.close if begun and around else ''}done{fam.eos}"

    with serve(fam, script) as (run, client, _):
        create = client.chat.completions.create
        ask: list[Any] = [USER]
        if stream:
            chunks = list(create(model="m", messages=ask, tools=TOOLS, stream=True))
            (made,) = [c for chunk in chunks for c in chunk.choices[0].delta.tool_calls or ()]
            text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
            assert made.function is not None
            arguments, identifier = made.function.arguments or "", str(made.id)
        else:
            message = create(model="m", messages=ask, tools=TOOLS).choices[0].message
            assert message.tool_calls
            text, identifier = message.content or "", message.tool_calls[0].id
            arguments = message.tool_calls[0].function.arguments  # pyright: ignore[reportAttributeAccessIssue]
        assert text.strip() == ""
        assert json.loads(arguments) == {"text": "a", "count": 3}
        function = {"name": "set_it", "arguments": arguments}
        back = {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": identifier, "type": "function", "function": function}],
        }
        later = (
            create(model="m", messages=[*ask, back, result(identifier, "the-result")], tools=TOOLS).choices[0].message
        )
    assert later.content == "done"
    first, second = run.trace.calls
    assert second.context == ("forked" if name in FORKS else "clean"), second.context_reason
    assert first.output_ids is not None
    assert make_tokenizer(fam).decode(first.output_ids.tolist()) == written + call_stop(name)
    trained, sampled = trained_tokens(run)
    assert trained == sampled


@needs_wheel
def test_a_template_whose_calls_cannot_be_read_is_refused_by_name():
    with pytest.raises(
        ValueError, match=r"writes tool calls that cannot be read back, such as .*atem:function_calls.*hermes"
    ):
        make_chat(family("muse_glimmer"))
