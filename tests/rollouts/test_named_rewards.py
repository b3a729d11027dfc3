"""Rewards that name an agent or a call: they reach it, or it is said why not."""

from __future__ import annotations

import threading
from collections.abc import Callable
from enum import Enum
from typing import Any

import pytest
from rich.console import Console

from lightning_core import load_config, reward
from lightning_core.capture import recording, run, scope
from lightning_core.capture.context import inherit
from lightning_core.config import Config
from lightning_core.credit import Episode
from lightning_core.credit.reward_rules import broadcast, explicit, immediate
from lightning_core.errors import ConfigError, InfrastructureError, Repeats
from lightning_core.records.store import Store
from lightning_core.rollouts.selection import check_agents, warn_of_unmatched
from lightning_core.tools.cli.tree import make_tree
from tests.program_runs import Program

SEVERAL = {"retries": 2, "max_invalid": 9}
"""Rollouts may be repeated and left out."""


def team(program: Program, name: str) -> Callable[[Any], float]:
    """A node inside another one, and a reward for it under ``name``."""

    def solve(task: Any) -> float:
        with scope("team", kind="node"), scope("writer", kind="node"):
            program.ask()
        reward(0.5, agent=name)
        return 0.0

    return solve


def credits(episodes: list[Episode]) -> set[tuple[float, ...]]:
    return {tuple(value for rule in (broadcast, explicit, immediate) for value in rule(e)) for e in episodes}


@pytest.mark.parametrize("selector", ["writer", "team/writer", "team/*", "writ*"])
@pytest.mark.parametrize("name", ["writer", "team/writer"])
def test_a_reward_reaches_an_agent_by_its_name_and_by_its_path(program: Program, selector: str, name: str) -> None:
    groups = program.run(team(program, name), agents={"train": [selector]})
    assert {r.status for g in groups for r in g.rollouts} == {"ok"}
    assert len(program.episodes) == 2
    assert credits(program.episodes) == {(0.5, 0.5, 0.5)}


def two_writers(program: Program, name: str) -> Callable[[Any], float]:
    def solve(task: Any) -> float:
        for around in ("draft", "final"):
            with scope(around, kind="node"), scope("writer", kind="node"):
                program.ask()
        reward(0.5, agent=name)
        return 0.0

    return solve


def test_a_name_that_several_agents_have_is_an_invalid_reward(program: Program) -> None:
    agents: dict[str, Any] = {"train": ["draft/writer", "final/writer"]}
    error = r"2 invalid\).*task 'a': .*agent='writer'\) can mean 'draft/writer' or 'final/writer'; give the path of one"
    with pytest.raises(InfrastructureError, match=error):
        program.run(two_writers(program, "writer"), agents=agents, rollouts=SEVERAL)
    program.run(two_writers(program, "final/writer"), agents=agents)
    assert [broadcast(e) for e in program.episodes] == [[0.0, 0.5]] * 2


def test_one_name_of_agents_in_several_places_is_one_agent(program: Program) -> None:
    program.run(two_writers(program, "writer"), agents={"train": ["writer"]})
    assert [broadcast(e) for e in program.episodes] == [[0.5, 0.5]] * 2
    error = r"agent='final/writer'\) is one of the places of agent 'writer', which also made calls as 'draft/writer'"
    with pytest.raises(InfrastructureError, match=error):
        program.run(two_writers(program, "final/writer"), agents={"train": ["writer"]}, rollouts=SEVERAL)


def test_the_agent_of_exactly_this_name_comes_first(program: Program) -> None:
    def solve(task: Any) -> float:
        with scope("writer", kind="node"):
            program.ask()
            with scope("final", kind="node"), scope("writer", kind="node"):
                program.ask()
        reward(0.5, agent="writer")
        return 0.0

    program.run(solve, agents={"train": ["writer", "final/writer"]})
    assert [broadcast(e) for e in program.episodes] == [[0.5, 0.0]] * 2


class Names(str, Enum):  # noqa: UP042 - a StrEnum has another `__str__`
    WRITER = "writer"


def test_a_name_may_be_an_enums_value_and_nothing_but_a_text(program: Program) -> None:
    program.run(team(program, Names.WRITER), agents={"train": ["team/writer"]})
    assert credits(program.episodes) == {(0.5, 0.5, 0.5)}
    number: Any = 5
    with pytest.raises(InfrastructureError, match=r"reward\(…, agent=5\): expected the name of an agent"):
        program.run(team(program, number), agents={"train": ["writer"]}, rollouts=SEVERAL)


def test_a_reward_of_a_call_that_is_not_there_is_invalid_and_not_repeated(program: Program) -> None:
    def solve(task: Any) -> float:
        program.ask()
        reward(0.5, call="chatcmpl-typo")
        return 0.0

    error = r"2 invalid\).*task 'a': reward\(…, call='chatcmpl-typo'\): there is no such call"
    with pytest.raises(InfrastructureError, match=error):
        program.run(solve, rollouts=SEVERAL)
    with Store(program.folder / "store.db", read_only=True) as store:
        assert {(r.status, r.attempt) for r in store.rollouts()} == {("invalid", 0)}


def test_a_failed_rollout_counts_without_such_a_reward_and_says_so(
    program: Program, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "_ignored", Repeats())  # a warning is logged once

    def solve(task: Any) -> float:
        program.ask()
        reward(0.5)
        reward(0.25, call="chatcmpl-typo")
        raise KeyError("of the agent")

    groups = program.run(solve)
    assert {(r.status, r.reward) for g in groups for r in g.rollouts} == {("failed", 0.5)}
    assert caplog.text.count("a reward is ignored: reward(…, call='chatcmpl-typo'): there is no such call") == 1


def config(**agents: Any) -> Config:
    return load_config({"policy": {"model": "m"}, "agents": agents})


def test_a_reward_of_an_agent_that_never_made_a_call_is_a_warning(
    program: Program, caplog: pytest.LogCaptureFixture
) -> None:
    groups = program.run(team(program, "writter"), agents={"train": ["writer"]})
    check_agents(config(train=["writer"]), [r for g in groups for r in g.rollouts])
    assert "reward(…, agent='writter') has no effect so far: no agent of this name made a call in 2" in caplog.text
    assert "the agents with calls are ['writer']; did you mean 'writer'?" in caplog.text
    console = Console(width=100)
    with console.capture() as shown:
        console.print(make_tree(groups[0].rollouts[0].trace))
    assert "reward 0.500 to agent writter, which made no call" in shown.get()


def test_a_reward_of_an_agent_that_only_some_rollouts_reach_is_none(
    program: Program, caplog: pytest.LogCaptureFixture
) -> None:
    def solve(task: Any) -> float:
        with scope("router", kind="node"):
            program.ask()
        if task["id"] == "a":
            with scope("team", kind="node"), scope("writer", kind="node"):
                program.ask()
        reward(0.5, agent="writer")
        return 0.0

    train = ["router", "team/writer"]
    groups = program.run(solve, agents={"train": train})
    check_agents(config(train=train), [r for g in groups for r in g.rollouts])
    assert sorted(broadcast(e) for e in program.episodes) == [[0.0], [0.0, 0.5]]
    assert "has no effect" not in caplog.text


def test_a_rollout_with_rewards_of_agents_alone_says_which_reward_is_missing(program: Program) -> None:
    def solve(task: Any) -> None:
        with scope("writer", kind="node"):
            program.ask()
        reward(0.5, agent="writer")

    error = r"without a reward of the episode \(it has 1 reward of agents or calls\): the agent returned None.*; 0 if"
    with pytest.raises(InfrastructureError, match=error):
        program.run(solve, agents={"train": ["writer"]}, rollouts=SEVERAL)


@pytest.mark.parametrize("executor", ["thread", "task"])
def test_a_reward_after_the_rollout_is_a_warning(
    program: Program, executor: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording, "_late", Repeats())  # a warning is logged once
    over = threading.Event()
    late: list[threading.Thread] = []

    def give() -> None:
        assert over.wait(60)
        reward(0.5)

    def solve(task: Any) -> float:
        program.ask()
        late.append(threading.Thread(target=inherit(give)))
        late[-1].start()
        return 0.25

    groups = program.run(solve, rollouts={"executor": executor})
    over.set()
    for thread in late:
        thread.join()
    assert [r.reward for g in groups for r in g.rollouts] == [0.25] * 2
    assert "a reward of 0.5 is lost: its rollout has ended, because the agent had returned" in caplog.text


def test_a_rule_that_excluded_no_call_is_a_warning(program: Program, caplog: pytest.LogCaptureFixture) -> None:
    def ask(task: Any) -> float:
        with scope("writer", kind="node"):
            program.ask("Write a title.")
            program.ask()
        return 1.0

    def agents(text: str) -> dict[str, Any]:
        return {"train": ["writer"], "auxiliary": [{"name": "title", "agent": "writer", "contains": text}]}

    for text, is_idle in (("Write a tilte.", True), ("Write a title.", False)):
        caplog.clear()
        program.run(ask, agents=agents(text))
        warn_of_unmatched(config(**agents(text)), program.ledger())
        assert ("agents.auxiliary: no call of the run matched the rules of 'title'" in caplog.text) == is_idle
        (program.folder / "store.db").unlink()


def test_a_rule_for_an_agent_that_is_not_there_is_a_warning(program: Program, caplog: pytest.LogCaptureFixture) -> None:
    groups = program.run(team(program, "writer"), agents={"train": ["writer"]})
    rule = {"name": "title", "agent": "critic", "contains": "title"}
    check_agents(config(train=["writer"], auxiliary=[rule]), [r for g in groups for r in g.rollouts])
    assert "agents.auxiliary names 'critic', which no agent had in 2 rollouts" in caplog.text
    misspelt = config(auxiliary=[rule | {"agent": "wrter"}])
    with pytest.raises(ConfigError, match=r"'wrter'.* [Dd]id you mean 'writer'"):
        check_agents(misspelt, [r for g in groups for r in g.rollouts])
