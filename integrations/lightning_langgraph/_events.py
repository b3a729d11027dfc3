"""Scopes of LangGraph's nodes and agents."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from lightning_core.capture import StepScope, current_address, current_run, record, scope
from lightning_langchain._events import note_result, tool_attributes
from lightning_langchain._patches import run_name

_MADE_BY_CREATE_AGENT = "langchain_create_agent"


@contextmanager
def node_scope(task: Any) -> Generator[None]:
    """The scope of one task of a graph: a node or ``@task`` function, with all its retries."""
    steps: StepScope | None = None
    with record("langgraph.node"):
        if not _is_internal(task.name, task.config):
            steps = StepScope(task.name, kind="node")
    if steps is None:
        yield
        return
    ending: BaseException | None = None
    try:
        with steps.step():
            yield
    except BaseException as error:
        ending = error
        raise
    finally:
        steps.close(ending)


def note_refusal(call: Any, refusal: Any) -> None:
    """Record a tool call that was rejected before it reached a tool."""
    with (
        record("langgraph.tool"),
        scope(call["name"], kind="tool", attributes=tool_attributes(call["args"], call["id"])) as handle,
    ):
        note_result(handle, refusal)


def _is_internal(name: str, config: Any) -> bool:
    """Whether a task is internal to LangGraph or LangChain, so that it gets no scope."""
    if name.startswith("__"):
        return True
    run, address = current_run(), current_address()
    if run is None or address is None or name in run.agents:
        return False
    # Every agent made by langchain.agents.create_agent has a "model" and a "tools" node; inside an agent they add nothing.
    created = (config.get("metadata") or {}).get("ls_integration") == _MADE_BY_CREATE_AGENT
    return created and name in ("model", "tools") and address.agent is not None


def agent_name(graph: Any, config: Any) -> str | None:
    """The agent's name if a run of ``graph`` is an agent, else None.

    It is one if the configuration selects its name, or if ``create_agent`` gave it a name.
    """
    with record("langgraph.agent"):
        run = current_run()
        name = run_name(graph, config)
        if run is not None and name in run.agents:
            return name
        return ((getattr(graph, "config", None) or {}).get("metadata") or {}).get("lc_agent_name")
    return None
