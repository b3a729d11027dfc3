"""Scopes of LangGraph's nodes, routers and agents."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

from langgraph._internal._constants import CONFIG_KEY_CHECKPOINTER
from langgraph.errors import GraphInterrupt

from lightning_core.capture import (
    ScopeKind,
    StepScope,
    current_address,
    current_scope,
    declare_agents,
    is_selected,
    record,
    scope,
)
from lightning_core.capture.outermost import is_outermost
from lightning_core.trace import EXECUTION, INTERRUPTED
from lightning_langchain._events import note_result, tool_attributes
from lightning_langchain._names import run_name
from lightning_langgraph._names import (
    agent_name,
    created_agent,
    graph_name,
    is_hook,
    is_part,
    names_in_graph,
    router_name,
)

_graph_scope: ContextVar[Callable[[], AbstractContextManager[None]]] = ContextVar(
    "lightning_graph_scope", default=nullcontext
)
"""Re-enters the scope of the graph that the current node belongs to."""


@contextmanager
def node_scope(task: Any) -> Generator[None]:
    """The scope of one task of a graph: a node or ``@task`` function, with all its retries."""
    steps: StepScope | None = None
    with record("langgraph.node"):
        steps = _task_scope(task)
    token = _graph_scope.set(current_scope())
    ending: BaseException | None = None
    try:
        with nullcontext() if steps is None else steps.step():
            yield
    except BaseException as error:
        ending = error
        if steps is not None and isinstance(error, GraphInterrupt):
            steps.handle.set(**{INTERRUPTED: True})
        raise
    finally:
        _graph_scope.reset(token)
        if steps is not None:
            steps.close(ending)


def _task_scope(task: Any) -> StepScope | None:
    # The id stays the same if the task runs again after an interrupt.
    execution = {EXECUTION: task.id}
    if not _is_internal(task.name, task.config):
        return StepScope(task.name, kind="auxiliary" if is_hook(task.name) else "node", attributes=execution)
    can_be_interrupted = (task.config.get("configurable") or {}).get(CONFIG_KEY_CHECKPOINTER)
    if can_be_interrupted and not task.name.startswith("__"):
        # It changes no name, but shows which calls are repeated with the task and which with the node around it.
        return StepScope(task.name, kind="function", attributes=execution)
    return None


@contextmanager
def router_scope(branch: Any) -> Generator[None]:
    """The scope of a conditional edge's function. LangGraph runs it inside the node that the edge leaves."""
    name = router_name(branch)
    if name is None:
        yield
        return
    with _graph_scope.get()(), scope(name, kind="node"):
        yield


def note_refusal(call: Any, refusal: Any) -> None:
    """Record a tool call that was rejected before it reached a tool."""
    with (
        record("langgraph.tool"),
        scope(call["name"], kind="tool", attributes=tool_attributes(call["args"], call["id"])) as handle,
    ):
        note_result(handle, refusal)


def _is_internal(name: str, config: Any) -> bool:
    """Whether a task is internal to LangGraph or LangChain, so it gets no scope."""
    if name.startswith("__"):
        return True
    address = current_address()
    if address is None or is_selected(name):
        return False
    # Every agent made by langchain.agents.create_agent has a "model" and a "tools" node; inside an agent they add nothing.
    return created_agent(config) and is_part(name) and address.agent is not None


def graph_scope(graph: Any, config: Any) -> tuple[str, ScopeKind] | None:
    """The name and the kind of the scope of a run of ``graph``; None if the graph has no name.

    It is an agent if the configuration selects its name, or if ``create_agent`` gave it a name. Declares the names in it.
    """
    with record("langgraph.agent"):
        declare_agents(names_in_graph(graph))
        name = run_name(graph, config)
        if name is not None and is_selected(name):
            return name, "agent"
        if (created := agent_name(graph)) is not None:
            return created, "agent"
        own_name = graph_name(graph)
        if own_name is None:  # a run that a program makes is one trace
            return ("LangGraph", "function") if is_outermost() else None
        return own_name, "node"
    return None
