"""A turn renders what it adds: the prompt is as if the whole conversation were rendered, with every template."""

from __future__ import annotations

import random
from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from lightning_core.chat.chat import Chat, Memory, RenderedPrompt
from lightning_core.chat.history.conversations import cause_of
from lightning_core.chat.tool_calls.tool_formats import ToolCall
from lightning_core.errors import PolicyRequestError
from tests.chat.chat_families import Family, encode, make_tokenizer
from tests.chat.conversation_shapes import TOOLS
from tests.chat.native_templates import FORMATS, LOCAL, MADE, OTHERS, family, folder

needs_wheel = pytest.mark.skipif(folder() is None, reason="needs trl's wheel: pip install --no-deps trl")
SHORT = ("kimi_k2", "magistral", "similar to gemma2", "similar to qwen3", "qwen3_6", "gptoss", "gemma4_v5")
"""Templates that depend on more than the messages around, each in its own way, and one that does not."""
TEMPLATES: list[Any] = [
    pytest.param(
        name,
        marks=(*([needs_wheel] if name in (*FORMATS, *OTHERS) else []), *([] if name in SHORT else [pytest.mark.long])),
    )
    for name in (*LOCAL, *MADE, *FORMATS, *OTHERS)
]
TEXTS = (
    "",
    "x",
    " y\n",
    "<tool_response>\nz\n</tool_response>",
    "a</think>b",
    "<think>",
    "/nothink",
    "user",
    "<|channel|>",
    "tool_calls",
)


def parts(prompt: RenderedPrompt) -> tuple[Any, ...]:
    """What the tokens and the next turns depend on."""
    outline = prompt.outline
    assert outline is not None
    text = outline.print
    return (
        list(prompt.ids), prompt.context, prompt.reason, prompt.thinking, prompt.tail, outline.unmarked,
        text.length, text.digest, text.squeezed_length, text.squeezed_digest,
    )  # fmt: skip


class Conversation:
    """An agent that sends its whole history in each turn."""

    def __init__(self, own: Family, chat: Chat, rng: random.Random, *, tools: bool, compare: bool = True) -> None:
        self.compare = compare
        self.own, self.chat, self.rng = own, chat, rng
        self.tools = TOOLS if tools else None
        self.memory = Memory()
        self.messages: list[Any] = [{"role": "system", "content": "s"}][: rng.randint(0, 1)]
        self.messages.append({"role": "user", "content": "u"})

    def turn(self, wild: float = 0.2, texts: Sequence[str] = TEXTS) -> None:
        """Render the prompt, sample a response, and compare the prompt with one that is rendered as a whole."""
        rng, variables = self.rng, {"enable_thinking": False} if self.rng.random() < wild / 4 else None
        try:
            prompt = self.chat.render(self.messages, self.tools, self.memory, variables=variables)
        except PolicyRequestError:
            self.messages.pop()
            return
        text = rng.choice(texts)
        if self.tools and rng.random() < 0.7:
            calls = 1 if rng.random() > wild else 2
            text = self.chat.tool_format.write([ToolCall("add", {"a": rng.choice(TEXTS)}) for _ in range(calls)])
        around = self.chat.template.reasoning
        if around and rng.random() < 0.7:
            text = f"{'' if prompt.thinking else around[0]}thought {rng.random()}{around[1]}{text}"
        output = encode(self.own, f"{text}{self.own.stops[-1]}")
        response = self.chat.parse(output, tools=bool(self.tools), thinking=prompt.thinking)
        self.chat.remember(prompt, output, response, self.memory)
        if self.compare:
            self._compare(prompt, variables)
        self._continue(response, wild)

    def _compare(self, prompt: RenderedPrompt, variables: Any) -> None:
        # The earlier turn is continued for the second time, which renders all of it.
        again = self.chat.render(self.messages, self.tools, self.memory, variables=variables)
        assert again.outline is not None
        assert len(again.outline.ending) == again.outline.print.length
        assert parts(prompt) == parts(again)

    def _continue(self, response: dict[str, Any], wild: float) -> None:
        rng = self.rng
        sent = dict(response)
        if rng.random() < wild:
            sent.pop("reasoning_content", None)
        self.messages.append(sent)
        results = [
            {
                "role": "tool",
                "tool_call_id": c["id"] if rng.random() > wild / 4 else "other",
                "content": rng.choice(TEXTS),
            }
            for c in response.get("tool_calls") or ()
        ]
        if rng.random() < wild:
            results = results[::-1][: rng.randint(0, 2)]
        self.messages += results
        if not results or rng.random() < wild / 2:
            self.messages.append({"role": "user", "content": rng.choice(TEXTS)})
        if rng.random() < wild / 4:
            self.messages.append({"role": "system", "content": "late"})
        if rng.random() < wild / 8:
            self.messages[rng.randrange(len(self.messages))]["content"] = "edited"


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("seeds", [2, pytest.param(12, marks=pytest.mark.long)], ids=["short", "long"])
def test_prompts_are_as_if_the_whole_conversation_were_rendered(name: str, seeds: int):
    own = family(name)
    tokenizer: Any = make_tokenizer(own)
    chat = Chat(tokenizer)
    for seed in range(seeds):
        rng = random.Random(f"{name} {seed}")
        conversation = Conversation(own, chat, rng, tools=seed % 2 == 0)
        for _ in range(7 if seeds == 2 else 24):
            conversation.turn(wild=rng.choice([0, 0.2, 0.5]) if seed % 3 else 0)


class _Counting(PreTrainedTokenizerFast):
    """Counts the messages that its template renders."""

    rendered = 0

    def apply_chat_template(self, conversation: Any, *more: Any, **options: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        type(self).rendered += len(conversation)
        return super().apply_chat_template(conversation, *more, **options)


def test_a_turn_of_a_long_conversation_renders_few_messages():
    own = family("similar to qwen2_5")
    made = make_tokenizer(own)
    tokenizer: Any = _Counting(tokenizer_object=made.backend_tokenizer, eos_token=own.eos, bos_token=own.bos)
    tokenizer.chat_template = made.chat_template
    conversation = Conversation(own, Chat(tokenizer), random.Random(0), tools=False, compare=False)
    counts: list[int] = []
    for _ in range(60):
        before = _Counting.rendered
        conversation.turn(wild=0, texts=("x",))
        counts.append(_Counting.rendered - before)
    # The 32nd response is the last one after which the whole is rendered too.
    assert max(counts[-20:]) <= 12


def test_a_template_that_counts_messages_is_found_at_the_next_comparison(caplog: pytest.LogCaptureFixture):
    own = family("similar to qwen2_5")
    tokenizer: Any = deepcopy(make_tokenizer(own))  # it is shared
    content = "+ m.content + '<|im_end|>"
    assert content in tokenizer.chat_template
    counting = "+ ('!' if loop.index > 11 and m.role == 'user' else '') " + content
    tokenizer.chat_template = tokenizer.chat_template.replace(content, counting)
    chat, memory, messages = Chat(tokenizer), Memory(), [{"role": "user", "content": "u"}]
    found: dict[int, str | None] = {}
    for turn in range(1, 20):
        prompt = chat.render(messages, None, memory)
        if prompt.reason:
            found[turn] = cause_of(prompt.reason)
        response = {"role": "assistant", "content": "x"}
        chat.remember(prompt, encode(own, f"x{own.stops[-1]}"), response, memory)
        messages += [response, {"role": "user", "content": "u"}]
    # The 12th message is rendered in another way, and the whole is compared after the 8th response.
    assert found == {9: "rendering"}
    assert "rendered a turn in another way" in caplog.text
