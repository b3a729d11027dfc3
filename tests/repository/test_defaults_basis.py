"""What the bench of defaults compares: runs of the same shipped defaults and of the same agent."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import pytest

from tests.bench.defaults.suites import SUITES, agents_of
from tests.bench.defaults.variant import basis


def bases() -> Mapping[str, str]:
    return {name: basis(agent) for suite in SUITES for name, agent in agents_of(suite).items()}


def test_a_change_of_what_auto_means_is_another_basis(monkeypatch: pytest.MonkeyPatch) -> None:
    before = bases()
    monkeypatch.setattr("tests.bench.defaults.variant.sampling_floor", lambda _: None)
    assert all(after != before[name] for name, after in bases().items())


@pytest.mark.parametrize(
    ("module", "agents"),
    [
        ("suite.letters", {"letters"}),
        ("suite.routing", {"route", "pick", "ticket"}),  # the last two name its queues
        ("second.loops", {"commands", "streets", "survey"}),
        ("suite.agent", None),
    ],
)
def test_a_change_of_code_is_another_basis_of_the_agents_that_are_made_of_it(
    module: str, agents: set[str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, before = inspect.getsource, bases()

    def edited(value: Any) -> str:
        return source(value) + (
            "\n# edited" if getattr(value, "__name__", None) == f"tests.bench.defaults.{module}" else ""
        )

    monkeypatch.setattr(inspect, "getsource", edited)
    assert {name for name, after in bases().items() if after != before[name]} == (
        set(before) if agents is None else agents
    )
