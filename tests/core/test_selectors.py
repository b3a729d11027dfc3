"""Selectors: names and paths of agents and nodes, and what a rollout knows of its program."""

import pytest

from lightning_core import rollout, trainable
from lightning_core.capture import aside, current_address, declare_agents, is_current_agent, note_elsewhere, scope
from lightning_core.cli.ledger import format_names
from lightning_core.records.ledger import trace_ledger
from lightning_core.records.paths import ambiguous_paths
from lightning_core.trace import DECLARED_AGENTS, REQUESTS
from tests.cli.recorded import call


@pytest.mark.parametrize(
    ("selectors", "path", "agent"),
    [
        (["writer"], ["team", "writer"], "writer"),
        (["team/writer"], ["team", "writer"], "team/writer"),
        (["team/writer"], ["other", "writer"], "writer"),
        (["team/writer"], ["team", "inner", "writer"], "team/writer"),
        (["team/writer", "writer"], ["team", "writer"], "team/writer"),
        (["team/writer", "writer"], ["other", "writer"], "writer"),
        (["a/b/c", "a/c"], ["a", "b", "c"], "a/b/c"),
        (["b/a/c"], ["a", "b", "c"], "c"),
        (["and/or"], ["and/or"], "and/or"),
        (["team/writer"], ["team", "writer", "inner"], "team/writer"),
    ],
)
def test_the_agent_of_a_node_is_the_longest_selector_of_its_path(selectors: list[str], path: list[str], agent: str):
    with rollout(agents=selectors):
        scopes = [scope(name, kind="node") for name in path]
        for opened in scopes:
            opened.__enter__()
        address = current_address()
        for opened in reversed(scopes):
            opened.__exit__(None, None, None)
    assert address is not None
    assert address.agent == agent


def test_the_mark_and_its_policy_are_part_of_the_address():
    seen: list[str | None] = []

    def note() -> None:
        address = current_address()
        assert address is not None
        seen.append(address.mark)

    with rollout():
        note()
        trainable(note, name="selectors-marked")()
        trainable(note, name="selectors-small", policy="small")()
        with scope("selectors-node", kind="node"):
            note()
        with scope("selectors-small", kind="node"):
            note()
    assert seen == [None, "", "small", None, "small"]


def test_what_a_program_declares_and_sends_elsewhere_is_in_its_trace():
    with rollout() as run:
        declare_agents(["b", "a"])
        for _ in range(2):
            with scope("searcher"):
                note_elsewhere("search.example", "not a model call")
    root = next(e for e in run.trace.events if e.kind == "rollout")
    assert list(root.attributes[DECLARED_AGENTS]) == ["a", "b"]
    (elsewhere,) = (e for e in run.trace.events if e.kind == "elsewhere")
    assert (elsewhere.name, elsewhere.agent, elsewhere.attributes[REQUESTS]) == ("search.example", "searcher", 2)


def agent() -> str | None:
    address = current_address()
    return None if address is None else address.agent


@pytest.mark.parametrize(
    ("selectors", "hook", "inside"),
    [
        ([], "hook", "inside"),
        (["writer"], "hook", "inside"),
        (["hook"], "hook", "hook"),
        (["inside"], "hook", "inside"),
    ],
)
def test_an_auxiliary_node_does_not_speak_for_the_agent_around_it(selectors: list[str], hook: str, inside: str):
    with rollout(agents=selectors) as run, scope("writer"):
        with scope("hook", kind="auxiliary"):
            assert agent() == hook
            with scope("inside", kind="auxiliary"):
                assert agent() == inside
            with scope("inner agent"), scope("its hook", kind="auxiliary"):
                assert agent() == "its hook"
        assert agent() == "writer"
    assert [e.kind for e in run.trace.events if e.name == "hook"] == ["node"]


@pytest.mark.parametrize(("selectors", "seen"), [([], "Handler"), (["writer/Handler"], "writer/Handler")])
def test_aside_has_another_agent_and_no_span(selectors: list[str], seen: str):
    with aside("Handler"):
        assert agent() is None
    with rollout(agents=selectors) as run, scope("writer"):
        before = current_address()
        with aside("Handler"):
            address = current_address()
            with scope("node", kind="node"):
                inner = agent()
        assert current_address() == before
    assert before is not None
    assert address is not None
    assert (address.agent, address.span) == (seen, before.span)
    assert inner == ("node" if not selectors else seen)
    assert "Handler" not in [event.name for event in run.trace.events]


def test_an_agent_selected_by_its_path_is_current_by_its_name():
    with rollout(agents=["team/writer"]), scope("team", kind="node"), scope("writer", kind="node"):
        assert agent() == "team/writer"
        assert is_current_agent("writer")
        assert is_current_agent("team/writer")
        assert not is_current_agent("team")


@pytest.mark.parametrize(
    ("places", "paths"),
    [
        ([["a", "w"], ["b", "w"]], {"w": ["a/w", "b/w"]}),
        ([["a", "w"], ["a", "w"]], {}),
        ([["a", "x"], ["a", "w"]], {}),
        ([["w"], ["a", "w"]], {"w": ["a/w"]}),
        ([["w"], ["w", "w"]], {}),
        ([["a", "b", "w"], ["a", "c", "w"]], {"w": ["a/b/w", "a/c/w"]}),
    ],
)
def test_paths_of_names_in_several_places(places: list[list[str]], paths: dict[str, list[str]]):
    with rollout() as run:
        for names in places:
            scopes = [scope(name, kind="node") for name in names]
            for opened in scopes:
                opened.__enter__()
            call(names[-1], "?", {"role": "assistant", "content": "!"})
            for opened in reversed(scopes):
                opened.__exit__(None, None, None)
    assert ambiguous_paths([run.trace]) == paths


def test_an_agent_that_is_selected_by_its_path_is_listed_beside_the_others_of_its_name() -> None:
    with rollout(agents=["a/w"]) as run:
        for outer in ("a", "b"):
            with scope(outer, kind="node"), scope("w", kind="node"):
                address = current_address()
                assert address is not None
                call(str(address.agent), "?", {"role": "assistant", "content": "!"})
    paths = ambiguous_paths([run.trace])
    assert paths == {"w": ["a/w", "b/w"]}
    listed = "names for agents.train: w (one place only: a/w, b/w)"
    assert format_names(trace_ledger(run.trace), paths) == listed
