"""Scopes and spans of the SDK's agents, tools, handoffs and guardrails."""

from __future__ import annotations

import json
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from agents import Agent
from agents.tool import default_tool_timeout_error_message

from lightning_core.capture import StepScope, declare_agents, is_selected, record, run_as, scope
from lightning_core.capture.mark import get_mark
from lightning_core.capture.spans import SpanHandle
from lightning_core.trace import TOOL_ARGUMENTS, TOOL_CALL_ID, TOOL_RESULT
from lightning_openai_agents._trainable import MEMBERS, Members, reachable


class AgentRun:
    """One run of the SDK's loop, with one scope for each agent that handles it in turn.

    An agent's scope lasts from its first turn until a handoff or the end of the run. It is entered for model calls only. What else
    the SDK runs in a turn (hooks, filters, tools) and between turns (guardrails, the consumer of a stream) is not the agent.
    """

    def __init__(self) -> None:
        self._agent: Any = None
        self._scope: StepScope | None = None
        self._in_turn = False

    def agent_scope(self, agent: Any) -> StepScope:
        """The scope of ``agent``; opens it, and closes the previous agent's, if ``agent`` is new."""
        if self._scope is None or self._agent is not agent:
            self.end()
            self._agent, self._scope = agent, _open_agent(agent)
        return self._scope

    @contextmanager
    def in_scope(self) -> Generator[None]:
        """Enter the current agent's scope."""
        if self._scope is None:
            yield
            return
        with self._scope.step():
            yield

    @contextmanager
    def turn(self, agent: Any) -> Generator[None]:
        """One turn of ``agent``: its scope is open, but code in it is not the agent."""
        if self._in_turn:  # the wraps of two references to one function
            yield
            return
        self._in_turn = True
        try:
            with self.agent_scope(agent).step(), run_as(f"{agent.name}.turn", owned=True):
                yield
        finally:
            self._in_turn = False

    def end(self, error: BaseException | None = None) -> None:
        """Close the current agent's scope; ``error`` is the exception that ended the run, if any."""
        if self._scope is not None:
            self._scope.close(error)
        self._agent = self._scope = None


@dataclass(frozen=True, slots=True)
class _Tool:
    handle: SpanHandle
    members: Members


_run: ContextVar[AgentRun | None] = ContextVar("lightning_openai_agents_run", default=None)
_tool: ContextVar[_Tool | None] = ContextVar("lightning_openai_agents_tool", default=None)


def _open_agent(agent: Any) -> StepScope:
    """Open an agent's scope: "agent" if it is marked or selected by name, else "node"."""
    tool = _tool.get()
    _, known = (tool.members if tool else {}).get(id(agent), (agent, agent))
    if (spec := get_mark(known)) is not None:
        return StepScope(spec.name)
    return StepScope(agent.name, kind="agent" if is_selected(agent.name) else "node")


@contextmanager
def agent_run(agent: Any) -> Generator[None]:
    """The context of one run of the SDK's loop that starts with ``agent``."""
    with record("openai_agents.agents"):
        declare_agents(_names(agent))
    run = AgentRun()
    token = _run.set(run)
    ending: BaseException | None = None
    try:
        yield
    except BaseException as error:
        ending = error
        raise
    finally:
        _run.reset(token)
        run.end(ending)


def _names(agent: Any) -> set[str]:
    """The names of all agents that ``agent`` reaches, including handoffs whose target is not known yet."""
    agents = reachable(agent)
    unknown = {item.agent_name for member in agents for item in member.handoffs if not isinstance(item, Agent)}
    targets = {member.name for member in agents}
    return {mark.name if (mark := get_mark(member)) else member.name for member in agents} | (unknown - targets)


def agent_turn(args: Any, kwargs: Any) -> AbstractContextManager[None]:
    """The scope of one turn of an agent: model call, tool calls and handoffs."""
    with record("openai_agents.agent"):
        if (run := _run.get()) is not None:
            bindings = kwargs["bindings"] if "bindings" in kwargs else args[1]
            return run.turn(bindings.public_agent)
    return nullcontext()


def current_agent_scope() -> AbstractContextManager[None]:
    """The scope of the current agent: its model calls, and the events that it causes."""
    run = _run.get()
    return nullcontext() if run is None else run.in_scope()


def guardrail_scope(guardrail: Any) -> AbstractContextManager[SpanHandle]:
    """The scope of one guardrail: a node, so its calls are not the agent's."""
    with record("openai_agents.guardrail"):
        return scope(guardrail.get_name(), kind="node")
    return nullcontext(SpanHandle(None))


@contextmanager
def tool_guardrail_scope(guardrail: Any) -> Generator[SpanHandle]:
    """The scope of one guardrail of a tool, which the SDK runs inside an agent's turn."""
    name = str(guardrail.get_name())
    with run_as(name, owned=True), scope(name, kind="node") as handle:
        yield handle


def note_tool_guardrail_result(handle: SpanHandle, result: Any) -> None:
    """Set on a tool guardrail's span whether it rejected the call or its result."""
    with record("openai_agents.guardrail"):
        handle.set(lightning__guardrail__triggered=result.behavior["type"] != "allow")


def note_guardrail_result(handle: SpanHandle, result: Any) -> None:
    """Set on a guardrail's span whether its tripwire fired, which is not a failure."""
    with record("openai_agents.guardrail"):
        handle.set(lightning__guardrail__triggered=bool(result.output.tripwire_triggered))


def handoff_scope(arguments: Any) -> AbstractContextManager[SpanHandle]:
    """The scope of one handoff, recorded as a tool call. The next agent runs after it."""
    with record("openai_agents.handoff"):
        requested = arguments["run_handoffs"][0]
        attributes = {"lightning.handoff.from": arguments["public_agent"].name} | _call_attributes(requested.tool_call)
        return _enter(requested.handoff.tool_name, attributes)
    return nullcontext(SpanHandle(None))


def note_target(handle: SpanHandle, step: Any) -> None:
    """Set the next agent on a handoff's span; it may be known only after the handoff."""
    with record("openai_agents.handoff"):
        handle.set(lightning__handoff__to=step.next_step.new_agent.name)


def tool_scope(arguments: Any) -> AbstractContextManager[SpanHandle]:
    """The scope of one call of a function tool; spans of agents inside it are its children."""
    with record("openai_agents.tool"):
        tool, outer = arguments["func_tool"], _tool.get()
        members = getattr(tool, MEMBERS, None) or (outer.members if outer else {})
        return _enter_tool(_enter(tool.name, _call_attributes(arguments["tool_call"])), members)
    return nullcontext(SpanHandle(None))


@contextmanager
def _enter(name: str, attributes: dict[str, Any]) -> Generator[SpanHandle]:
    """An event of the current agent; model calls inside it belong to ``name``."""
    with current_agent_scope(), scope(name, kind="tool", attributes=attributes) as handle, run_as(name, owned=True):
        yield handle


@contextmanager
def _enter_tool(span: AbstractContextManager[SpanHandle], members: Members) -> Generator[SpanHandle]:
    with span as handle:
        token = _tool.set(_Tool(handle, members))
        try:
            yield handle
        finally:
            _tool.reset(token)


def current_tool() -> SpanHandle:
    """The span of the function tool that runs; without effect if there is none."""
    tool = _tool.get()
    return SpanHandle(None) if tool is None else tool.handle


def note_result(handle: SpanHandle, arguments: Any, result: Any) -> None:
    """Set a tool's result on its span; fail it if the result is the SDK's timeout message."""
    with record("openai_agents.tool_result"):
        tool = arguments["func_tool"]
        handle.set(**{TOOL_RESULT: _to_text(result)})
        limit = tool.timeout_seconds
        if limit and result == default_tool_timeout_error_message(tool_name=tool.name, timeout_seconds=limit):
            handle.fail(result)


def note_tool_error(error: BaseException | str) -> None:
    """Fail the span of the current tool; the SDK turns the error into a result."""
    with record("openai_agents.tool_error"):
        if (tool := _tool.get()) is not None:
            tool.handle.fail(error)


def note_mcp_result(result: Any) -> None:
    """Fail the span of the current tool if an MCP server's result reports an error."""
    with record("openai_agents.mcp"):
        if getattr(result, "is_error", None) or getattr(result, "isError", None):  # mcp 2, mcp 1
            note_tool_error(" ".join(getattr(part, "text", "") for part in result.content) or "the MCP tool failed")


def note_missing_tools(processed: Any) -> None:
    """Record calls of unknown tools that the SDK reported back to the model."""
    with record("openai_agents.missing_tool"):
        for missing in processed.function_tools_not_found:
            _record_failed_call(missing.tool_call, f"there is no tool {missing.tool_name!r}")


def note_refused_response(arguments: Any, error: BaseException) -> None:
    """Record calls of unknown tools for which the SDK ended the run with ``error``."""
    with record("openai_agents.missing_tool"):
        tools, handoffs = arguments["all_tools"], arguments["handoffs"]
        known = {tool.name for tool in tools} | {handoff.tool_name for handoff in handoffs}
        for item in arguments["response"].output:
            if getattr(item, "type", None) == "function_call" and item.name not in known:
                _record_failed_call(item, error)


def _record_failed_call(call: Any, error: BaseException | str) -> None:
    with _enter(call.name, _call_attributes(call)) as handle:
        handle.fail(error)


def _call_attributes(call: Any) -> dict[str, Any]:
    return {TOOL_ARGUMENTS: call.arguments, TOOL_CALL_ID: call.call_id}


def _to_text(value: Any) -> str:
    try:
        return value if isinstance(value, str) else json.dumps(value, default=repr, ensure_ascii=False)
    except (TypeError, ValueError):  # non-string keys, circular references
        return repr(value)
