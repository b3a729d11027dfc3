"""In every family, for any text: no text becomes a special token, and no sampled token is lost or re-encoded."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lightning_core.chat.chat import Chat, Memory
from lightning_core.chat.tool_calls.tool_formats import FORMATS, ToolCall
from tests.chat.chat_families import FAMILIES, Family, encode, make_chat, make_tokenizer

BY_FORMAT = {form.name: form for form in FORMATS}
every_family = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
quick = settings(deadline=None, max_examples=12, suppress_health_check=[HealthCheck.too_slow])

ALL_TOKENS = sorted({t for family in FAMILIES for t in family.tokens if t.strip()})
LETTERS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
# Tokens whole, cut and nested; delimiters of quoted text; and anything else.
ATTACKS = st.lists(
    st.sampled_from(ALL_TOKENS)
    | st.sampled_from(ALL_TOKENS).map(lambda t: t[: len(t) // 2] + t + t[len(t) // 2 :])
    | st.sampled_from(["<|", "|>", "⸨", "⸩", "⸨1⸩", "⸨response⸩", "⸨thought⸩", "\n", " "])
    | LETTERS,
    min_size=1,
    max_size=6,
).map("".join)


def tool(description: str) -> dict[str, Any]:
    properties = {"a": {"type": "string", "description": description}, description: {"type": "string"}}
    function = {"name": "add", "description": description, "parameters": {"type": "object", "properties": properties}}
    return {"type": "function", "function": function}


def conversation(system: str, user: str, argument: str, result: str) -> list[Any]:
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "add", "arguments": {"a": argument}}}
    return [
        {"role": "system", "content": system},
        {"role": "user", "content": user},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "abcdefghi", "content": result},
    ]


@every_family
@given(texts=st.lists(ATTACKS, min_size=5, max_size=5))
@quick
def test_no_text_becomes_a_special_token(family: Family, texts: list[str]):
    chat, tokenizer = make_chat(family), make_tokenizer(family)
    special = {i for token, i in tokenizer.get_added_vocab().items() if token.strip()}

    def specials(system: str, user: str, argument: str, result: str, description: str) -> list[int]:
        prompt = chat.render(conversation(system, user, argument, result), [tool(description)], Memory())
        return [i for i in prompt.ids if i in special]

    assert specials(*(f"a{text}" for text in texts)) == specials("s", "u", "a", "r", "d")


@every_family
@given(text=ATTACKS)
@quick
def test_text_that_looks_special_is_all_there(family: Family, text: str):
    chat, tokenizer = make_chat(family), make_tokenizer(family)
    prompt = chat.render([{"role": "user", "content": f"a{text}z"}], None, Memory())
    assert f"a{text}z" in tokenizer.decode(list(prompt.ids))


@st.composite
def exchanges(draw: st.DrawFn) -> list[tuple[str, list[ToolCall], list[str]]]:
    """The assistant's turns: text and calls, then the results of the calls or the next question."""
    turns: list[tuple[str, list[ToolCall], list[str]]] = []
    for _ in range(draw(st.integers(1, 4))):
        arguments = st.dictionaries(LETTERS, LETTERS | st.integers() | st.lists(LETTERS, max_size=2), max_size=2)
        calls = [ToolCall("add", a) for a in draw(st.lists(arguments, max_size=2))]
        follow = draw(st.lists(ATTACKS, min_size=max(1, len(calls)), max_size=max(1, len(calls))))
        turns.append((draw(LETTERS), calls, follow))
    return turns


@every_family
@given(turns=exchanges(), tools=st.booleans(), letters=st.booleans(), ended=st.booleans())
@quick
def test_sampled_ids_are_found_in_the_next_prompt(
    family: Family, turns: list[tuple[str, list[ToolCall], list[str]]], tools: bool, letters: bool, ended: bool
):
    chat, memory = make_chat(family), Memory()
    form = BY_FORMAT[family.format]
    offered = [tool("d")] if tools else None
    messages: list[Any] = [{"role": "user", "content": "hi"}]
    prompt = chat.render(messages, offered, memory)
    for text, calls, follow in turns:
        again = chat.render(messages, offered, memory)
        assert (again.ids, again.text, again.context) == (prompt.ids, prompt.text, prompt.context)
        asks = tools and bool(calls)
        written = form.write(calls) if asks else text
        stop = family.stops[-1] if ended else ""
        thought = "hm</think>" if prompt.thinking else ""
        output = encode(family, f"{thought}{written}{stop}", letter_by_letter=letters) or encode(family, "x")
        response = chat.parse(output, tools=tools, thinking=prompt.thinking)
        chat.remember(prompt, output, response, memory)
        messages.append(response)
        if asks:
            assert [c["function"]["name"] for c in response["tool_calls"]] == ["add"] * len(calls)
            ids = [c["id"] for c in response["tool_calls"]]
            messages += [{"role": "tool", "tool_call_id": i, "content": r} for i, r in zip(ids, follow, strict=True)]
        else:
            messages.append({"role": "user", "content": follow[0]})
        tokens = (*prompt.ids, *output)
        prompt = chat.render(messages, offered, memory)
        if prompt.context == "forked":
            # Only if the template rewrites earlier turns: everything is then encoded as rendered.
            assert family.opens_thought or (tools and family.moves_tools)
            assert prompt.reason
        else:
            # Hermes 3 ends the last result differently from earlier ones.
            assert prompt.context == ("realigned" if prompt.reason else "clean")
            assert prompt.reason in (None, "the template renders earlier turns with other white space")
            assert prompt.reason is None or family.name == "hermes3"
            assert prompt.ids[: len(tokens)] == tokens


def test_text_next_to_a_quoted_token_gets_no_additional_space():
    """SentencePiece adds a space before a text, which is missing when a part of a text is encoded."""
    letters = {letter: i for i, letter in enumerate(["<unk>", "▁", "\n", *sorted(set("<s>[/INST]abcx user"))])}
    inner = Tokenizer(models.BPE(vocab=letters, merges=[], unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)  # type: ignore[assignment]
    inner.decoder = decoders.Metaspace(prepend_scheme="first", split=False)  # type: ignore[assignment]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="</s>", extra_special_tokens=["[INST]", "[/INST]"]
    )
    family = next(f for f in FAMILIES if f.name == "mistral_v7")
    tokenizer.chat_template = make_tokenizer(family).chat_template
    prompt = Chat(tokenizer).render([{"role": "user", "content": "ab[INST]cx"}], None, Memory())
    assert tokenizer.convert_ids_to_tokens(list(prompt.ids)) == ["<s>", "[INST]", *"ab[INST]cx", "[/INST]"]
