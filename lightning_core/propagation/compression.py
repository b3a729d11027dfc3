"""Compressed bodies of requests, within a limit of their size."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

_GZIP, _ZLIB, _RAW = 31, 15, -15
_FORMATS = {"gzip": (_GZIP,), "x-gzip": (_GZIP,), "deflate": (_ZLIB, _RAW)}
"""The ``wbits`` of zlib to try for each encoding: ``deflate`` is sent in both formats."""

SUPPORTED = ("gzip", "deflate")
_MOST_ENCODINGS = 2
"""Each may multiply the work by a thousand."""


def encodings(header: str) -> list[str]:
    """The encodings of a ``content-encoding`` header, in the order in which they were applied."""
    names = (name.strip().lower() for name in header.split(","))
    return [name for name in names if name not in ("", "identity")]


def decompress(data: bytes, encodings: Sequence[str], *, most_bytes: int) -> bytes:
    """``data`` without its ``encodings``; if it is larger, only a part with more than ``most_bytes`` bytes.

    Raises LookupError for an encoding that is not in `SUPPORTED`, and ValueError for data that does not have its encoding, for a gzip
    file of several members, and for more than two encodings.
    """
    if len(encodings) > _MOST_ENCODINGS:
        raise ValueError(f"at most {_MOST_ENCODINGS} encodings are supported")
    for encoding in reversed(encodings):
        if encoding not in _FORMATS:
            raise LookupError(encoding)
        data = _inflate(data, encoding, most_bytes + 1)
    return data


def _inflate(data: bytes, encoding: str, most: int) -> bytes:
    error = "it is empty"
    for wbits in _FORMATS[encoding] if data else ():
        inflate = zlib.decompressobj(wbits)
        try:
            plain = inflate.decompress(data, most)
        except zlib.error as failure:
            error = str(failure)
            continue
        if len(plain) >= most:
            return plain
        if not inflate.eof:
            raise ValueError(f"the data is not {encoding}: it is incomplete")
        if inflate.unused_data.strip(b"\0"):
            raise ValueError(f"the data has more than one part of {encoding}")
        return plain
    raise ValueError(f"the data is not {encoding}: {error}")
