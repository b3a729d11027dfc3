"""Which agents of recorded rollouts are learned from: the selectors of a run with RL."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_core import load_config
from lightning_core.errors import ConfigError
from lightning_core.tools.sft.agents import learning_agents
from lightning_core.trace import REWARD_FUNCTION
from tests.credit.episodes import call, from_calls

AGENTS = ["researcher-1", "researcher-2", "critic-1", REWARD_FUNCTION]
TRACE = from_calls(
    [call(f"c{i}", "r", name, i, trained=name == "critic-1") for i, name in enumerate(AGENTS)], 1.0
).trace


def learned(agents: dict[str, Any], **sections: Any) -> dict[str | None, str]:
    config = load_config({"agent": "my:solve", "policy": {"model": "m"}, "agents": agents, **sections})
    return learning_agents(config, [TRACE])


@pytest.mark.parametrize(
    ("agents", "expected"),
    [
        ({"train": "all"}, ["researcher-1", "researcher-2", "critic-1"]),
        ({"train": "all", "frozen": {"critic-*": "base"}}, ["researcher-1", "researcher-2"]),
        ({"train": ["researcher-*"]}, ["researcher-1", "researcher-2"]),
        ({"train": ["researcher-*"], "frozen": {"researcher-2": "base"}}, ["researcher-1"]),
        ({"train": ["critic-1"], "frozen": {"critic-*": "base"}}, ["critic-1"]),
        ({}, ["critic-1"]),
    ],
)
def test_selectors_choose_the_agents(agents: dict[str, Any], expected: list[str]) -> None:
    assert learned(agents) == dict.fromkeys(expected, "policy")


@pytest.mark.parametrize("train", ["all", ["researcher-*"]])
def test_auxiliary_calls_are_not_learned(train: Any) -> None:
    """As in a run with RL, where they have no policy."""
    trace = from_calls([call("c0", "r", "researcher-1", 0), call("c1", "r", "researcher-1/title", 1)], 1.0).trace
    agents = {"train": train, "auxiliary": [{"name": "title", "contains": "Write a title"}]}
    config = load_config({"agent": "my:solve", "policy": {"model": "m"}, "agents": agents})
    assert learning_agents(config, [trace]) == {"researcher-1": "policy"}


@pytest.mark.parametrize(("frozen", "expected"), [({}, {None: "policy"}), ({"agent": "base"}, {})])
def test_calls_without_an_agent_are_those_of_the_agent_that_a_run_names(
    frozen: dict[str, str], expected: dict[str | None, str]
) -> None:
    trace = from_calls([call("c0", "r", None, 0), call("c1", "r", "writer", 1)], 1.0).trace
    agents = {"train": "all", "frozen": frozen}
    config = load_config({"agent": "my:solve", "policy": {"model": "m"}, "agents": agents})
    assert learning_agents(config, [trace]) == {**expected, "writer": "policy"}


def test_each_agent_has_its_policy() -> None:
    policies = {"search": {"agents": ["researcher-*"]}, "check": {"agents": ["critic-1"]}}
    assert learned({}, policies=policies) == {"researcher-1": "search", "researcher-2": "search", "critic-1": "check"}


def test_agents_that_only_frozen_patterns_name_do_not_learn() -> None:
    with pytest.raises(ConfigError, match="no call of an agent that learns"):
        learned({"frozen": {"critic-*": "base"}})
