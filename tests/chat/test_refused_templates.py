"""Chat templates that would lose something silently are refused when they are loaded, with what was found and what to do."""

from __future__ import annotations

from copy import deepcopy

import pytest

from lightning_core.chat.chat import Chat, Memory
from lightning_core.errors import ConfigError, PolicyRequestError
from tests.chat.chat_families import FAMILIES, Family, make_tokenizer

CHATML = next(family for family in FAMILIES if family.name == "chatml")
MESSAGE = "<|im_start|>{{ m['role'] }}\n{{ m['content'] }}%s<|im_end|>\n"
GENERATE = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


def load(each: str) -> Chat:
    """The chat of a template that writes ``each`` for a message."""
    source = f"{{% for m in messages %}}{each}{{% endfor %}}{GENERATE}"
    return Chat(
        make_tokenizer(Family(name="x", eos=CHATML.eos, specials=CHATML.specials, stops=CHATML.stops, source=source))
    )


CHATML_SOURCE = f"{{% for m in messages %}}{MESSAGE % ''}{{% endfor %}}{GENERATE}"
LAST = f"{{% if m['role'] != 'user' or loop.last %}}{MESSAGE % ''}{{% endif %}}"
CALLS = "{% for c in m.tool_calls or [] %}(call {{ c.function.name }} {{ c.function.arguments | tojson }}){% endfor %}"
HERMES = (
    "{% for c in m.tool_calls or [] %}<tool_call>"
    "{{ {'name': c.function.name, 'arguments': c.function.arguments} | tojson }}</tool_call>{% endfor %}"
)
RESULTS = "{% if m['role'] == 'tool' and not loop.last %}{% elif true %}"


@pytest.mark.parametrize(
    ("each", "message"),
    [
        (LAST, r"drops the text of the user, as a string and as content parts.*[Ss]et tokenizer\.chat_template"),
        (
            MESSAGE % CALLS,
            r"writes tool calls that cannot be read back, such as '\(call probe_tool .*hermes, phi, mistral",
        ),
        (f"{RESULTS}{MESSAGE % HERMES}{{% endif %}}", r"drops the result of a tool"),
        ("<|im_start|>user\n{{ m['content'] if m['role'] == 'system' }}<|im_end|>", r"drops the text of the user"),
    ],
    ids=["earlier questions", "unknown calls", "earlier results", "everything"],
)
def test_a_template_that_loses_something_is_refused(each: str, message: str):
    with pytest.raises(ConfigError, match=message):
        load(each)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "{% for m in messages %}\n{{ m.content }",
            r"has a syntax error in line 2: TemplateSyntaxError: .*chat_template",
        ),
        ("{{ messages[0].foo.bar() }}", r"renders no message: UndefinedError: .*chat_template"),
        (
            {"default": CHATML_SOURCE, "tool_use": "{% if %}"},
            r"the chat template 'tool_use' of the tokenizer has a syntax error in line 1",
        ),
    ],
    ids=["syntax", "fails", "a second template"],
)
def test_a_template_that_fails_is_refused(source: str | dict[str, str], message: str):
    tokenizer = deepcopy(make_tokenizer(CHATML))
    tokenizer.chat_template = source
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        Chat(tokenizer)


def test_a_template_without_special_tokens_ends_responses_with_the_eos_token():
    """A later turn is encoded again: the template does not write the token that ended the response."""
    source = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
    tokenizer = deepcopy(make_tokenizer(CHATML))
    tokenizer.chat_template = source
    chat, memory = Chat(tokenizer), Memory()
    eos = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert chat.stop_token_ids == {eos}
    question = {"role": "user", "content": "q"}
    first = chat.render([question], None, memory)
    output = [*tokenizer.encode("a", add_special_tokens=False), eos]
    chat.remember(first, output, chat.parse(output, tools=False), memory)
    again = chat.render([question, {"role": "assistant", "content": "a"}, question], None, memory)
    assert (again.context, tokenizer.decode(list(again.ids))) == (
        "forked",
        "user: q\nassistant: a\nuser: q\nassistant: ",
    )
    tokenizer.eos_token = None
    with pytest.raises(ConfigError, match="not a special token, and the tokenizer has no eos token"):
        Chat(tokenizer)


def test_a_template_that_reads_only_content_parts_gets_them():
    parts = "{% for p in m['content'] %}{% if p['type'] == 'text' %}{{ p['text'] }}{% endif %}{% endfor %}"
    chat = load(f"<|im_start|>{{{{ m['role'] }}}}\n{parts}<|im_end|>\n")
    history = [{"role": "system", "content": "rules"}, {"role": "user", "content": "question"}]
    assert chat.render(history, None, Memory()).text == (
        "<|im_start|>system\nrules<|im_end|>\n<|im_start|>user\nquestion<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_call_that_would_displace_its_text_is_written_into_the_text():
    """As DeepSeek R1's template does with calls, and Llama's with text."""
    chat = load(
        f"<|im_start|>{{{{ m['role'] }}}}\n{{% if m.tool_calls %}}{HERMES}{{% else %}}{{{{ m['content'] }}}}{{% endif %}}<|im_end|>\n"
    )
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    text = chat.render(
        [{"role": "user", "content": "q"}, {"role": "assistant", "content": "so", "tool_calls": [call]}], None, Memory()
    ).text
    assert 'so\n<tool_call>{"name": "f", "arguments": {}}</tool_call>' in text


def test_an_image_is_refused_with_what_works():
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 1000}}
    with pytest.raises(
        PolicyRequestError, match=r"reads text only. Describe images.* or put the agent under agents\.frozen"
    ) as error:
        load(MESSAGE % "").render([{"role": "user", "content": [image]}], None, Memory())
    assert len(str(error.value)) < 600
