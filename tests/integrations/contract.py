"""What every integration must do, told once.

An integration's test file subclasses `Contract` and gives it an adapter that builds programs in the host's own style. No test of the
contract may be overridden, and the hosts are the real ones, over real HTTP.
"""

from __future__ import annotations

import asyncio
import atexit
import contextvars
import inspect
import subprocess
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import wrapt

from lightning_core.capture import Run
from lightning_core.capture.integration import Installed
from lightning_core.capture.patching import Patches
from lightning_core.trace import Call, Event, Trace
from tests.conftest import Endpoint
from tests.recording_server import RecordingServer

ADD = 'use:add {"a": 2, "b": 3}'
"""A prompt that the scripted model answers by calling the tool ``add``; it answers in words once it has the result."""


# One event loop for all tests, as a program has: ChatOpenAI's clients are shared by all models of a process, and their connections
# die with the loop that opened them.
_loop = asyncio.Runner()
atexit.register(_loop.close)


def run_async(work: Coroutine[Any, Any, Any]) -> Any:
    # A Runner would otherwise keep the context of its first run.
    return _loop.run(work, context=contextvars.copy_context())


@dataclass(frozen=True)
class Part:
    """One agent of a program: it sends ``prompt`` to the model, and does what else is said here."""

    name: str
    marked: bool = False
    prompt: str | None = None
    tool: bool = False
    """May call the tool ``add(a, b)``."""
    inner: Part | None = None
    """An agent that this one runs after its own model call."""
    error: Exception | None = None
    """What it raises after its model call."""

    @property
    def text(self) -> str:
        return self.prompt or f"I am {self.name}"


class Adapter(ABC):
    """Builds and runs programs of one host."""

    integration: ClassVar[str]
    """Name of the integration."""
    host: ClassVar[str]
    """The package without which it cannot be used."""

    @abstractmethod
    def build(self, parts: Sequence[Part], *, parallel: bool = False, base_url: str | None = None) -> Any:
        """A program that runs ``parts`` one after the other, or all at once. Models live at a provider unless ``base_url`` is given."""

    @abstractmethod
    def run(self, program: Any) -> None: ...

    @abstractmethod
    async def arun(self, program: Any) -> None: ...

    @abstractmethod
    def stream(self, program: Any) -> None:
        """Run so that model responses stream too, consuming what comes."""

    @abstractmethod
    async def astream(self, program: Any) -> None: ...

    @abstractmethod
    def patched_call(self) -> tuple[Any, str]:
        """A function that the integration patches and that a program of one part runs through: where a third party wraps it too."""


class Contract:
    """The suite. Subclasses set `adapter` and may add tests of their own."""

    adapter: ClassVar[Adapter]

    def __init_subclass__(cls) -> None:
        own = {name: value for name, value in vars(Contract).items() if not name.startswith("__") and name != "adapter"}
        overridden = [name for name, value in own.items() if inspect.getattr_static(cls, name) is not value]
        if overridden:
            raise TypeError(f"{cls.__name__} overrides {overridden}: the contract is the same for every integration")

    @contextmanager
    def capture(self, endpoint: Endpoint, *, agents: Sequence[str] = ()) -> Iterator[Run]:
        installed = Installed()
        with installed.installed(self.adapter.integration), endpoint.rollout(agents=agents) as run:
            yield run

    def capture_run(
        self, endpoint: Endpoint, how: str, parts: Sequence[Part], *, parallel: bool = False, agents: Sequence[str] = ()
    ) -> Trace:
        program = self.adapter.build(parts, parallel=parallel)
        with self.capture(endpoint, agents=agents) as run:
            self.start(how, program)
        return run.trace

    def start(self, how: str, program: Any) -> None:
        result = getattr(self.adapter, how)(program)
        if how.startswith("a"):
            run_async(result)

    # Who speaks

    @pytest.mark.parametrize("how", ["run", "arun", "stream", "astream"])
    def test_marked_calls_carry_the_name_and_unmarked_do_not(self, endpoint: Endpoint, how: str) -> None:
        trace = self.capture_run(endpoint, how, [Part("reader"), Part("planner", marked=True), Part("critic")])
        assert [says(call) for call in trace.calls] == ["I am reader", "I am planner", "I am critic"]
        reader, planner, critic = trace.calls
        assert planner.agent == "planner"
        assert reader.agent != "planner"
        assert critic.agent != "planner"

    @pytest.mark.parametrize("how", ["run", "arun", "stream", "astream"])
    def test_selected_by_name_without_a_mark(self, endpoint: Endpoint, how: str) -> None:
        parts = [Part("reader"), Part("planner"), Part("planner2"), Part("critic")]
        trace = self.capture_run(endpoint, how, parts, agents=["planner"])
        assert [says(c) for c in trace.calls if c.agent == "planner"] == ["I am planner"]
        assert len(trace.calls) == 4

    @pytest.mark.parametrize("how", ["run", "arun", "stream", "astream"])
    def test_parallel_agents_keep_apart(self, endpoint: Endpoint, how: str) -> None:
        names = [f"agent {i}" for i in range(6)]
        trace = self.capture_run(endpoint, how, [Part(name, marked=True) for name in names], parallel=True)
        assert sorted(says(call) for call in trace.calls) == [f"I am {name}" for name in names]
        assert all(says(call) == f"I am {call.agent}" for call in trace.calls)

    @pytest.mark.parametrize("how", ["run", "arun"])
    def test_tool_call_and_second_turn(self, endpoint: Endpoint, how: str) -> None:
        trace = self.capture_run(endpoint, how, [Part("solver", marked=True, prompt=ADD, tool=True), Part("critic")])
        first, second, critic = trace.calls
        assert first.response is not None
        assert first.response["tool_calls"][0]["function"]["name"] == "add"
        assert second.messages[-1]["role"] == "tool"
        assert (first.agent, second.agent) == ("solver", "solver")
        assert critic.agent != "solver"
        (tool,) = [event for event in trace.events if event.kind == "tool"]
        assert tool.name == "add"
        assert tool.attributes["gen_ai.tool.call.arguments"] == '{"a": 2, "b": 3}'
        assert tool.attributes["gen_ai.tool.call.result"] == "5"
        assert tool.attributes["gen_ai.tool.call.id"] == first.response["tool_calls"][0]["id"]
        assert tool.error is None
        assert tool.agent == "solver"
        assert "solver" in ancestors(trace, tool)

    @pytest.mark.parametrize("how", ["run", "arun"])
    def test_failing_tool_is_recorded(self, endpoint: Endpoint, how: str) -> None:
        prompt = 'use:add {"a": 2, "b": -1}'
        trace = self.capture_run(endpoint, how, [Part("solver", marked=True, prompt=prompt, tool=True)])
        (tool,) = [event for event in trace.events if event.kind == "tool"]
        assert tool.error is not None
        assert "negative" in tool.error
        assert [call.agent for call in trace.calls] == ["solver", "solver"]

    @pytest.mark.parametrize("how", ["run", "arun", "stream", "astream"])
    def test_nested_agent_has_a_parent(self, endpoint: Endpoint, how: str) -> None:
        parts = [Part("outer", marked=True, inner=Part("inner", marked=True))]
        trace = self.capture_run(endpoint, how, parts)
        outer, inner = trace.calls
        assert (outer.agent, inner.agent) == ("outer", "inner")
        assert "outer" in ancestors(trace, parent_of(trace, inner))
        assert "inner" not in ancestors(trace, parent_of(trace, outer))

    @pytest.mark.parametrize("how", ["run", "arun"])
    def test_unmarked_inside_marked_speaks_for_it(self, endpoint: Endpoint, how: str) -> None:
        trace = self.capture_run(endpoint, how, [Part("outer", marked=True, inner=Part("detail"))])
        assert [call.agent for call in trace.calls] == ["outer", "outer"]

    def test_two_rollouts_in_two_threads_do_not_mix(self, endpoint: Endpoint) -> None:
        program = self.adapter.build([Part("a", marked=True), Part("b")])
        together = threading.Barrier(2)

        def work(_: int) -> Trace:
            with endpoint.rollout() as run:
                together.wait(10)
                for _ in range(3):
                    self.adapter.run(program)
            return run.trace

        with Installed().installed(self.adapter.integration), ThreadPoolExecutor(2) as pool:
            self.check_apart(list(pool.map(work, range(2))))

    def test_two_rollouts_in_one_loop_do_not_mix(self, endpoint: Endpoint) -> None:
        program = self.adapter.build([Part("a", marked=True), Part("b")])

        async def work() -> Trace:
            with endpoint.rollout() as run:
                for _ in range(3):
                    await self.adapter.arun(program)
            return run.trace

        async def both() -> list[Trace]:
            return list(await asyncio.gather(work(), work()))

        with Installed().installed(self.adapter.integration):
            self.check_apart(run_async(both()))

    def check_apart(self, traces: list[Trace]) -> None:
        for trace in traces:
            assert [says(call) for call in trace.calls] == ["I am a", "I am b"] * 3
            assert [call.agent == "a" for call in trace.calls] == [True, False] * 3
            assert {call.rollout for call in trace.calls} == {trace.rollout}
        assert traces[0].rollout != traces[1].rollout

    # The host notices nothing

    @pytest.mark.parametrize("how", ["run", "arun", "stream", "astream"])
    def test_exceptions_pass_through_and_are_recorded(self, endpoint: Endpoint, how: str) -> None:
        error = RuntimeError("the agent's own")
        program = self.adapter.build([Part("planner", marked=True, error=error)])
        with (
            pytest.raises(RuntimeError) as caught,
            Installed().installed(self.adapter.integration),
            endpoint.rollout() as run,
        ):
            self.start(how, program)
        assert caught.value is error
        assert run.trace.error == "RuntimeError: the agent's own"
        (planner,) = [e for e in run.trace.events if e.kind == "agent" and e.name == "planner"]
        assert planner.error == "RuntimeError: the agent's own"

    @pytest.mark.parametrize("how", ["run", "arun", "stream", "astream"])
    def test_outside_a_rollout_nothing_differs(self, endpoint: Endpoint, server: RecordingServer, how: str) -> None:
        parts = [Part("planner", marked=True, inner=Part("critic")), Part("helper")]
        program = self.adapter.build(parts, base_url=f"{server.url}/v1")
        with Installed().installed(self.adapter.integration):
            self.start(how, program)
        inside = list(server.requests)
        server.requests.clear()
        unmarked = [Part("planner", inner=Part("critic")), Part("helper")]
        self.start(how, self.adapter.build(unmarked, base_url=f"{server.url}/v1"))
        assert inside == server.requests
        assert len(inside) == 3
        assert not {"traceparent", "lightning-agent", "lightning-origin"} & set(inside[0].headers)

    @pytest.mark.parametrize("how", ["run", "arun"])
    def test_each_call_is_recorded_once(self, endpoint: Endpoint, how: str) -> None:
        parts = [Part("planner", marked=True, prompt=ADD, tool=True), Part("critic")]
        trace = self.capture_run(endpoint, how, parts, agents=["planner", "critic"])
        assert len(trace.calls) == 3
        kinds = [(event.kind, event.name) for event in trace.events]
        assert len(kinds) == len(set(kinds)), kinds

    # The patches

    def test_install_and_uninstall_restore_everything(self) -> None:
        before: dict[int, tuple[Any, list[tuple[str, int]]]] = {}
        wrap = Patches.wrap

        def noting_wrap(patches: Patches, target: Any, attribute: str, wrapper: Any) -> None:
            owner = wrapt.resolve_path(target, attribute)[0]
            before.setdefault(id(owner), (owner, names_and_identities(owner)))
            wrap(patches, target, attribute, wrapper)

        installed = Installed()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Patches, "wrap", noting_wrap)
            installed.install(self.adapter.integration)
        assert before
        assert all(names_and_identities(owner) != was for owner, was in before.values())
        installed.uninstall(self.adapter.integration)
        assert installed.active == frozenset()
        for owner, was in before.values():
            assert names_and_identities(owner) == was, owner

    def test_a_third_partys_wrapper_on_top_survives(self, endpoint: Endpoint) -> None:
        owner, attribute = self.adapter.patched_call()
        installed = Installed()
        was = vars(owner)[attribute]
        seen: list[str] = []

        def third_party(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
            seen.append(attribute)
            return wrapped(*args, **kwargs)

        installed.install(self.adapter.integration)
        theirs = wrapt.FunctionWrapper(vars(owner)[attribute], third_party)
        setattr(owner, attribute, theirs)
        try:
            program = self.adapter.build([Part("planner")])
            with endpoint.rollout(agents=["planner"]) as run:
                self.adapter.run(program)
            assert [call.agent for call in run.trace.calls] == ["planner"]
            installed.uninstall(self.adapter.integration)
            assert vars(owner)[attribute] is theirs
            seen.clear()
            with endpoint.rollout(agents=["planner"]) as run:
                self.adapter.run(program)
            assert seen
            assert [call.agent for call in run.trace.calls] == [None]
        finally:
            setattr(owner, attribute, was)

    def test_a_missing_host_gives_our_error(self) -> None:
        code = f"""
            import sys
            sys.modules[{self.adapter.host!r}] = None
            from lightning_core.errors import IntegrationUnavailable
            from lightning_core.capture.integration import active_integrations, install
            try:
                install({self.adapter.integration!r})
            except IntegrationUnavailable as error:
                assert "pip install 'lightning-rl[{self.adapter.integration}]'" in str(error), error
            else:
                raise SystemExit("it was installed")
            assert {self.adapter.integration!r} not in install(auto=True)
            assert {self.adapter.integration!r} not in active_integrations()
        """
        lines = "\n".join(line.strip(" ") if not line.startswith(" " * 16) else line[12:] for line in code.splitlines())
        subprocess.run([sys.executable, "-c", lines], check=True)


def names_and_identities(owner: Any) -> list[tuple[str, int]]:
    """``vars(owner)`` to compare: not by equality, for a wrapper equals what it wraps."""
    return [(name, id(value)) for name, value in vars(owner).items()]


def drive(runnable: Any, how: str, input: Any) -> Any:
    """Run a LangChain Runnable in one of the ways there are."""

    async def consume() -> list[Any]:
        if how == "astream_events":
            return [event async for event in runnable.astream_events(input, version="v2")]
        return [chunk async for chunk in runnable.astream(input)]

    match how:
        case "astream" | "astream_events":
            return run_async(consume())
        case "stream":
            return list(runnable.stream(input))
        case "batch":
            return runnable.batch([input, input])
        case "abatch":
            return run_async(runnable.abatch([input, input]))
        case "ainvoke":
            return run_async(runnable.ainvoke(input))
        case _:
            return runnable.invoke(input)


def says(call: Call) -> str:
    """The first user message of a call."""
    return next(str(m["content"]) for m in call.messages if m["role"] == "user")


def parent_of(trace: Trace, call: Call) -> Event:
    return next(event for event in trace.events if event.id == call.parent)


def ancestors(trace: Trace, event: Event) -> list[str]:
    """Names of an event and of all that it hangs under, innermost first."""
    by_id = {event.id: event for event in trace.events}
    names = [event.name]
    while event.parent is not None:
        event = by_id[event.parent]
        names.append(event.name)
    return names
