"""Names of the OpenAI Agents SDK's agents: those that have not spoken, and equal names in several places."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from agents import Agent, handoff

from lightning_core import trainable
from lightning_core.testing import tool_call
from lightning_core.trace import DECLARED_AGENTS
from tests.integrations.combinations import combined
from tests.integrations.sdk_programs import HOWS, cast, first, make, run, speakers

INTEGRATION = "openai-agents"
pytestmark = pytest.mark.usefixtures("installed")


def make_desk(*, marked: bool = False) -> Agent[Any]:
    """Triage hands off to Billing, which has an Adviser as a tool, and by a handoff of its own to Sales."""
    billing = make("Billing", tools=[make("Adviser").as_tool("advise", "Advises.")])
    billing = trainable(billing, name="bills") if marked else billing
    sales = make("Sales")
    return make("Triage", handoffs=[billing, handoff(sales)])


@pytest.mark.parametrize(("marked", "how"), combined([True, False], HOWS))
def test_agents_that_were_not_reached_are_declared(how: str, marked: bool) -> None:
    with cast({"Triage": "Hello."}) as playground, playground.rollout() as rollout:
        run(make_desk(marked=marked), "hi", how)
    root = rollout.trace.events[0]
    assert speakers(rollout.trace) == ["Triage"]
    assert set(root.attributes[DECLARED_AGENTS]) == {"Triage", "bills" if marked else "Billing", "Adviser", "Sales"}


@pytest.mark.parametrize(
    ("selectors", "expected"),
    [
        pytest.param(["Writer"], ["Boss", "Writer", "Editor", "Writer"], marks=pytest.mark.long),
        (["Boss/Writer"], ["Boss", "Boss/Writer", "Editor", "Writer"]),
        (["Editor/Writer"], ["Boss", "Writer", "Editor", "Editor/Writer"]),
        pytest.param(["Boss"], ["Boss", "Writer", "Editor", "Writer"], marks=pytest.mark.long),
        (["edit/Writer", "Boss/draft/Writer"], ["Boss", "Boss/draft/Writer", "Editor", "edit/Writer"]),
    ],
)
def test_one_name_inside_two_agents(selectors: Sequence[str], expected: list[str]) -> None:
    boss = make("Boss", tools=[make("Writer").as_tool("draft", "Writes.")])
    editor = make("Editor", tools=[make("Writer").as_tool("edit", "Edits.")])
    script = {
        "Boss": first(tool_call("draft", input="hm"), "Done"),
        "Editor": first(tool_call("edit", input="hm"), "Done"),
        "Writer": "Words.",
    }
    with cast(script) as playground, playground.rollout(train=selectors) as rollout:
        run(boss, "go")
        run(editor, "go")
    spoken = speakers(rollout.trace)
    assert [spoken[0], spoken[1], spoken[3], spoken[4]] == expected
