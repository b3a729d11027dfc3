"""The formats on canitoolcall's texts: what models of each family wrote, and what makers of inference engines expect of it.

Its adapters do not come with this project, so only its data is read.
"""

from __future__ import annotations

import json
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from typing import Any

import pytest

from lightning_core.chat.templates.reasoning import KNOWN, THINK, Delimiters
from lightning_core.chat.tool_calls.tool_formats import FORMATS, ToolFormat, read_message

BY_NAME = {form.name: form for form in FORMATS}
BY_CLOSE = {one.close: one for one in KNOWN}

STRICT = "a malformed call stays in the text"
REST = "the truncated call stays in the text after a complete one"
NATIVE = "text that is neither a message nor a call to a function stays in the text"
DIFFERENT = {
    "deepseek/sglang-v4-self-closing-invoke": STRICT,
    "deepseek/v32-truncated-second-parallel-call": REST,
    "deepseek/v4-truncated-second-parallel-call": REST,
    "deepseek/v41-truncated-second-parallel-call": REST,
    "gemma4/truncated-second-parallel-call": REST,
    "glm/glm47-missing-last-close-arg-value": STRICT,
    "gpt-oss/harmony-truncated-in-header": NATIVE,
    "gpt-oss/llamacpp-builtin-python-recipient": NATIVE,
    "kimi/k2i-vllm-empty-tool-section": STRICT,
    "kimi/k2i-vllm-noise-between-markers": NATIVE,
    "mistral/v13think-stop-at-open-marker": STRICT,
    "mistral/vllm-v11-think-text": "Mistral's reasoning is between [THINK] and [/THINK]",
    "qwen3-hermes/truncated-second-parallel-call": REST,
    "qwen3-xml/bug-coder-missing-tool-call-opener": STRICT,
    "qwen3-xml/bug-missing-close-parameter-before-function": STRICT,
    "qwen3-xml/llamacpp-coder-bare-function": STRICT,
    "qwen3-xml/llamacpp-coder-bare-function-parallel": STRICT,
    "qwen3-xml/llamacpp-q35-call-inside-think": "a call inside reasoning is reasoning",
    "qwen3-xml/q38-truncated-at-tool-call-open": STRICT,
    "qwen3-xml/vllm-coder-missing-close-parameter": STRICT,
}
"""Texts that are read differently here, and why."""


def fixtures() -> list[dict[str, Any]]:
    try:
        found = [Path(str(f.locate())) for f in files("canitoolcall") or () if f.suffix == ".jsonl"]
    except PackageNotFoundError:
        return []
    return [json.loads(line) for path in sorted(found) for line in path.read_text(encoding="utf-8").splitlines()]


def syntax(identifier: str) -> tuple[ToolFormat, Delimiters | None] | None:
    """The format and the delimiters of a text's family; None for Kimi K3, which has a format of its own."""
    family, _, name = identifier.partition("/")
    match family:
        case "deepseek":
            versions = {"v41": "dsml_v4_1", "v4": "dsml_v4", "v32": "dsml"}
            return BY_NAME[next((form for v, form in versions.items() if f"{v}-" in name), "deepseek")], THINK
        case "kimi":
            return None if name.startswith("k3") else (BY_NAME["kimi"], THINK)
        case "llama":
            return BY_NAME["pythonic" if name.startswith("l4") else "llama"], None
        case "gpt-oss":
            return BY_NAME["harmony"], None
        case _:
            form, close = {
                "glm": ("glm", "</think>"),
                "gemma4": ("gemma", "<channel|>"),
                "mistral": ("mistral", "[/THINK]"),
                "qwen3-hermes": ("hermes", "</think>"),
                "qwen3-xml": ("qwen_xml", "</think>"),
            }[family]
            return BY_NAME[form], BY_CLOSE[close]


def read(fixture: dict[str, Any], form: ToolFormat, around: Delimiters | None) -> tuple[str, str, list[Any]]:
    """The text, the reasoning and the calls, without the white space at both ends."""
    text, expected = fixture["raw_output"], fixture.get("expected") or {}
    thought, answer = "", text
    if form.split is not None:
        thought, answer = form.split(text, True)
    elif around is not None:
        prompt = fixture.get("generation_prompt") or ""
        # Some fixtures do not say how the prompt ends.
        begun = bool(expected.get("reasoning_content")) and not text.lstrip().startswith(around.open)
        begun = begun or (not prompt and around.close in text and not text.lstrip().startswith(around.open))
        thought, answer = around.split(text, opened=around.opens(prompt) or begun)
    message = read_message(form, answer or "", tools=fixture.get("tools") or ())
    calls = [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in message.get("tool_calls", ())]
    return (message["content"] or "").strip(), thought.strip(), calls


def agrees(fixture: dict[str, Any], form: ToolFormat, around: Delimiters | None) -> bool:
    content, thought, calls = read(fixture, form, around)
    expected = fixture.get("expected")
    if expected is None:  # a text that is only required to be no call
        return not calls
    wanted = [
        (c["name"], json.loads(c["arguments"]) if isinstance(c["arguments"], str) else c["arguments"])
        for c in expected["tool_calls"]
    ]
    return (content, thought, calls) == (
        (expected["content"] or "").strip(),
        (expected["reasoning_content"] or "").strip(),
        wanted,
    )


@pytest.mark.skipif(not fixtures(), reason="needs canitoolcall")
def test_the_formats_read_what_inference_engines_are_expected_to_read():
    known = [(f, found) for f in fixtures() if (found := syntax(f["id"])) is not None]
    assert len(known) > 400
    assert {f["id"] for f, (form, around) in known if not agrees(f, form, around)} == DIFFERENT.keys()
