"""An agent that counts what its first request with openai imports."""

from __future__ import annotations

import sys
from typing import Any

import openai

SHARED = ("httpcore", "httpcore2", "openai.resources.chat.", "openai.lib.streaming.chat")


def first_request(task: Any) -> float:
    """The number of modules of the client and its connections that the request imports."""
    before = set(sys.modules)
    openai.OpenAI(api_key="none").chat.completions.create(model="policy", messages=[{"role": "user", "content": "hi"}])
    return float(sum(name.startswith(SHARED) for name in sys.modules.keys() - before))
