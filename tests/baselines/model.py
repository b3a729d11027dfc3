"""A model without weights: responses drawn from lists, and numbers that are hashes of tokens.

Everything is determined by the tokens read, the seed of the request and the version of the policy. There is no arithmetic on floats
that a CPU could round in another way.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

import numpy as np

from lightning_core.backends.backend import Delta, SamplingParams
from lightning_core.backends.scripted import ByteTokenizer
from lightning_core.testing import tool_call
from lightning_core.trace import BASE, Floats

WORDS = ("ah", "bee", "coda", "dim", "ebb", "fig", "Gus", "HUB", "9 to 5", "jazz", "qx", "vowel")
PLANS = (
    tool_call("look", page=0),
    tool_call("look", page=1),
    tool_call("look", page=2),
    tool_call("lock", page=1),
    "plan: say little",
    "plan: say a lot, and say it well",
)
MAX_CONTEXT = 4096


class FastByteTokenizer(ByteTokenizer):
    """`ByteTokenizer` that also reports the characters of each token, as `transformers` does for fast tokenizers."""

    is_fast = True

    def __call__(
        self, text: str, *, add_special_tokens: bool, split_special_tokens: bool, return_offsets_mapping: bool
    ) -> Mapping[str, Any]:
        del return_offsets_mapping
        offsets: list[tuple[int, int]] = []
        ids = self.encode(text, add_special_tokens=add_special_tokens, split_special_tokens=split_special_tokens)
        start = 0
        while len(offsets) < len(ids):
            special = self.decode([ids[len(offsets)]], skip_special_tokens=False) if ids[len(offsets)] > 255 else ""
            stop = start + max(1, len(special))
            offsets += [(start, stop)] * (1 if special else len(text[start].encode()))
            start = stop
        return {"input_ids": ids, "offset_mapping": offsets}


def numbers(*parts: object) -> random.Random:
    """Random numbers that are determined by ``parts``."""
    return random.Random(hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest())


def logprobs(source: random.Random, count: int) -> Floats:
    """``count`` logprobs: multiples of 1/64, so that float32 sums are exact."""
    return np.array([-source.randrange(256) / 64 for _ in range(count)], dtype="<f4")


def respond(prompt: str, source: random.Random) -> str:
    """A response to the text of a prompt: a judge's scores, a plan or a tool call, or words."""
    if "attempts at the same task follow" in prompt:
        attempts = len(re.findall(r"^--- Attempt \d+$", prompt, re.MULTILINE))
        names = re.findall(r"\"(\w+)\": \[\d+ whole numbers", prompt.rpartition("Answer as JSON")[2])
        return json.dumps({name: [source.randrange(11) for _ in range(attempts)] for name in names})
    if '"look"' in prompt:
        return source.choice(PLANS)
    return " ".join(source.choice(WORDS) for _ in range(source.randrange(1, 5)))


class SeededBackend:
    """Samples `respond`, with the seed of the request. Implements `Backend`; ``versions``: of the live policies, by name."""

    max_context = MAX_CONTEXT

    def __init__(self, versions: Mapping[str, int]) -> None:
        self.models = (*versions, BASE)
        self._versions = versions
        self._tokenizer = FastByteTokenizer()

    def check(self, params: SamplingParams) -> None:
        """Accepts every request."""

    async def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, *, model: str, stream: bool = False
    ) -> AsyncGenerator[Delta]:
        """See `Backend.generate`."""
        del stream
        version = self._versions.get(model)
        source = numbers(list(prompt_ids), params.seed, params.temperature, params.json_schema, model, version)
        text = respond(self._tokenizer.decode(list(prompt_ids), skip_special_tokens=False), source)
        ids = [*text.encode(), *params.stop_token_ids][: params.max_tokens]
        yield Delta(
            token_ids=ids,
            logprobs=logprobs(source, len(ids)).tolist(),
            version=version,
            finish_reason="stop" if ids[-1] in params.stop_token_ids else "length",
        )
