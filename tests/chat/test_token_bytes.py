"""The bytes of single tokens: those of consecutive tokens are those of the text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from lightning_core.backends.scripted import ByteTokenizer
from lightning_core.chat.chat import Chat
from lightning_core.chat.token_bytes import token_bytes
from tests.chat.test_chat import TEMPLATE, make_tokenizer
from tests.tiny_model import make_tiny_tokenizer

TEXT = "the answer, hällo ✓ 𝄞\n  x"


def sentencepiece() -> Any:
    """A vocabulary of whole words with a byte fallback, as Llama 2 and Gemma have."""
    words = ["<unk>", "<|im_start|>", "<|im_end|>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words += ["▁", "▁the", "▁answer", ",", "h", "l", "o", "x", "▁h", "ä"]
    inner = Tokenizer(models.Unigram([(word, -2.0) for word in words], unk_id=0, byte_fallback=True))
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    inner.decoder = decoders.Sequence([
        decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0),
    ])  # fmt: skip
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="<|im_end|>", extra_special_tokens=["<|im_start|>"]
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@pytest.mark.parametrize("kind", ["bytes", "byte-level", "merged", "sentencepiece"])
def test_the_bytes_of_tokens_add_up_to_the_text(kind: str, tmp_path: Path) -> None:
    makers = {
        "bytes": ByteTokenizer,
        "byte-level": lambda: make_tiny_tokenizer(tmp_path),
        "merged": make_tokenizer,
        "sentencepiece": sentencepiece,
    }
    chat = Chat(makers[kind]())
    ids = chat.tokenizer.encode(TEXT, add_special_tokens=False, split_special_tokens=True)
    parts = [token_bytes(chat, token) for token in ids]
    assert None not in parts
    assert b"".join(part or b"" for part in parts).lstrip(b" ") == TEXT.encode()
    assert any(b"\x9d" in (part or b"") and part != "𝄞".encode() for part in parts), (
        "the last letter has several tokens"
    )
    assert token_bytes(chat, chat.tokenizer.convert_tokens_to_ids("<|im_end|>")) == b""
