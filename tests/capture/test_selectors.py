"""Agents by pattern in the configuration: which names match, and which of several entries decides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest

from lightning_core import load_config, rollout
from lightning_core.capture import scope
from lightning_core.capture.selectors import find_selector, is_known, matches, may_overlap
from lightning_core.credit.grouping import agent_family
from lightning_core.endpoint.agents.routing import AuxiliaryCalls, Routing
from lightning_core.errors import ConfigError
from lightning_core.records.ledger import routes
from lightning_core.rollouts.selection import routing_of, trained_agents
from tests.credit.episodes import call, from_calls
from tests.program_runs import Program, agents_of


@pytest.mark.parametrize(
    ("selector", "name", "expected"),
    [
        ("writer", "writer", True),
        ("writer", "writer-2", False),
        ("researcher-*", "researcher-17", True),
        ("researcher-*", "researcher-", True),
        ("researcher-*", "researcher", False),
        ("researcher-*", "Researcher-1", False),
        ("*-writer", "lead-writer", True),
        ("r*-*", "researcher-1", True),
        ("team/*", "team/writer", True),
        ("researcher-*", "researcher-1/title", False),  # an auxiliary call of researcher-1
        ("a.c*", "abc", False),
        ("a[1]*", "a[1]x", True),
        ("what?", "whats", False),
        ("odd*name", "odd*name", True),
    ],
)
def test_only_a_star_is_a_wildcard_and_it_stays_within_a_name(selector: str, name: str, expected: bool) -> None:
    assert matches(selector, name) is expected


def test_an_exact_name_wins_over_patterns_and_a_long_pattern_over_a_short_one() -> None:
    selectors = ["*", "researcher-*", "researcher-1"]
    assert find_selector(selectors, "researcher-1") == "researcher-1"
    assert find_selector(selectors, "researcher-2") == "researcher-*"
    assert find_selector(selectors, "planner") == "*"
    assert find_selector(["researcher-*"], "planner") is None


def test_a_path_of_patterns_is_known_if_each_of_its_parts_is() -> None:
    assert is_known("team-*/writer", {"team-1", "writer"})
    assert not is_known("team-*/writer", {"team-1"})


@pytest.mark.parametrize(
    ("selectors", "path", "agent"),
    [
        (["researcher-*"], ["team", "researcher-3"], "researcher-3"),
        (["team-*/writer"], ["team-2", "node", "writer"], "team-2/writer"),
        (["writer", "team-*/writer"], ["team-2", "writer"], "team-2/writer"),
        (["writer", "team-*/writer"], ["other", "writer"], "writer"),
        (["a*/b*/c"], ["b1", "a1", "c"], None),
    ],
)
def test_a_selected_agent_keeps_its_own_name(selectors: list[str], path: list[str], agent: str | None) -> None:
    with rollout("t", agents=selectors, endpoint=None) as run:
        assert run.select(path) == agent


def test_the_policy_and_the_frozen_model_of_an_agent_are_those_of_the_entry_that_decides() -> None:
    routing = Routing(
        trained=frozenset({"researcher-*", "writer-1"}),
        policies={"researcher-*": "small", "researcher-9": "large", "writer-1": "large"},
        frozen={"writer-*": "base", "researcher-0": "gpt"},
    )
    names = ["researcher-1", "researcher-9", "researcher-0", "writer-1", "writer-2", "planner", None]
    assert [routing.policy_of(name) for name in names] == ["small", "large", None, "large", None, None, None]
    assert [routing.frozen_model(name) for name in names] == [None, None, "gpt", None, "base", None, None]


def test_auxiliary_calls_of_agents_by_pattern() -> None:
    rule = AuxiliaryCalls(name="title", agent="researcher-*")
    assert [rule.is_of(agent) for agent in ("researcher-2", "writer", None)] == [True, False, False]


def test_trained_agents_are_those_that_spoke_and_match() -> None:
    """A failed call of a matching agent counts, so that it is reported. Auxiliary and frozen ones do not."""
    config = load_config(
        {
            "agent": "my:solve",
            "policy": {"model": "m"},
            "agents": {
                "train": ["team/*", "researcher-*", "planner"],
                "frozen": {"researcher-2": "base"},
                "auxiliary": [{"name": "title", "contains": "title"}],
            },
        }
    )
    names = ["researcher-1", "researcher-2", "team/writer", "team/title", "other"]
    episode = from_calls([call(f"c{i}", "r", name, i) for i, name in enumerate(names)], 0.0)
    assert trained_agents(config, [episode.trace]) == {"researcher-1", "team/writer", "planner"}
    assert routing_of(config, "train").policy_of("researcher-2") is None


def test_an_agent_without_its_number() -> None:
    names = ["researcher-3", "researcher-7", "researcher_12", "researcher 1", "researcher", "7", "gpt4-writer"]
    found = agent_family(from_calls([call(f"c{i}", "r", name, i) for i, name in enumerate(names)], 0.0))
    assert found == ["researcher", "researcher", "researcher", "researcher", "researcher", "7", "gpt4-writer"]


def spawning(program: Program) -> Callable[[Any], float]:
    """A planner, and after it a researcher for each task that is asked for."""

    def solve(task: Any) -> float:
        with scope("planner"):
            program.ask("planner")
        for index in range(2):
            with scope(f"researcher-{index}"):
                program.ask(f"researcher-{index}")
        return 1.0

    return solve


def test_a_run_trains_the_agents_of_a_pattern_and_forwards_the_others(program: Program) -> None:
    """The planner speaks before any researcher exists: the first attempt is repeated, and no call reaches a wrong model."""
    groups = program.run(spawning(program), agents={"train": ["researcher-*"]})
    assert agents_of(groups) == {("planner", False), ("researcher-0", True), ("researcher-1", True)}
    assert [r.body["messages"][0]["content"] for r in program.provider.requests] == ["planner"] * 2
    assert sorted(t.agent for t in program.episodes[0].transitions) == ["researcher-0", "researcher-1"]
    host = httpx.URL(program.provider.url).netloc.decode()
    assert routes(program.ledger()) == [
        f"planner → {host} (recorded, no key)",
        "researcher-0 → policy",
        "researcher-1 → policy",
    ]


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ("writer", "writer", True),
        ("writer", "critic", False),
        ("researcher-*", "researcher-1", True),
        ("researcher-*", "*-1", True),
        ("researcher-*", "reseacher-*", False),
        ("a*b", "*c", False),
        ("a*b*", "*bc*", True),
        ("*", "", True),
        ("team/*", "*", False),
        ("team/*", "*/writer", True),
    ],
)
def test_two_selectors_overlap_if_a_name_can_match_both(first: str, second: str, expected: bool) -> None:
    assert may_overlap(first, second) == may_overlap(second, first) == expected


def test_a_pattern_that_no_agent_matches_stops_the_run(program: Program) -> None:
    with pytest.raises(ConfigError, match=r"agents.train names 'reviewer-\*', but the agents of this program are"):
        program.run(spawning(program), agents={"train": ["reviewer-*"]})


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"forks": ["critic"]}, "'critic' is not trained; expected names in agents.train: ['researcher-*']"),
        ({"forks": []}, "the list is empty; remove the key for all trained agents"),
        ({"criterion": ["researcher-*"]}, "found a pattern (*); a criterion's agents are exact names"),
        ({"criterion": ["critic"]}, "'critic' is not trained; expected names in agents.train: ['researcher-*']"),
        ({"distill": ["critic"]}, "algorithm.distill.agents: 'critic' is not trained; expected names in agents.train"),
        ({"distill": []}, "algorithm.distill.agents: the list is empty; remove the key for all trained agents"),
        ({"ce": ["researcher-1", "critic"]}, "algorithm.ce.agents: 'critic' is not trained"),
        ({"ce": []}, "algorithm.ce.agents: the list is empty"),
        ({"format": ["critic"]}, "credit.air.formats[0].agents: 'critic' is not trained"),
        ({"format": ["*-1", "critic"]}, "credit.air.formats[0].agents: 'critic' is not trained"),
        ({"ce": ["reseacher-*"]}, "algorithm.ce.agents: 'reseacher-*' is not trained"),
    ],
)
def test_agents_that_cannot_be_meant_are_errors(sections: dict[str, Any], message: str) -> None:
    forks = {"forks": {"agents": sections["forks"]}} if "forks" in sections else {}
    rubric = [{"name": "short", "text": "Short.", "agents": sections.get("criterion", ["researcher-1"])}]
    distill = {"distill": {"teacher": "other", "agents": sections["distill"]}} if "distill" in sections else {}
    ce = {"ce": {"weight": 0.1, "agents": sections["ce"]}} if "ce" in sections else {}
    formats = [{"pattern": "x", "weight": 1.0, "agents": sections["format"]}] if "format" in sections else []
    judge = {"judge": {"model": "base", "rubric": rubric}, "air": {"formats": formats}}
    config = {
        "agent": "my:solve",
        "policy": {"model": "m"},
        "agents": {"train": ["researcher-*"]},
        "rollouts": forks,
        "algorithm": {**distill, **ce},
        "credit": {"rewards": "counterfactual"} if forks else judge,
    }
    with pytest.raises(ConfigError) as error:
        load_config(config)
    assert message in str(error.value)


@pytest.mark.parametrize("train", [None, pytest.param("all", marks=pytest.mark.long)])
def test_lists_of_trained_agents_are_checked_in_the_first_rollouts(program: Program, train: str | None) -> None:
    """The configuration names no trained agent, so the names are known only now."""

    def solve(task: Any) -> float:
        with scope("writer"):
            program.ask("writer")
        return 1.0

    def ce(*agents: str) -> dict[str, Any]:
        return {
            "agents": {"train": train} if train else {},
            "algorithm": {"ce": {"weight": 0.1, "agents": list(agents)}},
        }

    program.run(solve, **ce("wri*"))
    message = r"algorithm.ce.agents names 'writr', but the trained agents of this program are \['writer'\]; did you mean 'writer'\?"
    with pytest.raises(ConfigError, match=message):
        program.run(solve, **ce("writer", "writr"))


def test_names_that_no_agent_has_so_far_are_logged_if_agents_may_appear(
    program: Program, caplog: pytest.LogCaptureFixture
) -> None:
    ce = {"weight": 0.1, "agents": ["researcher-1", "researcher-typo", "*-9"]}
    program.run(spawning(program), agents={"train": ["researcher-*"]}, algorithm={"ce": ce})
    assert "algorithm.ce.agents names 'researcher-typo', '*-9', which no trained agent has; the trained" in caplog.text


def test_an_agent_with_auxiliary_calls_only_was_reached(program: Program, caplog: pytest.LogCaptureFixture) -> None:
    """The policy summarizes, and only the worker is trained: no warning that the summarizer made no call."""

    def solve(task: Any) -> float:
        for name in ("worker", "summarizer"):
            with scope(name):
                program.ask(name)
        return 1.0

    rules = [{"name": "masked", "agent": "summarizer"}]
    groups = program.run(solve, agents={"train": ["worker", "summarizer"], "auxiliary": rules})
    assert agents_of(groups) == {("worker", True), ("summarizer/masked", False)}
    assert [t.agent for e in program.episodes for t in e.transitions] == ["worker"] * 2
    assert "made no model call" not in caplog.text


def test_a_pattern_freezes_no_calls_without_an_agent() -> None:
    assert Routing(frozen={"*": "base"}).frozen_model(None) is None
    assert Routing(frozen={"*": "base"}).frozen_model("writer") == "base"
    assert Routing(frozen={"": "base"}).frozen_model(None) == "base"
