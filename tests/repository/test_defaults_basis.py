"""What the bench of defaults compares: runs of the same shipped defaults and of the same agent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from tests.bench.defaults.basis import basis, code_of
from tests.bench.defaults.suite.agent import Agent
from tests.bench.defaults.suites import SUITES, agents_of

BENCH = "tests.bench.defaults"
AGENTS = {name: agent for suite in SUITES for name, agent in agents_of(suite).items()}


def bases() -> Mapping[str, str]:
    return {name: basis(agent) for name, agent in AGENTS.items()}


@pytest.mark.parametrize(("what", "value"), [("sampling_floor", None), ("learning_rate", 1e-5)])
def test_a_change_of_what_auto_means_is_another_basis(what: str, value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    before = bases()
    monkeypatch.setattr(f"{BENCH}.basis.{what}", lambda *_: value)
    assert all(after != before[name] for name, after in bases().items())


@pytest.mark.parametrize(
    ("agent", "modules"),
    [
        ("letters", {"suite.letters", "suite.chat", "suite.agent"}),
        ("route", {"suite.routing", "suite.words", "suite.chat", "suite.agent"}),
        ("ticket", {"suite.selection", "suite.routing", "suite.words", "suite.chat", "suite.agent"}),
        ("survey", {"second.loops", "suite.words", "suite.chat", "suite.agent"}),
    ],
)
def test_an_agent_is_made_of_its_module_and_what_this_one_imports(agent: str, modules: set[str]) -> None:
    assert set(code_of(AGENTS[agent])) == {f"{BENCH}.{module}" for module in modules}


def test_an_agent_is_made_of_the_example_that_it_uses() -> None:
    assert "examples.calculator.agent" in code_of(AGENTS["calculate"])


def test_a_change_of_code_is_another_basis_of_the_agents_that_are_made_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    changed, before = f"{BENCH}.suite.routing", bases()

    def edited(agent: Agent) -> Mapping[str, str]:
        code = code_of(agent)
        return {**code, changed: "edited"} if changed in code else code

    monkeypatch.setattr(f"{BENCH}.basis.code_of", edited)
    assert {name for name, after in bases().items() if after != before[name]} == {"route", "pick", "ticket"}
