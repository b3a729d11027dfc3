"""Beside code that replaces what an integration patches, agents keep their names, or their calls are refused or reported."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import wraps
from typing import Any

import agents.run
import pytest
from agents.run_internal import run_loop

from lightning_core.errors import StrayCallError
from lightning_core.testing import open_playground
from lightning_core.testing.playground import Playground
from tests.integrations.combinations import combined
from tests.integrations.sdk_programs import HOWS, make, run, speakers

INTEGRATION = "openai-agents"
RUN_SINGLE_TURN = run_loop.run_single_turn


def traced(find: Callable[[], Callable[..., Any]]) -> Callable[..., Any]:
    """An instrumentation's replacement of the function that ``find`` returns when it is called."""

    @wraps(find())
    async def traced(*args: Any, **kwargs: Any) -> Any:
        return await find()(*args, **kwargs)

    return traced


def instrument_as_sentry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace what sentry-sdk 2.75 replaces: a bound method, one of two references to a function, and a function."""
    bound, streamed = agents.run.DEFAULT_AGENT_RUNNER.run, run_loop.run_single_turn_streamed
    monkeypatch.setattr(agents.run.DEFAULT_AGENT_RUNNER, "run", traced(lambda: bound))
    monkeypatch.setattr(agents.run, "run_single_turn", traced(lambda: run_loop.run_single_turn))
    monkeypatch.setattr(run_loop, "run_single_turn_streamed", traced(lambda: streamed))


def play() -> Any:
    return open_playground(lambda prompt: "ok", integrations=[INTEGRATION])


@pytest.mark.parametrize(("order", "how"), combined(["before", "after"], HOWS))
def test_agents_keep_their_names_beside_sentry(order: str, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if order == "before":
        instrument_as_sentry(monkeypatch)
    with play() as playground, pytest.MonkeyPatch.context() as after:
        if order == "after":
            instrument_as_sentry(after)
        with playground.rollout(train=["Writer"]) as rollout:
            run(make("Writer"), "hi", how)
    assert speakers(rollout.trace) == ["Writer"]
    assert [event.kind for event in rollout.trace.events] == ["rollout", "agent"]


@pytest.fixture
def bypassed() -> Any:
    """A playground whose patches of a turn were replaced by code that calls the SDK's function itself."""
    with play() as playground, pytest.MonkeyPatch.context() as after:
        for module in (agents.run, run_loop):
            after.setattr(module, "run_single_turn", traced(lambda: RUN_SINGLE_TURN))
        yield playground


def test_a_call_of_a_bypassed_integration_is_refused_if_agents_are_named(bypassed: Playground) -> None:
    with bypassed.rollout(train=["Writer"], strict=False) as rollout:
        with pytest.raises(StrayCallError, match="'openai-agents' cannot name the agent") as refusal:
            run(make("Writer"), "hi")
        assert f"run_loop.run_single_turn (replaced by code of {__name__})" in str(refusal.value)
    assert rollout.infrastructure == [str(refusal.value)] == list(rollout.permanent)
    assert rollout.trace.calls == ()


def test_a_call_of_a_bypassed_integration_is_reported_otherwise(
    bypassed: Playground, caplog: pytest.LogCaptureFixture
) -> None:
    with bypassed.rollout() as rollout, caplog.at_level(logging.WARNING):
        run(make("Writer"), "hi")
        run(make("Writer"), "hi")
    assert speakers(rollout.trace) == [None, None]
    assert rollout.counters["bypassed"] == 2
    assert caplog.text.count("'openai-agents' cannot name the agent") == 1
