"""Tools whose results are kept, or returned from the record: what LangChain does around their bodies does not change.

``_run`` and ``_arun``, which every tool may define, run the body. LangChain documents them for authors of tools.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

from langchain_core.tools import BaseTool

from lightning_core.capture.spans import SpanHandle
from lightning_core.capture.tools import arun_tool, keeps_result, run_tool


def with_kept_body(run: Callable[..., Any], tool: BaseTool, handle: SpanHandle) -> Callable[..., Any]:
    """``run``, a method of ``tool``, whose results are kept if the configuration selects the tool.

    The method belongs to a copy of the tool; the body is the tool's own.
    """
    if not keeps_result(tool.name):
        return run
    function: Any = getattr(run, "__func__", None) or getattr(type(tool), run.__name__)

    def call(*args: Any, **kwargs: Any) -> Any:
        return run_tool(handle, lambda: tool._run(*args, **kwargs))  # pyright: ignore[reportPrivateUsage]

    async def coroutine(*args: Any, **kwargs: Any) -> Any:
        return await arun_tool(handle, lambda: tool._arun(*args, **kwargs))  # pyright: ignore[reportPrivateUsage]

    kept = copy.copy(tool)
    # LangChain inspects the signatures, which the tool's own methods define. Bypasses pydantic, which accepts fields only.
    for name, body in (("_run", call), ("_arun", coroutine)):
        object.__setattr__(kept, name, functools.wraps(getattr(tool, name))(body))
    return functools.partial(function, kept)
