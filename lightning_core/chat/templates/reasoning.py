"""Splits reasoning from the answer, between delimiters such as ``<think>`` and ``</think>``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

_TAG = re.compile(r"<[^<>\s]{2,40}>|\[[^\[\]\s]{2,40}\]|◁[^◁▷]{2,40}▷")


Thought = Literal["none", "open", "closed"]
"""The reasoning of the response in its prompt: none yet, its beginning, or all of it."""


@dataclass(frozen=True, slots=True)
class Delimiters:
    """The texts around reasoning."""

    open: str
    close: str

    def split(self, text: str, *, opened: bool, final: bool = True) -> tuple[str, str | None]:
        """The reasoning and the answer of a response; the answer is None until the reasoning ends.

        ``opened``: the prompt ended with the opening text, as with some templates. ``final``: the response is complete; otherwise a
        prefix of the opening text counts as reasoning.
        """
        start = text.lstrip()
        if not opened and not start.startswith(self.open):
            undecided = not final and self.open.startswith(start)
            return "", None if undecided else text
        inner = start.removeprefix(self.open)
        if not final and self.open.startswith(start):
            return "", None
        thought, closed, answer = inner.partition(self.close)
        return thought.strip(), answer.lstrip("\n") if closed else None

    def opens(self, prompt: str) -> bool:
        """Whether the rendered ``prompt`` ends with the opening text."""
        return prompt.rstrip().endswith(self.open)

    def thought(self, prompt: str) -> Thought:
        """The reasoning of the response in the rendered ``prompt``."""
        if self.opens(prompt):
            return "open"
        return "closed" if prompt.rstrip().endswith(self.close) else "none"

    def write(self, thought: str, answer: str) -> str:
        """A response with ``thought``, for templates without a field for it."""
        line = "\n" if self == THINK else ""
        return f"{self.open}{line}{thought}{line}{self.close}{line * 2}{answer}"


THINK = Delimiters("<think>", "</think>")
KNOWN = (
    THINK,
    Delimiters("[THINK]", "[/THINK]"),
    Delimiters("<|channel>thought", "<channel|>"),
    Delimiters("◁think▷", "◁/think▷"),
    Delimiters("<seed:think>", "</seed:think>"),
    Delimiters("<|START_THINKING|>", "<|END_THINKING|>"),
    Delimiters("<|inner_prefix|>", "<|inner_suffix|>"),
)
"""The delimiters of Qwen, DeepSeek, GLM, Nemotron, MiniMax and others; Magistral; Gemma 4; Kimi-VL; Seed-OSS; Command A; Apertus."""


def find_delimiters(before: str, after: str) -> Delimiters | None:
    """The delimiters of a thought that a template rendered between ``before`` and ``after``."""
    before, after = before.rstrip(), after.lstrip()
    for known in KNOWN:
        if before.endswith(known.open) and after.startswith(known.close):
            return known
    opening = [match for match in _TAG.finditer(before) if match.end() == len(before)]
    closing = _TAG.match(after)
    return Delimiters(opening[0][0], closing[0]) if opening and closing else None
