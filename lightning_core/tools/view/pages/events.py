"""Server-sent events: the pages of running runs follow them without being loaded again."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence

import anyio
from anyio.to_thread import run_sync
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from lightning_core.tools.view.library import Library
from lightning_core.tools.view.live import END, ImprovementFeed, ListFeed, RunFeed, ServerEvent
from lightning_core.tools.view.pages.improve import improve_html
from lightning_core.tools.view.render import fragment

_HEADERS = {"Cache-Control": "no-store"}
_SILENCE = 10.0
"""Seconds without an event, after which a comment shows that the connection lives."""


async def of_list(request: Request) -> Response:
    """``/events``: the rows of the list that change."""
    library: Library = request.app.state.library
    feed = ListFeed(library, render=lambda run: fragment("_run_row.html", run=run))
    return _stream(request, feed.poll)


async def of_run(request: Request) -> Response:
    """``/runs/NAME/events?after=STEP&mark=MARK``: what is new of a run after a step (see `RunFeed`). Ends when the run does."""
    library: Library = request.app.state.library
    after = request.query_params.get("after", "0")
    if not after.isdecimal():
        raise HTTPException(400, f"after={after!r}: expected a number of steps.")
    feed = await run_sync(
        lambda: RunFeed(
            library,
            request.path_params["name"],
            after=int(after),
            mark=request.query_params.get("mark"),
            render=lambda status: fragment("_run_status.html", now=status, run=status.run),
        )
    )
    return _stream(request, feed.poll)


async def of_improvement(request: Request) -> Response:
    """``/improve/NAME/events``: the stages as they change. Ends when `improve` does."""
    library: Library = request.app.state.library
    name: str = request.path_params["name"]
    return _stream(request, ImprovementFeed(render=lambda: improve_html(library, name)).poll)


def _stream(request: Request, poll: Callable[[], Sequence[ServerEvent]]) -> Response:
    if request.method == "HEAD":
        return Response(media_type="text/event-stream", headers=_HEADERS)
    return StreamingResponse(_events(request, poll), media_type="text/event-stream", headers=_HEADERS)


async def _events(request: Request, poll: Callable[[], Sequence[ServerEvent]]) -> AsyncGenerator[str]:
    """Polls files, since the system's notifications do not work on network file systems."""
    silent = 0.0
    while not request.app.state.stopping.is_set():
        began = anyio.current_time()
        try:
            events = await run_sync(poll)
        except HTTPException:  # the run was removed
            events = [ServerEvent(END, "")]
        for event in events:
            yield event.encode()
            if event.name == END:
                return
        # A large store takes long to read: no page uses more than a fifth of a processor.
        pause = max(request.app.state.poll_seconds, 4 * (anyio.current_time() - began))
        silent = 0.0 if events else silent + pause
        if silent >= _SILENCE:
            silent = 0.0
            yield ": the connection lives\n\n"
        await anyio.sleep(pause)
