"""The chat templates in TRL's wheel, which are the models' own, with small tokenizers that have their special tokens.

The wheel is installed without its dependencies; nothing of it is imported.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from typing import Any

import pytest

from tests.chat.chat_families import FAMILIES, TEMPLATES, Family

FORMATS = {
    "deepseekv3": "deepseek",
    "diffusion_gemma": "gemma",
    "gemma4_v5": "gemma",
    "glm4moe": "glm",
    "gptoss": "harmony",
    "lfm2_2_5": "lfm2",
    "lfm2_2_5_v2": "lfm2",
    "lfm2_v2": "lfm2",
    "llama3_1": "llama",
    "llama3_2": "llama",
    "nemotron_3_5_lightning": "qwen_xml",
    "nemotron_3_nano": "qwen_xml",
    "nemotron_3_super": "qwen_xml",
    "nemotron_3_ultra": "qwen_xml",
    "qwen2_5": "hermes",
    "qwen3": "hermes",
    "qwen3_5_nothink": "qwen_xml",
    "qwen3_5_think": "qwen_xml",
    "qwen3_6": "qwen_xml",
    "qwen3_8": "qwen_xml",
    "qwen3_instruct_2507": "hermes",
    "qwen3_vl": "hermes",
}
"""The format of each template of the wheel that writes tool calls."""
LOCAL = {
    "deepseek_v3_1": "deepseek",
    "deepseek_v3_2": "dsml",
    "kimi_k2": "kimi",
    "llama4": "pythonic",
    "magistral": "mistral",
    "minimax_m2": "minimax",
}
"""The same of templates in `TEMPLATES`, of models that the wheel does not have."""
MADE = {f"similar to {own.name}": own for own in FAMILIES if own.name not in ("qwen3_coder", "deepseek_r1")}
"""Families with a template that is similar to their own. The one of Qwen's coder writes nested arguments as Python does, and R1's
leaves out reasoning."""
OTHERS = ("cohere", "cohere2", "deepseek_r1_distill", "gemma", "gemma3", "idefics3", "lfm2", "llama3", "llava_next", "phi3", "phi3_5",
          "qwen2_5_vl", "smolvlm")  # fmt: skip
"""Templates without calls of their own, or with calls that they lose."""

_TOKEN = re.compile(
    r"<\|[^|<>\s]+\|>|<｜[^<>｜]+｜>|<\|[a-z_]+>|<[a-z_]+\|>|<\|\"\|>|\[gMASK\]|<sop>|\]~!?b\[?\]?|\[e~\[|｜DSML｜|\[/?[A-Z_]+\]"
    r"|</?(?:think|tool_call|tool_response|arg_key|arg_value)>|<(?:start_of_turn|end_of_turn|end_of_utterance|image)>"
)
_ENDS = ("<|im_end|>", "<|eot_id|>", "<｜end▁of▁sentence｜>", "</s>", "<turn|>", "<|return|>", "<end_of_turn>", "<end_of_utterance>",
         "<|END_OF_TURN_TOKEN|>", "<|end|>", "[e~[", "<|eot|>")  # fmt: skip


@cache
def folder() -> Path | None:
    """The folder with the templates; None if the wheel is not installed."""
    try:
        found = [f for f in files("trl") or () if f.match("chat_templates/qwen3.jinja")]
    except PackageNotFoundError:
        return None
    return Path(str(found[0].locate())).parent if found else None


@cache
def family(name: str) -> Family:
    """The family of the template ``name``. Its end of text is the token that ends a turn."""
    if name in MADE:
        return MADE[name]
    where = TEMPLATES if name in LOCAL else folder()
    assert where is not None
    text = (where / f"{name}.jinja").read_text(encoding="utf-8")
    tokens = sorted(set(_TOKEN.findall(text)))
    eos = next((t for t in _ENDS if t in tokens), "<|endoftext|>")
    added = tuple(t for t in tokens if t in ("<think>", "</think>", "<tool_call>", "</tool_call>"))
    specials = tuple(dict.fromkeys([eos, "<s>", *(t for t in tokens if t not in added)]))
    return Family(
        name=name,
        eos=eos,
        bos="<s>",
        specials=specials,
        added=added,
        source=text,
        stops=(eos,),
        format={**FORMATS, **LOCAL}.get(name, "hermes"),
    )


def each_with_some(templates: Sequence[Any], name: str, values: Sequence[Any], count: int) -> pytest.MarkDecorator:
    """Every template with each of ``values``; the short form has each template with ``count`` of them."""
    pairs: list[Any] = []
    for i, template in enumerate(templates):
        template, marks = (template, ()) if isinstance(template, str) else (template.values[0], template.marks)
        short = {(i * count + n) % len(values) for n in range(count)}
        for j, value in enumerate(values):
            long = () if j in short else (pytest.mark.long,)
            pairs.append(pytest.param(template, value, marks=(*marks, *long), id=f"{template}-{j}"))
    return pytest.mark.parametrize(("name", name), pairs)
