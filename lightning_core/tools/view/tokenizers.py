"""The tokenizers of runs, read from local folders: nothing is downloaded, and no code of a model is run."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from lightning_core.chat.token_bytes import BYTE_OF
from lightning_core.records.run_folder.checkpoints import checkpoints
from lightning_core.records.run_folder.runs import RunInfo

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_FILE = "tokenizer.json"
_CONTEXT = 6
"""Number of tokens before the first one that are decoded with it, since some tokenizers write a start differently."""


class Piece(NamedTuple):
    """The text of one token."""

    text: str
    """Empty for a token that ends inside a character; the token that completes the character has the whole character."""
    part: bytes | None = None
    """The token's bytes, if it ends inside a character or is not valid UTF-8. ``text`` writes invalid bytes as ``\\xff``."""


class TokenTexts:
    """Texts of tokens, of one tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        """``tokenizer``: a ``tokenizers.Tokenizer``."""
        self._tokenizer = tokenizer
        self._added = {i: token.content for i, token in tokenizer.get_added_tokens_decoder().items()}
        decoder = tokenizer.decoder
        self._has_bytes = decoder is not None and b'"ByteLevel"' in decoder.__getstate__()

    def pieces(self, ids: Sequence[int], before: Sequence[int] = ()) -> list[Piece]:
        """The text of each token of ``ids``, which follow the prompt ``before``."""
        if self._has_bytes:
            return split_bytes([self._bytes(token) for token in ids])
        return self._differences(ids, before)

    def _bytes(self, token: int) -> bytes:
        if token in self._added:
            return self._added[token].encode()
        name = self._tokenizer.id_to_token(token)
        return b"" if name is None else bytes(BYTE_OF.get(letter, 0x3F) for letter in name)

    def _differences(self, ids: Sequence[int], before: Sequence[int]) -> list[Piece]:
        """The text that each token adds to the tokens before it, as servers decode streams."""
        every = [*before[-_CONTEXT:], *ids]
        first = len(every) - len(ids)
        start, end = 0, first
        pieces: list[Piece] = []
        for at in range(first, len(every)):
            known, now = self._decode(every[start:end]), self._decode(every[start : at + 1])
            byte = _BYTE.fullmatch(self._tokenizer.id_to_token(every[at]) or "")
            part = bytes.fromhex(byte[1]) if byte else None
            if now.endswith("\ufffd") and part is not None and at - end < 3:
                pieces.append(Piece("", part))
                continue
            pieces.append(Piece(now[len(known) :], part))
            start, end = end, at + 1
        return pieces

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False) if ids else ""


def split_bytes(tokens: Sequence[bytes]) -> list[Piece]:
    """The text of each token of a byte-level vocabulary. A character belongs to the token with its last byte."""
    data = b"".join(tokens)
    owner = [index for index, token in enumerate(tokens) for _ in token]
    texts, odd = [""] * len(tokens), [False] * len(tokens)
    at = 0
    while at < len(data):
        length = next((n for n in (1, 2, 3, 4) if _is_character(data[at : at + n])), None)
        if length is None:
            texts[owner[at]] += f"\\x{data[at]:02x}"
            odd[owner[at]] = True
            at += 1
            continue
        owners = owner[at : at + length]
        texts[owners[-1]] += data[at : at + length].decode()
        if owners[0] != owners[-1]:
            for index in owners:
                odd[index] = True
        at += length
    return [Piece(text, token if is_odd else None) for text, token, is_odd in zip(texts, tokens, odd, strict=True)]


def _is_character(data: bytes) -> bool:
    try:
        return len(data.decode()) == 1
    except UnicodeDecodeError:
        return False


class LocalTokenizer(NamedTuple):
    """A tokenizer, or the reason there is none."""

    texts: TokenTexts | None
    problem: str | None


def find_tokenizer(run: RunInfo, policy: str) -> LocalTokenizer:
    """The tokenizer of the model ``policy`` of ``run``: of its newest checkpoint, else of the folder ``policy.model``."""
    try:
        import tokenizers  # pyright: ignore[reportUnusedImport] # noqa: F401
    except ImportError:
        return LocalTokenizer(None, "Token texts need the package 'tokenizers': pip install 'lightning-rl[torch]'.")
    problem = None
    for folder in _folders(run, policy):
        path = folder / _FILE
        try:
            return LocalTokenizer(_load(path, path.stat().st_mtime_ns), None)
        except FileNotFoundError:
            continue
        except Exception as error:  # noqa: BLE001 - tokenizers has no exception class
            problem = f"The tokenizer {str(path)!r} cannot be read: {error}"
    missing = f"Token texts need a tokenizer: {_FILE} in a checkpoint of the run, or in the folder policy.model."
    return LocalTokenizer(None, problem or missing)


def _folders(run: RunInfo, policy: str) -> Iterator[Path]:
    policies = _section(run.config, "policies")
    for checkpoint in reversed(checkpoints(run.folder)):
        # Only names of the configuration, since ``policy`` is a server's own name.
        yield checkpoint / policy if policy in policies else checkpoint
    for section in (_section(policies, policy), _section(run.config, "policy")):
        model = section.get("model")
        # A name on the Hub is not a folder here.
        if isinstance(model, str) and (folder := Path(model).expanduser()).is_dir():
            yield folder


def _section(config: Mapping[str, Any], *keys: str) -> Mapping[str, Any]:
    section: Any = config
    for key in keys:
        section = section.get(key) if isinstance(section, Mapping) else None
    return section if isinstance(section, Mapping) else {}


@lru_cache(maxsize=4)
def _load(path: Path, _changed: int) -> TokenTexts:
    from tokenizers import Tokenizer

    return TokenTexts(Tokenizer.from_file(str(path)))
