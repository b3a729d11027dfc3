"""A prompt without a chat, as tokens: its text is the whole prompt, and no template is applied.

Whoever writes such a prompt frames it himself, so special tokens are read as what they are, and the tokenizer begins it as it begins
every text (some with a token of its own).
"""

from __future__ import annotations

from collections.abc import Sized
from typing import cast

from lightning_core.errors import PolicyRequestError
from lightning_core.policy.chat import Chat, Prompt
from lightning_core.policy.dialects.exchange import PlainPrompt


def render_plain(chat: Chat, prompt: PlainPrompt) -> Prompt:
    """``prompt`` as tokens of ``chat``'s model.

    Raises `PolicyRequestError` if it has no tokens, or one that the model does not know.
    """
    tokenizer = chat._tokenizer  # pyright: ignore[reportPrivateUsage]
    if isinstance(prompt, str):
        with chat._lock:  # pyright: ignore[reportPrivateUsage]
            ids = tuple(tokenizer.encode(prompt, add_special_tokens=True, split_special_tokens=False))
    else:
        ids = tuple(prompt)
        vocabulary = len(cast(Sized, tokenizer))
        for token in ids:
            if not 0 <= token < vocabulary:
                raise PolicyRequestError(
                    f"prompt has the token {token}; the model's are those from 0 to {vocabulary - 1}", param="prompt"
                )
    if not ids:
        raise PolicyRequestError("prompt is empty; expected at least one token", param="prompt")
    text = prompt if isinstance(prompt, str) else chat.text(ids)
    return Prompt(ids=ids, text=text, messages=(), tools="", context="new")
