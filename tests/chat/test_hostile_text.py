"""Text that a model repeats without end is read in time linear in its length."""

from __future__ import annotations

import time

import pytest

from lightning_core.chat.tool_calls.formats.base import ToolCall, ToolFormat
from lightning_core.chat.tool_calls.tool_formats import FORMATS
from lightning_core.endpoint.streaming import HeldText

SIZE = 20_000
TWO = [ToolCall("f", {"a": "x", "b": "y"}), ToolCall("g", {"a": "x"})]
INSIDE = {
    "qwen_xml": "<tool_call><function=a><parameter=b>",
    "glm": "<tool_call>a<arg_key>b</arg_key><arg_value>",
    "minimax": '<minimax:tool_call><invoke name="a"><parameter name="b">',
    "gemma": '<|tool_call>call:f{a:<|"|>',
    "lfm2": '<|tool_call_start|>[f(a="',
    "harmony": "<|channel|>commentary to=functions.f<|message|>{",
    "llama": '{"name":"a","parameters":{}} ',
    "mistral": '[TOOL_CALLS]a{"b":"',
}
ENDS = {
    "qwen_xml": "</parameter>",
    "glm": "</arg_value>",
    "minimax": "</parameter>",
    "gemma": '<|"|>,b:1',
    "harmony": "<|end|>",
}


def repeated(unit: str, size: int) -> str:
    return unit * (size // len(unit) + 1)


def hostile(form: ToolFormat, size: int) -> dict[str, str]:
    written = form.write(TWO)
    inside = INSIDE.get(form.name, f'{form.opens[0]}{{"name": "')
    end = ENDS.get(form.name, form.marks[-1])
    texts = {f"opening {o}": repeated(o, size) for o in (*form.opens, *form.marks)}
    texts["space"] = written[: len(written) // 2] + " " * size
    texts["space after a mark"] = repeated(form.opens[0] + " " * 1000, size)
    texts["space after an end"] = "<|channel|>analysis<|message|>x<|end|>" + " " * size + "x"
    texts["inside"] = repeated(inside, size)
    texts["inside, then closed"] = repeated(inside, size // 2) + repeated(end, size // 2)
    texts["inside, then one end"] = repeated(inside, size) + end + " no"
    texts["many values after nested calls"] = repeated(inside, size // 2) + end + repeated(f"{end}, ", size // 2)
    texts["calls"] = repeated(written, size)
    texts["to="] = repeated("to=", size)
    for part in (3, 2):
        texts[f"cut at 1/{part}"] = repeated(written[: len(written) // part], size)
    texts["cut at the end"] = repeated(written[:-3], size)
    return texts


def cost(form: ToolFormat, text: str) -> float:
    """Seconds of this thread's CPU. Regular expressions have no calls that could be counted."""
    start = time.thread_time()
    if form.split is not None:
        form.read(form.split(text, True)[1] or "")
    form.read(text)
    return time.thread_time() - start


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_repeated_text_is_read_in_linear_time(form: ToolFormat):
    small, large = hostile(form, SIZE), hostile(form, 8 * SIZE)
    for name, text in large.items():
        # Quadratic work would be 64 times as much.
        least = max(min(cost(form, small[name]) for _ in range(2)), 0.001)
        assert any(cost(form, text) < 24 * least for _ in range(2)), name


HM = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
STREAMED = ["an answer ", "<b>x</b>", " ", "<|message|>", "<|end|>", "<|channel|>analysis<|message|>hm<|end|>"]


def characters_split(text: str) -> int:
    """The characters that the channels are split in, while ``text`` is streamed by four."""
    harmony = next(form for form in FORMATS if form.name == "harmony")
    assert harmony.split is not None
    split, read = harmony.split, 0

    def counted(text: str) -> tuple[str, str | None]:
        nonlocal read
        read += len(text)
        return split(text, False)

    ids = list(range(len(text)))
    held = HeldText(lambda ids: text[: len(ids)], counted, (), tools=harmony)
    sent = "".join(held.more(ids[:end])[1] for end in range(4, len(text) + 1, 4))
    thought, answer = split(text, True)
    content, _ = harmony.read(answer or "")
    assert content.startswith(sent)
    assert sent + held.rest({"content": content, "reasoning_content": thought})[1] == content
    return read


@pytest.mark.parametrize("unit", STREAMED)
@pytest.mark.parametrize("lead", ["", HM, f"{HM}<|channel|>final<|message|>", "<|channel|>analysis<|message|>"])
def test_streamed_text_is_split_in_linear_time(lead: str, unit: str):
    # Each character by itself would make it 2500 times.
    text = lead + repeated(unit, SIZE)
    count = characters_split(text)
    assert count <= 34 * len(text)
    if unit in ("an answer ", "<b>x</b>") and "final" in lead:
        assert count < 2000
