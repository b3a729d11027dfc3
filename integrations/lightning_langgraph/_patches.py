"""What is wrapped in LangGraph, and why.

Identity has to stand around the execution of a node. What LangGraph offers in public does not reach that far: callbacks run before
and after, in contexts of their own when asynchronous; a node's function is bound when the graph is compiled, which may
be long before we are installed. So two places are wrapped:

- Public: ``Pregel.stream`` / ``astream``, through which every way to run a graph goes. A graph that is an agent runs in its scope.
- Private: ``run_with_retry`` / ``arun_with_retry`` as ``langgraph.pregel._runner`` has them. All tasks of all graphs, whenever compiled,
  pass here: nodes, ``Send``, sub-graphs as nodes, ``@task`` functions; once each, with all attempts inside. Seen in langgraph
  1.2.22; ``tests/integrations/test_langgraph.py::test_private_api`` fails when it moves.
  https://github.com/langchain-ai/langgraph/blob/main/libs/langgraph/langgraph/pregel/_runner.py
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import langgraph.pregel._runner
from langgraph.errors import GraphBubbleUp
from langgraph.pregel import Pregel
from lightning_langchain import INTEGRATION as LANGCHAIN

from lightning_core.capture import no_failure
from lightning_core.patching import Patches
from lightning_core.trainable import scope_function
from lightning_langgraph._events import agent_name, node_scope


def install(patches: Patches) -> None:
    no_failure(GraphBubbleUp)
    LANGCHAIN.install(patches)
    patches.wrap(Pregel, "stream", _stream)
    patches.wrap(Pregel, "astream", _astream)
    patches.wrap(langgraph.pregel._runner, "run_with_retry", _run_task)
    patches.wrap(langgraph.pregel._runner, "arun_with_retry", _arun_task)


def _run_task(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
    with node_scope(args[0] if args else kwargs["task"]):
        return wrapped(*args, **kwargs)


async def _arun_task(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
    with node_scope(args[0] if args else kwargs["task"]):
        return await wrapped(*args, **kwargs)


def _stream(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
    name = agent_name(instance, args[1] if len(args) > 1 else kwargs.get("config"))
    if name is None:
        return wrapped(*args, **kwargs)
    return scope_function(wrapped, name, kind="generator", once=True)(*args, **kwargs)


def _astream(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
    name = agent_name(instance, args[1] if len(args) > 1 else kwargs.get("config"))
    if name is None:
        return wrapped(*args, **kwargs)
    return scope_function(wrapped, name, kind="async_generator", once=True)(*args, **kwargs)
