"""Patches of the HTTP client libraries: they observe model calls, and change nothing of them.

Each library is patched when the program has imported it. A response that a client reads as a whole is taken as a whole; of a stream, each
part is noted when the client reads it.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Mapping
from functools import partial
from typing import Any, Protocol

import wrapt

from lightning_core.capture.import_hooks import when_imported
from lightning_core.capture.patching import Patches
from lightning_core.propagation.clients.aiohttp_client import body_of, read_arguments
from lightning_core.propagation.clients.httpx_clients import own_body
from lightning_core.propagation.clients.urllib3_pools import absolute_url
from lightning_core.propagation.shapes import Body, Compressed, seen_body
from lightning_core.tools.record.aiohttp_bodies import observe_body
from lightning_core.tools.record.observed import ObservedCall, sending

ClientRequest = tuple[str, str, Body | Compressed]
"""The method, the URL and the body of a request."""


class CallObserver(Protocol):
    """Decides which requests are observed. Its methods never raise."""

    def observe(self, read: Callable[[], ClientRequest]) -> ObservedCall | None:
        """The call that a request is; None for other requests, and for calls that are not recorded."""
        ...

    def guard(self, note: Callable[[], None]) -> None:
        """Call ``note``; its errors are counted."""
        ...

    def miss(self, call: ObservedCall) -> None:
        """Count a call whose response cannot be observed."""
        ...


def install_observers(patches: Patches, observer: CallObserver) -> None:
    """Observe the requests of all supported client libraries."""
    for name in ("httpx", "httpx2"):
        when_imported(patches, name, partial(_install_httpx, patches, observer))
    when_imported(patches, "requests", partial(_install_requests, patches, observer))
    when_imported(patches, "aiohttp", partial(_install_aiohttp, patches, observer))
    when_imported(patches, "urllib3", partial(_install_urllib3, patches, observer))


def _install_httpx(patches: Patches, observer: CallObserver, httpx: Any) -> None:
    class ObservedStream(httpx.SyncByteStream):
        def __init__(self, stream: Any, call: ObservedCall) -> None:
            self._stream, self._call = stream, call

        def __iter__(self) -> Generator[bytes]:
            try:
                for part in self._stream:
                    self._call.add(part)
                    yield part
            except BaseException as error:
                self._call.fail(error)
                raise
            self._call.end()

        def close(self) -> None:
            try:
                self._stream.close()
            finally:
                self._call.leave()

        def __del__(self) -> None:
            self._call.leave()

    class ObservedAsyncStream(httpx.AsyncByteStream):
        def __init__(self, stream: Any, call: ObservedCall) -> None:
            self._stream, self._call = stream, call

        async def __aiter__(self) -> AsyncGenerator[bytes]:
            try:
                async for part in self._stream:
                    self._call.add(part)
                    yield part
            except BaseException as error:
                self._call.fail(error)
                raise
            self._call.end()

        async def aclose(self) -> None:
            try:
                await self._stream.aclose()
            finally:
                self._call.leave()

        def __del__(self) -> None:
            self._call.leave()

    def note(call: ObservedCall, response: Any, stream: type) -> None:
        encoding = response.headers.get("content-encoding")
        decode = None if encoding is None else partial(_decode, httpx.Response, encoding)
        try:
            content = response.content
        except httpx.ResponseNotRead:
            call.respond(response.status_code, response.headers.get("content-type", ""), decode)
            response.stream = stream(response.stream, call)
            return
        _note_whole(call, response.status_code, response.headers, content)

    def observed(args: tuple[Any, ...], kwargs: dict[str, Any]) -> ObservedCall | None:
        def read() -> ClientRequest:
            request = args[0] if args else kwargs["request"]
            return request.method, str(request.url), own_body(request)

        return observer.observe(read)

    def send(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if (call := observed(args, kwargs)) is None:
            return wrapped(*args, **kwargs)
        with sending(call):
            response = wrapped(*args, **kwargs)
        observer.guard(lambda: note(call, response, ObservedStream))
        return response

    def send_async(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if (call := observed(args, kwargs)) is None:
            return wrapped(*args, **kwargs)
        return _await(
            call, wrapped(*args, **kwargs), observer, lambda response: note(call, response, ObservedAsyncStream)
        )

    patches.wrap(httpx, "Client.send", send)
    patches.wrap(httpx, "AsyncClient.send", send_async)


def _decode(response: Callable[..., Any], encoding: str, data: bytes) -> bytes:
    """``data`` without its encoding, as the client itself decodes it."""
    return response(200, headers=[("content-encoding", encoding)], content=data).content


async def _await(call: ObservedCall, sent: Awaitable[Any], observer: CallObserver, note: Callable[[Any], None]) -> Any:
    with sending(call):
        response = await sent
    observer.guard(lambda: note(response))
    return response


def _note_whole(call: ObservedCall, status: int, headers: Mapping[str, str], content: bytes) -> None:
    call.respond(status, headers.get("content-type", ""))
    call.add(content)
    call.end()


class _ObservedRaw(wrapt.ObjectProxy[Any]):
    """The response of urllib3 below a streamed response of ``requests``, which reads it decoded by `stream`.

    A program that reads it by other methods gets bytes that may be encoded, or only some of them: that call is counted as left out.
    """

    def __init__(self, raw: Any, call: ObservedCall, observer: CallObserver) -> None:
        super().__init__(raw)
        self._self_call, self._self_observer = call, observer

    def _miss(self) -> Any:
        if self._self_call.drop():
            self._self_observer.miss(self._self_call)
        return self.__wrapped__

    def read(self, *args: Any, **kwargs: Any) -> Any:
        return self._miss().read(*args, **kwargs)

    def read1(self, *args: Any, **kwargs: Any) -> Any:
        return self._miss().read1(*args, **kwargs)

    def readinto(self, *args: Any, **kwargs: Any) -> Any:
        return self._miss().readinto(*args, **kwargs)

    def readline(self, *args: Any, **kwargs: Any) -> Any:
        return self._miss().readline(*args, **kwargs)

    def readlines(self, *args: Any, **kwargs: Any) -> Any:
        return self._miss().readlines(*args, **kwargs)

    def read_chunked(self, *args: Any, **kwargs: Any) -> Any:
        return self._miss().read_chunked(*args, **kwargs)

    def json(self) -> Any:
        return self._miss().json()

    @property
    def data(self) -> Any:
        return self._miss().data

    def __iter__(self) -> Any:
        return iter(self._miss())

    def __next__(self) -> Any:
        return next(self._miss())

    def stream(self, *args: Any, **kwargs: Any) -> Generator[bytes]:
        try:
            for part in self.__wrapped__.stream(*args, **kwargs):
                self._self_call.add(part)
                yield part
        except BaseException as error:
            self._self_call.fail(error)
            raise
        self._self_call.end()

    def close(self) -> None:
        try:
            self.__wrapped__.close()
        finally:
            self._self_call.leave()

    def __del__(self) -> None:
        self._self_call.leave()


def _install_requests(patches: Patches, observer: CallObserver, requests: Any) -> None:
    def note(call: ObservedCall, response: Any, is_streamed: bool) -> None:
        if is_streamed:
            call.respond(response.status_code, response.headers.get("content-type", ""))
            response.raw = _ObservedRaw(response.raw, call, observer)
        else:
            _note_whole(call, response.status_code, response.headers, response.content)

    def send(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        def read() -> ClientRequest:
            request: Any = args[0] if args else kwargs["request"]
            return request.method, request.url, seen_body(request.body, request.headers)

        if (call := observer.observe(read)) is None:
            return wrapped(*args, **kwargs)
        with sending(call):
            response = wrapped(*args, **kwargs)
        observer.guard(lambda: note(call, response, bool(kwargs.get("stream", instance.stream))))
        return response

    patches.wrap(requests, "Session.send", send)


def _install_aiohttp(patches: Patches, observer: CallObserver, aiohttp: Any) -> None:
    def note(call: ObservedCall, response: Any) -> None:
        call.respond(response.status, response.headers.get("content-type", ""))
        response.content = observe_body(response.content, call)

    def request(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        def read() -> ClientRequest:
            method, url, headers, rest = read_arguments(instance, *args, **kwargs)
            return method, str(url), body_of(rest, headers)

        if (call := observer.observe(read)) is None:
            return wrapped(*args, **kwargs)
        return _await(call, wrapped(*args, **kwargs), observer, partial(note, call))

    patches.wrap(aiohttp, "ClientSession._request", request)  # private, as in `propagation.clients.aiohttp_client`


def _install_urllib3(patches: Patches, observer: CallObserver, urllib3: Any) -> None:
    def note(call: ObservedCall, response: Any, is_whole: bool) -> None:
        if is_whole:
            _note_whole(call, response.status, response.headers, response.data)
        else:
            observer.miss(call)

    def urlopen(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        def read() -> ClientRequest:
            method, url, *rest = *args, *(kwargs[name] for name in ("method", "url")[len(args) :])
            body = rest[0] if rest else kwargs.get("body")
            headers = rest[1] if len(rest) > 1 else kwargs.get("headers")
            named = {str(name).lower(): value for name, value in (headers or instance.headers).items()}
            return method, absolute_url(instance, url), seen_body(body, named)

        if (call := observer.observe(read)) is None:
            return wrapped(*args, **kwargs)
        with sending(call):
            response = wrapped(*args, **kwargs)
        observer.guard(lambda: note(call, response, bool(kwargs.get("preload_content", True))))
        return response

    patches.wrap(urllib3, "HTTPConnectionPool.urlopen", urlopen)
