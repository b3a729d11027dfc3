"""Compressed bodies of requests, within a limit of their size."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

_GZIP, _ZLIB, _RAW = 31, 15, -15
_FORMATS = {"gzip": (_GZIP,), "x-gzip": (_GZIP,), "deflate": (_ZLIB, _RAW)}
"""The ``wbits`` of zlib to try for each encoding: ``deflate`` is sent in both formats."""

SUPPORTED = ("gzip", "deflate")


def encodings(header: str) -> list[str]:
    """The encodings of a ``content-encoding`` header, in the order in which they were applied."""
    names = (name.strip().lower() for name in header.split(","))
    return [name for name in names if name not in ("", "identity")]


def decompress(data: bytes, encodings: Sequence[str], *, most_bytes: int) -> bytes:
    """``data`` without its ``encodings``; more than ``most_bytes`` bytes if it is larger, but not all of it.

    Raises LookupError for an encoding that is not in `SUPPORTED`, and ValueError for data that does not have its encoding.
    """
    for encoding in reversed(encodings):
        if encoding not in _FORMATS:
            raise LookupError(encoding)
        data = _inflate(data, encoding, most_bytes + 1)
    return data


def _inflate(data: bytes, encoding: str, most: int) -> bytes:
    error = zlib.error("it is empty")
    for wbits in _FORMATS[encoding] if data else ():
        try:
            return _inflate_members(data, wbits, most)
        except zlib.error as failure:
            error = failure
    raise ValueError(f"the data is not {encoding}: {error}")


def _inflate_members(data: bytes, wbits: int, most: int) -> bytes:
    """The contents of ``data``, up to ``most`` bytes. A gzip file may have several members."""
    plain = b""
    while data and len(plain) < most:
        inflate = zlib.decompressobj(wbits)
        plain += inflate.decompress(data, most - len(plain))
        if not inflate.eof and len(plain) < most:
            raise zlib.error("it is incomplete")
        data = inflate.unused_data
    return plain
