"""The body of a response of aiohttp, whose parts are noted when the client reads them."""

from __future__ import annotations

from typing import Any

import wrapt

from lightning_core.tools.record.observed import ObservedCall


def observe_body(reader: Any, call: ObservedCall) -> Any:
    """``reader``, the content of a response, in a proxy of the same class."""
    return _ObservedReader(reader, call)


class _ObservedReader(wrapt.ObjectProxy[Any]):
    """Methods that read by other methods are called with the proxy, so each part is noted once."""

    def __init__(self, reader: Any, call: ObservedCall) -> None:
        super().__init__(reader)
        self._self_call = call

    def _note(self, data: bytes) -> bytes:
        self._self_call.add(data)
        if self.__wrapped__.at_eof():
            self._self_call.end()
        return data

    async def _read(self, name: str, *args: Any, **kwargs: Any) -> Any:
        try:
            found = await getattr(self.__wrapped__, name)(*args, **kwargs)
        except BaseException as error:
            self._self_call.fail(error)
            raise
        self._note(found[0] if isinstance(found, tuple) else found)
        return found

    async def read(self, *args: Any, **kwargs: Any) -> bytes:
        return await self._read("read", *args, **kwargs)

    async def readany(self) -> bytes:
        return await self._read("readany")

    async def readline(self, *args: Any, **kwargs: Any) -> bytes:
        return await self._read("readline", *args, **kwargs)

    async def readuntil(self, *args: Any, **kwargs: Any) -> bytes:
        return await self._read("readuntil", *args, **kwargs)

    async def readexactly(self, *args: Any, **kwargs: Any) -> bytes:
        return await self._read("readexactly", *args, **kwargs)

    async def readchunk(self) -> tuple[bytes, bool]:
        return await self._read("readchunk")

    def read_nowait(self, *args: Any, **kwargs: Any) -> bytes:
        return self._note(self.__wrapped__.read_nowait(*args, **kwargs))

    def iter_chunked(self, n: int) -> Any:
        return type(self.__wrapped__).iter_chunked(self, n)

    def iter_any(self) -> Any:
        return type(self.__wrapped__).iter_any(self)

    def iter_chunks(self) -> Any:
        return type(self.__wrapped__).iter_chunks(self)

    def __aiter__(self) -> Any:
        return type(self.__wrapped__).__aiter__(self)

    def __del__(self) -> None:
        self._self_call.leave()
