"""Agents that begin nearly all held-out rollouts with one response after training."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from lightning_core import trace as tr
from lightning_core.records.report import read_summary
from lightning_core.records.statistics.same_responses import SameResponse, same_responses
from lightning_core.records.statistics.summary import SolvedTasks
from lightning_core.records.store import CallCredit, Phase, Store
from tests.records.test_ledger import record, spans
from tests.records.test_report import printed, summary

CREDIT = CallCredit(rollout="", call="c", agent="triage", step=1, reward=0.0, advantage=0.0, tokens=1)


def rollout(store: Store, phase: Phase, step: int, calls: Sequence[tuple[str, str]]) -> str:
    """A rollout with ``calls``: the agent and the response of each."""
    name = f"{store.count() + 1:032x}"
    requests = [
        (
            {
                tr.OPERATION: "chat",
                tr.AGENT: agent,
                tr.OUTPUT_MESSAGES: json.dumps([{"role": "assistant", "content": said}]),
            },
            None,
        )
        for agent, said in calls
    ]
    store.add_rollout(replace(record(name), phase=phase, step=step), spans(name, list(requests)))
    return name


def filled(store: Store, before: Sequence[str], after: Sequence[str]) -> None:
    """A run whose agent ``triage`` gives these responses, each before an answer of ``desk`` that differs."""
    for phase, step, said in (("eval_before", 0, before), ("eval_after", 3, ["other"] * 10), ("eval_after", 9, after)):
        for number, response in enumerate(said):
            rollout(store, phase, step, [("triage", response), ("triage", f"then {number}"), ("desk", f"{number}")])
    trained = rollout(store, "train", 1, [("triage", "repairs"), ("desk", "1")])
    store.add_credit([replace(CREDIT, rollout=trained, call=agent, agent=agent) for agent in ("triage", "desk")])


VARIED = ["repairs", "billing"] * 5
COLLAPSED = SameResponse(agent="triage", response="repairs", rollouts=20, same=19, rollouts_before=10, same_before=5)


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        pytest.param(VARIED, ["repairs"] * 19 + ["billing"], (COLLAPSED,), id="one response"),
        pytest.param(VARIED, ["repairs"] * 18 + ["billing"] * 2, (), id="two responses"),
        pytest.param(["repairs"] * 8 + ["billing"] * 2, ["repairs"] * 20, (), id="before as after"),
        pytest.param(VARIED, ["repairs"] * 7, (), id="few tasks"),
        pytest.param([], ["repairs"] * 20, (), id="not evaluated before"),
    ],
)
def test_the_first_responses_of_trained_agents_are_compared(
    tmp_path: Path, before: Sequence[str], after: Sequence[str], expected: tuple[SameResponse, ...]
) -> None:
    with Store(tmp_path / "store.db") as store:
        filled(store, before, after)
        assert same_responses(store) == expected


def test_an_agent_that_is_not_trained_is_not_named(tmp_path: Path) -> None:
    with Store(tmp_path / "store.db") as store:
        for phase, said in (("eval_before", VARIED), ("eval_after", ["repairs"] * 20)):
            for response in said:
                rollout(store, phase, 0, [("triage", response)])
        assert same_responses(store) == ()


def test_the_summary_names_them_while_tasks_are_unsolved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written = summary(same_responses=(replace(COLLAPSED, response="[b]repairs"),))
    written.write(tmp_path / "summary.json")
    assert read_summary(tmp_path / "summary.json") == written
    out = " ".join(printed(written, capsys).split())
    assert "Agent triage begins 19 of 20 held-out rollouts with '[b]repairs'. Before training, the most" in out
    assert "most frequent first response had 5 of 10." in out
    solved = replace(written, solved=SolvedTasks(tasks=20, before=2, after=19))
    assert "Agent triage" not in printed(solved, capsys)
