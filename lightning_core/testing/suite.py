"""The tests of the contract suite. Import them from `lightning_core.testing.contract`."""

from __future__ import annotations

import asyncio
import inspect
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, ClassVar

import pytest
import wrapt
from packaging.utils import canonicalize_name

from lightning_core.capture import ActiveRollout
from lightning_core.capture.integration import Installed, discover, requirements_of_extra
from lightning_core.capture.patching import Patches
from lightning_core.rollouts.local_agents import patched
from lightning_core.testing.playground import Playground
from lightning_core.testing.programs import ADD_PROMPT, AgentSpec, HostAdapter, answer_prompt, run_async
from lightning_core.testing.recording_server import RecordingServer, recording_server
from lightning_core.testing.traces import ancestors, parent_of, user_message
from lightning_core.trace import TOOL_ARGUMENTS, TOOL_CALL_ID, TOOL_RESULT, Trace


class IntegrationContract:
    """The suite. Subclasses set `distribution` and `adapter`, and may add tests."""

    distribution: ClassVar[str]
    """The distribution that announces the integration. Its extra of the same name states the supported versions."""
    adapter: ClassVar[HostAdapter]

    def __init_subclass__(cls) -> None:
        settings = ("distribution", "adapter")
        tests = {n: v for n, v in vars(IntegrationContract).items() if not n.startswith("__") and n not in settings}
        overridden = [name for name, value in tests.items() if inspect.getattr_static(cls, name) is not value]
        if overridden:
            raise TypeError(f"{cls.__name__} overrides {overridden}: the contract is the same for every integration")
        missing = [name for name in settings if not hasattr(cls, name)]
        if missing:
            raise TypeError(f"{cls.__name__} does not set {missing}; see lightning_core.testing.contract")

    # One endpoint for the tests of a class: each start and stop takes a quarter of a second.
    @pytest.fixture(scope="class")
    @classmethod
    def served(cls) -> Iterator[Playground]:
        """An endpoint that answers with `answer_prompt`."""
        with Playground(answer_prompt) as served:
            yield served

    @pytest.fixture
    def playground(self, served: Playground) -> Iterator[Playground]:
        """The endpoint, with patches on HTTP clients and threads, without the integration."""
        with patched(()):
            yield served

    @pytest.fixture
    def server(self) -> Iterator[RecordingServer]:
        """A server that records the requests it receives, in place of a provider."""
        with recording_server() as server:
            yield server

    @contextmanager
    def capture(self, playground: Playground, *, train: Sequence[str] = ()) -> Generator[ActiveRollout]:
        """A rollout with this integration installed."""
        with Installed().installed(self.adapter.integration), playground.rollout(train=train) as run:
            yield run

    def capture_run(
        self,
        playground: Playground,
        how: str,
        parts: Sequence[AgentSpec],
        *,
        parallel: bool = False,
        train: Sequence[str] = (),
    ) -> Trace:
        """The trace of one run of a program with these parts."""
        program = self.adapter.build(parts, parallel=parallel)
        with self.capture(playground, train=train) as run:
            self.start(how, program)
        return run.trace

    def start(self, how: str, program: Any) -> None:
        result = getattr(self.adapter, how)(program)
        if how.startswith("a"):
            run_async(result)

    # The agent of a call

    @pytest.mark.parametrize("how", ["run", "arun", "stream", "astream"])
    def test_marked_calls_carry_the_name_and_unmarked_do_not(self, playground: Playground, how: str) -> None:
        trace = self.capture_run(
            playground, how, [AgentSpec("reader"), AgentSpec("planner", marked=True), AgentSpec("critic")]
        )
        assert [user_message(call) for call in trace.calls] == ["I am reader", "I am planner", "I am critic"]
        reader, planner, critic = trace.calls
        assert planner.agent == "planner"
        assert reader.agent != "planner"
        assert critic.agent != "planner"

    @pytest.mark.parametrize("how", ["run", "arun", "stream", "astream"])
    def test_selected_by_name_without_a_mark(self, playground: Playground, how: str) -> None:
        parts = [AgentSpec("reader"), AgentSpec("planner"), AgentSpec("planner2"), AgentSpec("critic")]
        trace = self.capture_run(playground, how, parts, train=["planner"])
        assert [user_message(c) for c in trace.calls if c.agent == "planner"] == ["I am planner"]
        assert len(trace.calls) == 4

    @pytest.mark.parametrize("how", ["run", "arun", "stream", "astream"])
    def test_parallel_agents_keep_apart(self, playground: Playground, how: str) -> None:
        names = [f"agent {i}" for i in range(6)]
        trace = self.capture_run(playground, how, [AgentSpec(name, marked=True) for name in names], parallel=True)
        assert sorted(user_message(call) for call in trace.calls) == [f"I am {name}" for name in names]
        assert all(user_message(call) == f"I am {call.agent}" for call in trace.calls)

    @pytest.mark.parametrize("how", ["run", "arun"])
    def test_tool_call_and_second_turn(self, playground: Playground, how: str) -> None:
        trace = self.capture_run(
            playground, how, [AgentSpec("solver", marked=True, prompt=ADD_PROMPT, tool=True), AgentSpec("critic")]
        )
        first, second, critic = trace.calls
        assert first.response is not None
        assert first.response["tool_calls"][0]["function"]["name"] == "add"
        assert second.messages[-1]["role"] == "tool"
        assert (first.agent, second.agent) == ("solver", "solver")
        assert critic.agent != "solver"
        (tool,) = [event for event in trace.events if event.kind == "tool"]
        assert tool.name == "add"
        assert tool.attributes[TOOL_ARGUMENTS] == '{"a": 2, "b": 3}'
        assert tool.attributes[TOOL_RESULT] == "5"
        assert tool.attributes[TOOL_CALL_ID] == first.response["tool_calls"][0]["id"]
        assert tool.error is None
        assert tool.agent == "solver"
        assert "solver" in ancestors(trace, tool)

    @pytest.mark.parametrize("how", ["run", "arun"])
    def test_failing_tool_is_recorded(self, playground: Playground, how: str) -> None:
        prompt = 'use:add {"a": 2, "b": -1}'
        trace = self.capture_run(playground, how, [AgentSpec("solver", marked=True, prompt=prompt, tool=True)])
        (tool,) = [event for event in trace.events if event.kind == "tool"]
        assert tool.error is not None
        assert "negative" in tool.error
        assert [call.agent for call in trace.calls] == ["solver", "solver"]

    @pytest.mark.parametrize("how", ["run", "arun", "stream", "astream"])
    def test_nested_agent_has_a_parent(self, playground: Playground, how: str) -> None:
        parts = [AgentSpec("outer", marked=True, inner=AgentSpec("inner", marked=True))]
        trace = self.capture_run(playground, how, parts)
        outer, inner = trace.calls
        assert (outer.agent, inner.agent) == ("outer", "inner")
        assert "outer" in ancestors(trace, parent_of(trace, inner))
        assert "inner" not in ancestors(trace, parent_of(trace, outer))

    @pytest.mark.parametrize("how", ["run", "arun"])
    def test_unmarked_inside_marked_speaks_for_it(self, playground: Playground, how: str) -> None:
        trace = self.capture_run(playground, how, [AgentSpec("outer", marked=True, inner=AgentSpec("detail"))])
        assert [call.agent for call in trace.calls] == ["outer", "outer"]

    def test_two_rollouts_in_two_threads_do_not_mix(self, playground: Playground) -> None:
        program = self.adapter.build([AgentSpec("a", marked=True), AgentSpec("b")])
        together = threading.Barrier(2)

        def work(_: int) -> Trace:
            with playground.rollout() as run:
                together.wait(10)
                for _ in range(3):
                    self.adapter.run(program)
            return run.trace

        with Installed().installed(self.adapter.integration), ThreadPoolExecutor(2) as pool:
            self.check_apart(list(pool.map(work, range(2))))

    def test_two_rollouts_in_one_loop_do_not_mix(self, playground: Playground) -> None:
        program = self.adapter.build([AgentSpec("a", marked=True), AgentSpec("b")])

        async def work() -> Trace:
            with playground.rollout() as run:
                for _ in range(3):
                    await self.adapter.arun(program)
            return run.trace

        async def both() -> list[Trace]:
            return list(await asyncio.gather(work(), work()))

        with Installed().installed(self.adapter.integration):
            self.check_apart(run_async(both()))

    def check_apart(self, traces: list[Trace]) -> None:
        for trace in traces:
            assert [user_message(call) for call in trace.calls] == ["I am a", "I am b"] * 3
            assert [call.agent == "a" for call in trace.calls] == [True, False] * 3
            assert {call.rollout for call in trace.calls} == {trace.rollout}
        assert traces[0].rollout != traces[1].rollout

    # Effects on the host

    @pytest.mark.parametrize("how", ["run", "arun", "stream", "astream"])
    def test_exceptions_pass_through_and_are_recorded(self, playground: Playground, how: str) -> None:
        error = RuntimeError("the agent's own")
        program = self.adapter.build([AgentSpec("planner", marked=True, error=error)])
        with (
            pytest.raises(RuntimeError) as caught,
            Installed().installed(self.adapter.integration),
            playground.rollout() as run,
        ):
            self.start(how, program)
        assert caught.value is error
        assert run.trace.error == "RuntimeError: the agent's own"
        (planner,) = [e for e in run.trace.events if e.kind == "agent" and e.name == "planner"]
        assert planner.error == "RuntimeError: the agent's own"

    @pytest.mark.parametrize("how", ["run", "arun", "stream", "astream"])
    def test_outside_a_rollout_nothing_differs(self, playground: Playground, server: RecordingServer, how: str) -> None:
        parts = [AgentSpec("planner", marked=True, inner=AgentSpec("critic")), AgentSpec("helper")]
        program = self.adapter.build(parts, base_url=f"{server.url}/v1")
        with Installed().installed(self.adapter.integration):
            self.start(how, program)
        inside = list(server.requests)
        server.requests.clear()
        unmarked = [AgentSpec("planner", inner=AgentSpec("critic")), AgentSpec("helper")]
        self.start(how, self.adapter.build(unmarked, base_url=f"{server.url}/v1"))
        assert inside == server.requests
        assert len(inside) == 3
        assert not {"traceparent", "lightning-agent", "lightning-origin"} & set(inside[0].headers)

    @pytest.mark.parametrize("how", ["run", "arun"])
    def test_each_call_is_recorded_once(self, playground: Playground, how: str) -> None:
        parts = [AgentSpec("planner", marked=True, prompt=ADD_PROMPT, tool=True), AgentSpec("critic")]
        trace = self.capture_run(playground, how, parts, train=["planner", "critic"])
        assert len(trace.calls) == 3
        kinds = [(event.kind, event.name) for event in trace.events]
        assert len(kinds) == len(set(kinds)), kinds

    # The patches

    def test_install_and_uninstall_restore_everything(self) -> None:
        before: dict[int, tuple[Any, list[tuple[str, int]]]] = {}
        wrap = Patches.wrap

        def recording_wrap(patches: Patches, target: Any, attribute: str, wrapper: Any, **options: Any) -> None:
            owner = wrapt.resolve_path(target, attribute)[0]
            before.setdefault(id(owner), (owner, names_and_identities(owner)))
            wrap(patches, target, attribute, wrapper, **options)

        installed = Installed()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Patches, "wrap", recording_wrap)
            installed.install(self.adapter.integration)
        assert before
        assert all(names_and_identities(owner) != was for owner, was in before.values())
        installed.uninstall(self.adapter.integration)
        assert installed.active == frozenset()
        for owner, was in before.values():
            assert names_and_identities(owner) == was, owner

    def test_a_third_partys_wrapper_on_top_survives(self, playground: Playground) -> None:
        owner, attribute = self.adapter.patched_call()
        installed = Installed()
        was = vars(owner)[attribute]
        seen: list[str] = []

        def third_party(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
            seen.append(attribute)
            return wrapped(*args, **kwargs)

        installed.install(self.adapter.integration)
        third_party_wrapper = wrapt.FunctionWrapper(vars(owner)[attribute], third_party)
        setattr(owner, attribute, third_party_wrapper)
        try:
            program = self.adapter.build([AgentSpec("planner")])
            with playground.rollout(train=["planner"]) as run:
                self.adapter.run(program)
            assert [call.agent for call in run.trace.calls] == ["planner"]
            installed.uninstall(self.adapter.integration)
            assert vars(owner)[attribute] is third_party_wrapper
            seen.clear()
            with playground.rollout(train=["planner"]) as run:
                self.adapter.run(program)
            assert seen
            assert [call.agent for call in run.trace.calls] == [None]
        finally:
            setattr(owner, attribute, was)

    def test_a_missing_host_gives_our_error(self) -> None:
        name, hint = self.adapter.integration, f"pip install '{self.distribution}[{self.adapter.integration}]'"
        # Other hosts are missing too: importing all frameworks takes seconds.
        others = {host for other in discover() for host in Installed().load(other).hosts}
        program = f"""
            import sys
            sys.modules.update(dict.fromkeys({sorted({self.adapter.host, *others})!r}))
            from lightning_core.capture.integration import active_integrations, install
            from lightning_core.errors import IntegrationUnavailable
            try:
                install({name!r})
            except IntegrationUnavailable as error:
                assert {hint!r} in str(error), error
            else:
                raise SystemExit("it was installed")
            assert {name!r} not in install(auto=True)
            assert {name!r} not in active_integrations()
        """
        subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True)

    # The distribution

    def test_the_distribution_announces_it_and_states_the_supported_versions(self) -> None:
        entry = discover()[self.adapter.integration]
        assert entry.dist is not None
        assert canonicalize_name(entry.dist.name) == canonicalize_name(self.distribution)
        assert requirements_of_extra(entry.dist, self.adapter.integration), "the extra of this name requires nothing"
        integration = Installed().load(self.adapter.integration)
        assert integration.name == self.adapter.integration
        assert self.adapter.host in integration.hosts


def names_and_identities(owner: Any) -> list[tuple[str, int]]:
    """``vars(owner)`` by identity. A wrapper compares equal to the function that it wraps."""
    return [(name, id(value)) for name, value in vars(owner).items()]
