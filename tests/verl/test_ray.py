"""Model calls in Ray's tasks and actors are those of the agent that called them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import ray

from lightning_core.capture import ActiveRollout, scope
from lightning_core.testing.playground import Playground, open_playground
from tests.propagation import process_work as work


@pytest.fixture(scope="module")
def playground() -> Iterator[Playground]:
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
    try:
        with open_playground(lambda prompt: "yes", integrations=()) as opened:
            yield opened
    finally:
        ray.shutdown()


class Asker:
    """An actor that keeps a state between calls."""

    def __init__(self) -> None:
        self.asked = 0

    def ask(self, text: str, *, end: str = "") -> str:
        self.asked += 1
        return work.ask(text + end)

    def two(self) -> tuple[int, int]:
        return self.asked, 2

    def kept(self) -> Any:
        return work.kept()


def calls(run: ActiveRollout) -> Counter[tuple[str | None, str]]:
    return Counter((call.agent, str(call.messages[-1]["content"])) for call in run.trace.calls)


def stream(texts: str) -> Iterator[str]:
    for text in texts:
        yield work.ask(text)


def test_tasks_and_their_results(playground: Playground) -> None:
    ask, nested, fail, kept = map(ray.remote, (work.ask, work.ask_nested, work.fail, work.kept))
    plain = ray.get(kept.remote())
    for agent in ("first", "second"):
        with playground.rollout() as run, scope(agent):
            assert ray.get([ask.remote("a"), ask.options(num_cpus=0.5).remote(text="b")]) == ["yes", "yes"]
            assert ray.get(ask.remote(ask.remote("c"))) == "yes"
            assert ray.get(nested.remote("d")) == "yes; yes"
            assert [ray.get(ref) for ref in ray.remote(stream).remote("ef")] == ["yes", "yes"]
            with pytest.raises(KeyError, match="boom"):
                ray.get(fail.remote("boom"))
            with pytest.raises(TypeError, match="text"):
                ask.remote()
        expected = {(agent, text): 1 for text in ("a", "b", "c", "yes", "d", "e", "f", "boom")}
        assert calls(run) == expected | {("inner", "inner d"): 1}
        assert [reward.value for reward in run.trace.rewards] == [0.5]
    assert {ray.get(kept.remote()) for _ in range(4)} == {plain} == {(True, 0, ())}


def test_an_actor_that_serves_several_rollouts(playground: Playground) -> None:
    actor = ray.remote(Asker).remote()
    for agent in ("first", "second"):
        with playground.rollout() as run, scope(agent):
            assert ray.get([actor.ask.remote("a"), actor.ask.remote("b", end="!")]) == ["yes", "yes"]
            with pytest.raises(TypeError, match="text"):
                actor.ask.remote()
        assert calls(run) == {(agent, "a"): 1, (agent, "b!"): 1}
    with playground.rollout():
        assert ray.get(list(actor.two.options(num_returns=2).remote())) == [4, 2]
    assert ray.get(actor.kept.remote()) == (True, 0, ())
