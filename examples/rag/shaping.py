"""An intermediate reward for `multihop_agent`, computed from its calls alone; see ``credit.air.rules``."""

from __future__ import annotations

from collections.abc import Sequence

from examples.rag.reward import normalize
from lightning_core.credit.signals import ToolSignal
from lightning_core.trace import Call


def follows_up(call: Call, tools: Sequence[ToolSignal]) -> float:
    """1 for a second search for words of the first result that are not all in the question, else 0."""
    said = [str(message["content"]) for message in call.messages]
    kind, _, query = str((call.response or {}).get("content", "")).strip().partition(": ")
    if kind != "Search" or len(said) < 3 or not said[-1].startswith("Result 1: "):
        return 0.0
    words, question, result = set(normalize(query)), set(normalize(said[-3])), set(normalize(said[-1]))
    return float(bool(words - question) and words <= result)
