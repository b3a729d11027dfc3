"""A backend that answers from a script, for tests, docs and trials without a model.

Everything else is real: HTTP, tokens, logprobs, spans.
"""

from __future__ import annotations

import asyncio
import itertools
import re
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from typing import Any, Literal

from lightning_core.backends.backend import Delta, SamplingParams
from lightning_core.trace import BASE, POLICY

_SPECIALS = ("<|im_start|>", "<|im_end|>")
_SPLIT = re.compile("(" + "|".join(re.escape(s) for s in _SPECIALS) + ")")


class ByteTokenizer:
    """UTF-8 bytes as tokens 0–255, and the two special tokens of ChatML."""

    chat_template = "ChatML over bytes"
    all_special_tokens: list[str] = list(_SPECIALS)  # noqa: RUF012 - the name and type that Hugging Face tokenizers have
    eos_token = "<|im_end|>"

    def __len__(self) -> int:
        return 256 + len(_SPECIALS)

    def get_added_vocab(self) -> dict[str, int]:
        return {token: self.convert_tokens_to_ids(token) for token in _SPECIALS}

    def apply_chat_template(
        self,
        conversation: list[dict[str, Any]],
        *,
        tools: list[Any] | None,
        add_generation_prompt: bool,
        tokenize: Literal[False],
        **variables: Any,
    ) -> str:
        del tools, tokenize, variables
        text = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in conversation)
        return text + ("<|im_start|>assistant\n" if add_generation_prompt else "")

    def encode(self, text: str, *, add_special_tokens: bool, split_special_tokens: bool) -> list[int]:
        del add_special_tokens
        if split_special_tokens:
            return list(text.encode())
        ids: list[int] = []
        for part in _SPLIT.split(text):
            ids += [self.convert_tokens_to_ids(part)] if part in _SPECIALS else part.encode()
        return ids

    def decode(
        self, token_ids: list[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool = False
    ) -> str:
        del clean_up_tokenization_spaces
        pieces: list[bytes] = []
        for token in token_ids:
            if token < 256:
                pieces.append(bytes([token]))
            elif not skip_special_tokens:
                pieces.append(_SPECIALS[token - 256].encode())
        return b"".join(pieces).decode(errors="replace")

    def convert_ids_to_tokens(self, ids: int) -> str:
        return f"<0x{ids:02X}>" if ids < 256 else _SPECIALS[ids - 256]

    def convert_tokens_to_ids(self, tokens: str) -> int:
        return 256 + _SPECIALS.index(tokens)


class EveryModel(tuple[str, ...]):
    """Contains every model name, so no request is forwarded to a real provider."""

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str)


class ScriptedBackend:
    """Answers with ``script(prompt text)``, or with the next string of ``script``.

    Every logprob is ``logprob``. ``typed`` answers requests with a JSON schema in place of the script, from the schema.

    ``models`` are live policies of ``version``, except ``base``.
    """

    def __init__(
        self,
        script: Callable[[str], str] | Iterable[str],
        *,
        models: Sequence[str] = (POLICY, BASE),
        typed: Callable[[str], str] | None = None,
        version: int = 0,
        logprob: float = -0.5,
        delay: float = 0.0,
        max_context: int = 1 << 20,
    ) -> None:
        self._script = script if callable(script) else _next_answer(iter(script))
        self._typed = typed
        self._tokenizer = ByteTokenizer()
        self.models = tuple(models)
        self.version = version
        self.max_context = max_context
        self._logprob = logprob
        self._delay = delay
        """Seconds before the response, and between its deltas when streaming."""

    @property
    def tokenizer(self) -> ByteTokenizer:
        """The tokenizer of this backend."""
        return self._tokenizer

    def check(self, params: SamplingParams) -> None:
        """Accepts every request: a script is not constrained."""

    async def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, *, model: str, stream: bool = False
    ) -> AsyncGenerator[Delta]:
        """Return the next answer of the script; see `Backend.generate`."""
        if self._typed is not None and params.json_schema is not None:
            answer = self._typed(params.json_schema)
        else:
            answer = self._script(self._tokenizer.decode(list(prompt_ids), skip_special_tokens=False))
        ids = [*answer.encode(), self._tokenizer.convert_tokens_to_ids("<|im_end|>")]
        finish: Literal["stop", "length"] = "stop"
        if len(ids) > params.max_tokens:
            ids, finish = ids[: params.max_tokens], "length"
        size = 4 if stream else len(ids)
        for start in range(0, len(ids), size):
            if self._delay:
                await asyncio.sleep(self._delay)
            part = ids[start : start + size]
            last = start + size >= len(ids)
            yield Delta(
                token_ids=part,
                logprobs=[self._logprob] * len(part),
                version=None if model == BASE else self.version,
                finish_reason=finish if last else None,
            )


def _next_answer(answers: Iterator[str]) -> Callable[[str], str]:
    numbers = itertools.count()

    def play(prompt: str) -> str:
        try:
            answer = next(answers)
        except StopIteration:
            raise RuntimeError(
                f"the script has no more answers after {next(numbers)}; the prompt of this request ends with {prompt[-200:]!r}"
            ) from None
        next(numbers)
        return answer

    return play
