"""What the SDK tells about agents, tools, handoffs and guardrails, as scopes."""

from __future__ import annotations

import json
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from agents.tool import default_tool_timeout_error_message

from lightning_core.capture import StepScope, current_run, record, scope
from lightning_core.capture.mark import get_mark
from lightning_core.capture.spans import SpanHandle
from lightning_core.trace import TOOL_ARGUMENTS, TOOL_CALL_ID, TOOL_RESULT
from lightning_openai_agents._trainable import MEMBERS, Members


class AgentRun:
    """One run of the SDK's loop, in which agents follow each other.

    An agent's stay is one scope, from its first turn until another takes over or the run ends. It is entered for each turn anew, so
    that what happens between turns (guardrails, the program that reads a stream) is not the agent's.
    """

    def __init__(self) -> None:
        self._agent: Any = None
        self._stay: StepScope | None = None

    def stay(self, agent: Any) -> StepScope:
        """The scope of ``agent``, which is at work now."""
        if self._stay is None or self._agent is not agent:
            self.end()
            self._agent, self._stay = agent, _open_agent(agent)
        return self._stay

    def end(self, error: BaseException | None = None) -> None:
        """Nobody is at work any more; ``error`` is what ended the run, if that was an exception."""
        if self._stay is not None:
            self._stay.close(error)
        self._agent = self._stay = None


@dataclass(frozen=True, slots=True)
class _Tool:
    handle: SpanHandle
    members: Members


_run: ContextVar[AgentRun | None] = ContextVar("lightning_openai_agents_run", default=None)
_tool: ContextVar[_Tool | None] = ContextVar("lightning_openai_agents_tool", default=None)


def _open_agent(agent: Any) -> StepScope:
    """A marked or selected agent speaks for itself; any other is a place with a name, which speaks where nobody marked does."""
    tool = _tool.get()
    _, known = (tool.members if tool else {}).get(id(agent), (agent, agent))
    if (spec := get_mark(known)) is not None:
        return StepScope(spec.name)
    run = current_run()
    selected = run is not None and agent.name in run.agents
    return StepScope(agent.name, kind="agent" if selected else "node")


@contextmanager
def agent_run() -> Generator[None]:
    """Around one run of the SDK's loop."""
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


def agent_turn(args: Any, kwargs: Any) -> AbstractContextManager[None]:
    """Around one turn of an agent: its model call, and the tools and handoffs that follow from it."""
    with record("openai_agents.agent"):
        if (run := _run.get()) is not None:
            bindings = kwargs["bindings"] if "bindings" in kwargs else args[1]
            return run.stay(bindings.public_agent).step()
    return nullcontext()


def guardrail_scope(guardrail: Any) -> AbstractContextManager[SpanHandle]:
    """Around one guardrail: a place of its own beside the agent, which does not speak for its guards."""
    with record("openai_agents.guardrail"):
        return scope(guardrail.get_name(), kind="node")
    return nullcontext(SpanHandle(None))


def note_verdict(handle: SpanHandle, result: Any) -> None:
    """Put on a guardrail's span whether its tripwire fired; that ends the run, but is no failure of the guardrail."""
    with record("openai_agents.guardrail"):
        handle.set(lightning__guardrail__triggered=bool(result.output.tripwire_triggered))


def handoff_scope(asked: Any) -> AbstractContextManager[SpanHandle]:
    """Around one handoff, which to the model is the use of a tool. The agent that takes over comes after it, not inside."""
    with record("openai_agents.handoff"):
        wish = asked["run_handoffs"][0]
        attributes = {"lightning.handoff.from": asked["public_agent"].name} | _call_attributes(wish.tool_call)
        return scope(wish.handoff.tool_name, kind="tool", attributes=attributes)
    return nullcontext(SpanHandle(None))


def note_target(handle: SpanHandle, step: Any) -> None:
    """Put on a handoff's span who took over, which may be decided while it happens."""
    with record("openai_agents.handoff"):
        handle.set(lightning__handoff__to=step.next_step.new_agent.name)


def tool_scope(asked: Any) -> AbstractContextManager[SpanHandle]:
    """Around one use of a function tool; the runs of agents inside it hang under it."""
    with record("openai_agents.tool"):
        tool, outer = asked["func_tool"], _tool.get()
        span = scope(tool.name, kind="tool", attributes=_call_attributes(asked["tool_call"]))
        return _be_tool(span, getattr(tool, MEMBERS, None) or (outer.members if outer else {}))
    return nullcontext(SpanHandle(None))


@contextmanager
def _be_tool(span: AbstractContextManager[SpanHandle], members: Members) -> Generator[SpanHandle]:
    with span as handle:
        token = _tool.set(_Tool(handle, members))
        try:
            yield handle
        finally:
            _tool.reset(token)


def note_result(handle: SpanHandle, asked: Any, result: Any) -> None:
    """Put a tool's result on its span. That it ran out of time is a result of the SDK's making."""
    with record("openai_agents.tool_result"):
        tool = asked["func_tool"]
        handle.set(**{TOOL_RESULT: _to_text(result)})
        limit = tool.timeout_seconds
        if limit and result == default_tool_timeout_error_message(tool_name=tool.name, timeout_seconds=limit):
            handle.fail(result)


def note_tool_error(error: BaseException | str) -> None:
    """The tool that runs now has failed, although the SDK makes an answer to the model of it."""
    with record("openai_agents.tool_error"):
        if (tool := _tool.get()) is not None:
            tool.handle.fail(error)


def note_mcp_result(result: Any) -> None:
    """An MCP server says that its tool has failed in the result, which the SDK passes on as any other."""
    with record("openai_agents.mcp"):
        if getattr(result, "is_error", None) or getattr(result, "isError", None):  # mcp 2, mcp 1
            note_tool_error(" ".join(getattr(part, "text", "") for part in result.content) or "the MCP tool failed")


def note_missing_tools(processed: Any) -> None:
    """Record the calls in a response that name no tool, where the SDK tells the model so."""
    with record("openai_agents.missing_tool"):
        for missing in processed.function_tools_not_found:
            _note_refusal(missing.tool_call, f"there is no tool {missing.tool_name!r}")


def note_refused_response(asked: Any, error: BaseException) -> None:
    """Record the calls in a response that name no tool and no handoff, where the SDK ends the run for it."""
    with record("openai_agents.missing_tool"):
        known = {tool.name for tool in asked["all_tools"]} | {handoff.tool_name for handoff in asked["handoffs"]}
        for item in asked["response"].output:
            if getattr(item, "type", None) == "function_call" and item.name not in known:
                _note_refusal(item, error)


def _note_refusal(call: Any, error: BaseException | str) -> None:
    with scope(call.name, kind="tool", attributes=_call_attributes(call)) as handle:
        handle.fail(error)


def _call_attributes(call: Any) -> dict[str, Any]:
    return {TOOL_ARGUMENTS: call.arguments, TOOL_CALL_ID: call.call_id}


def _to_text(value: Any) -> str:
    try:
        return value if isinstance(value, str) else json.dumps(value, default=repr, ensure_ascii=False)
    except (TypeError, ValueError):  # keys that are not strings, a value that contains itself
        return repr(value)
