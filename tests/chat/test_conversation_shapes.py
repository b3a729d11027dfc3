"""Conversations in any order: each text is in the prompt once, or the request is refused by name, and prompts continue each other."""

from __future__ import annotations

import random
from typing import Any

import pytest

from lightning_core.chat.chat import Chat, Memory
from lightning_core.errors import PolicyRequestError
from tests.chat.chat_families import encode, make_chat
from tests.chat.conversation_shapes import (
    MORE,
    SHAPES,
    TOOLS,
    USER,
    asked,
    random_conversation,
    result,
    said,
    texts_of,
)
from tests.chat.native_templates import FORMATS, LOCAL, MADE, OTHERS, family, folder
from tests.chat.test_refused_templates import MESSAGE, load
from tests.chat.test_templates import BY_NAME, serve

needs_wheel = pytest.mark.skipif(folder() is None, reason="needs trl's wheel: pip install --no-deps trl")
TEMPLATES: list[Any] = [*LOCAL, *MADE, *(pytest.param(name, marks=needs_wheel) for name in (*FORMATS, *OTHERS))]
every_template = pytest.mark.parametrize("name", TEMPLATES)
TABLE = dict(
    line.split()
    for line in """
deepseek_v3_1            =wwww========w=========w
deepseek_v3_2            =wwww========w=========w
kimi_k2                  ====w========wwwwwwwwwww
llama4                   =============w=www=====w
magistral                =wwww========w=========w
minimax_m2               =wwww========w=========w
similar_to_chatml        ====w========wwwwwwwwwww
similar_to_smollm2       ====w========wwwwwwwwwww
similar_to_qwen2_5       =============w=========w
similar_to_qwen3         ======ww=====w======w==w
similar_to_smollm3       =wwww========wwwwwwww=ww
similar_to_llama3_1      =============w=www====ww
similar_to_gemma3        =wwwwwwwwww==wwwwwwwwwww
similar_to_gemma2        wwwwwwwwwww==wwwwwwwwwww
similar_to_mistral_v3    wwwwwwwwwww==wwwwwwwww=w
similar_to_mistral_v7    =wwww========w=========w
similar_to_mistral_v13   =wwww========w=========w
similar_to_phi4          ====w========wwwwwwwwwww
similar_to_phi4_mini     ====w========wwwwwwww=ww
similar_to_hermes3       ====w========wwwwwwww=ww
deepseekv3               =ww=w========w===w=====w
diffusion_gemma          ======ww=====w=www==ww=w
gemma4_v5                ======ww=====w=www==ww=w
glm4moe                  =ww=w=ww=====w======w==w
gptoss                   =wwww=ww=====w==w===wwww
lfm2_2_5                 =============w=========w
lfm2_2_5_v2              =============w=========w
lfm2_v2                  =============w=========w
llama3_1                 =============w=www====ww
llama3_2                 =============w=www====ww
nemotron_3_5_lightning   =============w=========w
nemotron_3_nano          =============w=========w
nemotron_3_super         =============w=========w
nemotron_3_ultra         =============w=========w
qwen2_5                  =============w=========w
qwen3                    ======ww=====w======w==w
qwen3_5_nothink          =wwww=wwwww==w======w==w
qwen3_5_think            =wwww=wwwww==w======w==w
qwen3_6                  =wwww=wwwww==w======w==w
qwen3_8                  =wwww===www==w=========w
qwen3_instruct_2507      =============w=========w
qwen3_vl                 =wwww========w=========w
cohere                   =wwwwwwwwww==wwwwwwwwwww
cohere2                  =ww=wwwwwww==wwwwwwwwwww
deepseek_r1_distill      =wwww========wwwwwwww=ww
gemma                    wwwwwwwwwww==wwwwwwwwwww
gemma3                   =wwwwwwwwww==wwwwwwwwwww
idefics3                 ====w========wwwwwwwwwww
lfm2                     ====w========wwwwwwwwwww
llama3                   ====w========wwwwwwwwwww
llava_next               =ww=w=ww=====wwwwwwwwwww
phi3                     ====w========wwwwwwwwwww
phi3_5                   ====w========wwwwwwwwwww
qwen2_5_vl               ====w========wwwwwwwwwww
smolvlm                  ====w========wwwwwwwwwww
""".strip().splitlines()
)
"""How each template renders each of `SHAPES`, in order: ``=`` as it is, ``w`` written in another form. None is refused."""


def state(chat: Chat, messages: list[Any], tools: Any) -> str:
    """Whether the template renders ``messages`` as they are, or they are written in another form."""
    text = chat.template.render(messages, tools, generate=True)
    found = [text.count(part) for part in texts_of(messages)]
    assert found == [1] * len(found), (text, messages)
    style = chat.template._traits.styles[bool(tools)]
    raw = [
        {**m, "tool_calls": [style.write(c) for c in m["tool_calls"]]} if style and m.get("tool_calls") else m
        for m in messages
    ]
    return "=" if chat.template.raw.attempt(raw, tools=tools, generate=True) == text else "w"


@every_template
def test_each_shape_of_a_conversation_is_rendered_without_a_loss(name: str):
    chat = make_chat(family(name))
    assert "".join(state(chat, messages, None) for messages in SHAPES.values()) == TABLE[name.replace(" ", "_")]


@every_template
@pytest.mark.parametrize("seed", [0, pytest.param(range(1, 30), marks=pytest.mark.long)], ids=["short", "long"])
def test_no_text_of_a_random_conversation_is_lost(name: str, seed: int | range):
    chat = make_chat(family(name))
    for each in (seed,) if isinstance(seed, int) else seed:
        rng = random.Random(f"{name} {each}")
        for tools in (None, TOOLS, None, TOOLS):
            messages = random_conversation(rng)
            text = chat.template.render(messages, tools, generate=True)
            assert [text.count(part) for part in texts_of(messages)] == [1] * len(texts_of(messages)), messages


REWRITES = {
    "deepseek_r1", "deepseek_r1_distill", "deepseekv3", "gptoss", "llava_next", "minimax_m2", "nemotron_3_5_lightning", "nemotron_3_nano",
    "nemotron_3_super", "nemotron_3_ultra", "qwen3_5_nothink", "qwen3_5_think", "qwen3_6", "qwen3_8",
}  # fmt: skip
"""Templates that write any earlier turn in another form, so that each prompt is encoded again."""


@pytest.mark.parametrize("name", [t for t in TEMPLATES if (t if isinstance(t, str) else t.values[0]) not in REWRITES])
@pytest.mark.parametrize("chats", [range(2), pytest.param(range(2, 30), marks=pytest.mark.long)], ids=["short", "long"])
def test_prompts_of_a_group_chat_continue_each_other(name: str, chats: range):
    """Others speak several times in a row or not at all, the agent speaks twice, and instructions come between."""
    fam = family(name)
    chat = make_chat(fam)
    stop = min(chat.template.enders)
    for each in chats:
        rng = random.Random(f"{name} {each}")
        memory, messages, sampled = Memory(), [said("system", "t")] if each % 2 else [], ()
        for turn in range(6):
            for n in range(rng.choice([0, 1, 1, 2, 3]) if messages else 1):
                role = rng.choice(["user", "user", "user", "system", "assistant"]) if messages else "user"
                named = {"name": rng.choice(["ann", "bob"])} if role == "user" else {}
                messages.append(said(role, f"t{turn}{n}", **named))
            prompt = chat.render(messages, None, memory)
            assert prompt.context == ("clean" if turn else "new"), (prompt.reason, prompt.text)
            assert prompt.ids[: len(sampled)] == sampled
            output = encode(fam, f"answer {turn}{stop}", letter_by_letter=True)
            response = chat.parse(output, tools=False)
            chat.remember(prompt, output, response, memory)
            messages.append(response)
            sampled = (*prompt.ids, *output)


def rendered(name: str, *messages: Any) -> str:
    return make_chat(family(name)).template.render([USER, *messages], TOOLS, generate=True)


def between(text: str, *parts: str) -> bool:
    places = [text.find(part) for part in parts]
    return -1 not in places and places == sorted(places)


NAMES = ["qwen3", "gptoss", "gemma4_v5", "deepseekv3"]
ANY_IDS = [
    "kimi_k2",
    "similar to mistral_v7",
    "similar to gemma3",
    *(pytest.param(n, marks=needs_wheel) for n in NAMES),
]


@pytest.mark.parametrize("name", ANY_IDS)
@pytest.mark.parametrize(
    ("ids", "answers"),
    [
        (("c0", "c1"), [("c1", "second"), ("c0", "first")]),
        (("c0", "c0"), [("c0", "first"), ("c0", "second")]),
        ((None, None), [(None, "first"), (None, "second")]),
        (("c0", "c1"), [("new", "first"), ("c1", "second")]),
        (("c0", "c1"), [("c1", "second"), ("c0", "first"), ("c1", "again")]),
        (("functions.add:0", "functions.add:0"), [("functions.add:0", "first"), ("functions.add:0", "second")]),
    ],
    ids=["out of order", "repeated", "none", "replaced", "several", "the model's own, repeated"],
)
def test_results_are_in_the_order_of_their_calls(name: str, ids: Any, answers: Any):
    text = rendered(name, asked("", *ids), *(result(*answer) for answer in answers))
    assert between(text, "argument0", "first", "second", *(["again"] if len(answers) > 2 else []))
    assert between(text, "argument1", "second")


@pytest.mark.parametrize("name", ANY_IDS)
def test_a_result_before_which_one_is_missing_keeps_its_place(name: str):
    text = rendered(name, asked("", "c0", "c1"), result("c1", "second"))
    assert between(text, "argument0", "[no result]", "second")
    assert "[no result]" not in rendered(name, asked("", "c0", "c1"), result("c0", "first"))


@pytest.mark.parametrize("name", ANY_IDS)
def test_an_id_of_every_turn_reaches_the_result_of_its_turn(name: str):
    turns = [m for n in range(3) for m in (asked("", "c0", "c1"), result("c1", f"one{n}"), result("c0", f"zero{n}"))]
    text = rendered(name, *turns)
    assert between(text, *(part for n in range(3) for part in (f"zero{n}", f"one{n}")))
    # Ids of earlier turns do not depend on later ones.
    assert text.startswith(rendered(name, *turns[:6]).partition("one1")[0])


def test_a_repeated_id_of_another_function_keeps_its_own_name():
    """Kimi's ids have the name of the function, and it calls another one in the next turn."""
    other = asked("", "c0")
    other["tool_calls"][0]["function"]["name"] = "multiply"
    text = rendered("kimi_k2", asked("", "c0"), result("c0", "sum"), other, result("c0", "product"))
    assert between(text, "Return of functions.add:0", "sum", "Return of functions.multiply:1", "product")


FUNCTIONS: list[dict[str, Any]] = [
    {"name": "add"},
    {"name": "add", "description": None, "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}},
    {"name": "add", "description": "d", "parameters": {}},
    *(
        {"name": "add", "description": "d", "parameters": {"type": "object", "properties": {"a": schema}}}
        for schema in (
            {},
            {"type": "array"},
            {"type": ["string", "null"]},
            {"$ref": "#/$defs/x"},
            {"type": "integer", "enum": [1, 2], "default": 1},
            {"type": "string", "enum": ["x"], "default": None},
            {"oneOf": [{"type": "string"}, {"type": "integer", "default": 3}], "default": 3},
        )
    ),
]


@every_template
def test_a_tool_needs_no_more_than_a_name(name: str):
    template = make_chat(family(name)).template
    for function in FUNCTIONS:
        assert "add" in template.render([USER], [{"type": "function", "function": function}], generate=True)


FORGETFUL = f"{{% if loop.index < 4 or m['role'] != 'user' %}}{MESSAGE % ''}{{% endif %}}"


def test_a_shape_that_a_template_loses_is_refused_by_name():
    chat = load(FORGETFUL)
    shape = [USER, said("assistant", "t02"), MORE]
    assert chat.render(shape, None, Memory()).text.count("t0") == 3
    lost = r"leaves out the text of message 4 \(role 'user', after one of the role 'assistant'\)\. Send .*chat_template"
    with pytest.raises(PolicyRequestError, match=f"template of the model {lost}"):
        chat.render([*shape, said("assistant", "t06"), said("user", "t07")], None, Memory())


def test_a_late_system_message_reaches_a_template_without_one():
    text = ""

    def script(prompt: str) -> str:
        nonlocal text
        text = prompt
        return "yes<end_of_turn>"

    messages: Any = [said("assistant", "hello"), said("user", "hi", name="ann"), said("system", "Be brief."), USER]
    with serve(BY_NAME["gemma3"], script) as (_, client, _):
        client.chat.completions.create(model="m", messages=messages)
    turn = "<start_of_turn>user\nann: hi\n\n<system>\nBe brief.\n</system>\nt01<end_of_turn>\n<start_of_turn>model\n"
    assert text == f"<bos><start_of_turn>user\n<end_of_turn>\n<start_of_turn>model\nhello<end_of_turn>\n{turn}"
