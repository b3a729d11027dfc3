"""A model without weights: it samples any of the tokens that a constraint allows."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from functools import cached_property
from random import Random
from typing import Any, Literal

import numpy as np

from lightning_core.backends.backend import Delta, SamplingParams
from lightning_core.chat.chat import Chat
from lightning_core.model.constraint import Constraints
from tests.chat.chat_families import Family, encode, make_chat, make_tokenizer

_CLOSERS = ('"', "'", "<", "/", "}", "]", ")", ",", "\\", "[")


class Walker:
    """Walks through the constraints on the responses of a family, in a hurry to end."""

    def __init__(self, family: Family) -> None:
        self.chat: Chat = make_chat(family)
        self._tokenizer = make_tokenizer(family)
        added = self._tokenizer.get_added_vocab()
        self._size = max(len(self._tokenizer), *(i + 1 for i in added.values()))
        texts = [self._tokenizer.decode([i]) for i in range(self._size)]
        self._closes = np.array([text.startswith(_CLOSERS) for text in texts])

    @cached_property
    def _constraints(self) -> Constraints:
        return Constraints(self._tokenizer, self._size)

    def accepts(self, params: SamplingParams, ids: Sequence[int]) -> bool:
        """Whether ``ids`` satisfy the constraint of ``params``."""
        assert params.constraint is not None
        masks = self._constraints.allowed(params.constraint, ids)
        return all(mask[token] for mask, token in zip(masks, ids, strict=True))

    def walk(self, params: SamplingParams, random: Random) -> list[int]:
        """A response under the constraint of ``params``."""
        assert params.constraint is not None
        state = self._constraints.start(params.constraint)
        ids: list[int] = []
        while len(ids) < params.max_tokens and not (ids and ids[-1] in params.stop_token_ids):
            allowed_V = state.allowed()[: self._size]
            stops = [i for i in params.stop_token_ids if allowed_V[i]]
            closers = np.flatnonzero(allowed_V & self._closes)
            if stops and random.random() < 0.4:
                token = random.choice(stops)
            elif len(closers) and random.random() < 0.7:
                token = int(random.choice(closers))
            else:
                token = int(random.choice(np.flatnonzero(allowed_V)))
            state.accept(token)
            ids.append(token)
        return ids


class WalkBackend:
    """Samples by a `Walker`, and by ``script`` where nothing is constrained. ``sampled``: the prompts and parameters so far."""

    models = ("policy", "base")
    max_context = 1 << 20

    def __init__(self, family: Family, script: Callable[[str], str]) -> None:
        self.walker = Walker(family)
        self._family = family
        self._script = script
        self.sampled: list[tuple[str, SamplingParams]] = []

    def check(self, params: SamplingParams) -> None:
        """Refuse schemas that are not supported."""
        if params.constraint is not None:
            self.walker._constraints.start(params.constraint)

    async def generate(
        self, prompt_ids: Any, params: SamplingParams, *, model: str, stream: bool = False
    ) -> AsyncGenerator[Delta]:
        """See `Backend.generate`."""
        prompt = make_tokenizer(self._family).decode(list(prompt_ids))
        self.sampled.append((prompt, params))
        if params.constraint is not None:
            ids = self.walker.walk(params, Random(len(self.sampled)))
        else:
            ids = encode(self._family, self._script(prompt))[: params.max_tokens]
        finish: Literal["stop", "length"] = "stop" if ids[-1] in params.stop_token_ids else "length"
        size = 3 if stream else len(ids)
        for start in range(0, len(ids), size):
            part, last = ids[start : start + size], start + size >= len(ids)
            logprobs = [-0.5] * len(part)
            yield Delta(token_ids=part, logprobs=logprobs, version=None, finish_reason=finish if last else None)
