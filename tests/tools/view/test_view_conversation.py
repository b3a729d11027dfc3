"""Which messages of a call are new, the order of a rollout's tree, and the last answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from lightning_core import Call, Trace
from lightning_core.tools.view.conversation import final_answer, repeated_messages, show_message
from lightning_core.tools.view.outline import SCALE, make_outline
from lightning_core.trace import Event
from tests.credit.episodes import call, calls_tools, episode, event


def conversation(*texts: str) -> tuple[dict[str, Any], ...]:
    """Messages with the roles user and assistant in turn."""
    return tuple({"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts))


def trace_of(events: Sequence[Event]) -> Trace:
    """A rollout of ``events`` alone."""
    return replace(
        episode("r", 1.0).trace, calls=(), events=(event("root", "rollout", 0.0, 10.0, parent=None), *events)
    )


def says(identity: str, messages: Any, *, agent: str = "a", sequence: int = 0, **changes: Any) -> Call:
    return call(identity, "r", agent, sequence, messages=messages, **changes)


def test_messages_of_any_earlier_call_of_the_agent_are_repeated() -> None:
    calls = [
        says("first", conversation("q")),
        says("other agent", conversation("q"), agent="b"),
        says("continued", conversation("q", "a", "q2")),
        says("written differently", conversation("q", " A ", "q2")),
        says("back to the first", conversation("q", "a", "other")),
        says("forked", conversation("changed", "a", "q2", "a2", "q3")),
        says("shorter", conversation("q")),
        says("empty", ()),
        says("after forked", conversation("changed", "a", "q2", "a2", "q3", "a3", "q4")),
    ]
    assert repeated_messages(calls) == {
        "first": 0,
        "other agent": 0,
        "continued": 2,
        "written differently": 2,
        "back to the first": 2,
        "forked": 0,
        "shorter": 1,
        "empty": 0,
        "after forked": 6,
    }


def test_an_item_is_below_its_parent_and_on_the_time_axis() -> None:
    events = [event("outer", "agent", 0.0, 10.0), event("inner", "tool", 5.0, 10.0, parent="outer")]
    rows = make_outline(trace_of(events))
    assert [(row.item.id, row.depth) for row in rows] == [("outer", 0), ("inner", 1)]
    assert all(0 <= row.left <= row.left + row.width <= SCALE for row in rows)
    assert rows[1].width == rows[0].width / 2


def test_deeply_nested_spans_have_their_depth() -> None:
    names = ["root", *(f"n{i}" for i in range(3000))]
    events = [event(name, "node", 0.0, 1.0, parent=above) for above, name in pairwise(names)]
    rows = make_outline(trace_of(events))
    assert [row.depth for row in rows] == list(range(3000))


def test_the_answer_is_the_last_response_of_a_trained_agent() -> None:
    text = {"role": "assistant", "content": " two\nlines "}
    trained = says("t", (), response=text, trained=True)
    judge = says("j", (), response={"role": "assistant", "content": "frozen"}, sequence=1)
    assert final_answer([trained, judge]) == "two lines"
    assert final_answer([judge]) == "frozen"
    assert final_answer([says("none", (), response=None, trained=True), judge]) == "frozen"
    assert final_answer([]) == ""
    assert final_answer([trained], limit=5) == "two …"
    assert final_answer([says("c", (), response=calls_tools("x"))]).startswith("search(")
    assert final_answer(list(episode("e", 1.0, "ab").trace.calls)) != ""


def test_a_text_within_the_limit_is_whole() -> None:
    assert show_message({"role": "user", "content": "abc"}, limit=3).left_out == 0
    assert show_message({"role": "user", "content": "abcd"}, limit=3).left_out == 1
    assert show_message({"role": "user", "content": "abcd"}, limit=None).text == "abcd"
