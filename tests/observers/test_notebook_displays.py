"""Objects in notebooks: small HTML tables with escaped text."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from openai import OpenAI

from lightning_core.capture import rollout, scope
from lightning_core.records.report import Summary
from lightning_core.records.results import Result
from lightning_core.records.statistics.intervals import compare
from lightning_core.testing.playground import playground
from lightning_core.transitions import trace_to_transitions, transitions_to_rows
from tests.tools.cli.recorded import call


def test_a_trace_lists_its_calls_with_escaped_text() -> None:
    with rollout(task={"id": "<b>"}) as run, scope("writer"):
        call("writer", "Why?", {"role": "assistant", "content": "<script>alert(1)</script>" + "x" * 5000})
    html = run.trace._repr_html_()
    assert "&lt;script&gt;" in html
    assert "<script>" not in html
    assert "task &lt;b&gt;: reward None" in html
    assert len(html) < 1500, "long cells are cut"


def test_a_trace_of_many_calls_says_how_many_are_left_out() -> None:
    with rollout(task={"id": "t"}) as run, scope("writer"):
        for _ in range(25):
            call("writer", "Why?", {"role": "assistant", "content": "so"})
    html = run.trace._repr_html_()
    assert html.count("<tr>") == 21
    assert "… 5 rows more" in html


def test_a_row_lists_its_calls_and_advantages() -> None:
    with playground(["Four."], train=["writer"], integrations=()) as run, scope("writer"):
        client = OpenAI(api_key="any", max_retries=0)
        client.chat.completions.create(model="gpt", messages=[{"role": "user", "content": "2 + 2?"}])
    (call,) = trace_to_transitions(run.trace, agents={"writer"})
    (row,) = transitions_to_rows([call], {call.call: 0.5})
    html = row._repr_html_()
    assert f"row of agent writer: {len(row.token_ids)} tokens, {int(np.sum(row.mask))} trained on" in html
    assert "0.500" in html
    assert call.call in html


def test_a_result_shows_the_held_out_rewards() -> None:
    before = {str(i): [0.1 * (i % 10)] for i in range(40)}
    compared = compare(before, {task: [r[0] + 0.3] for task, r in before.items()})
    summary = Summary(eval=compared, steps=3, rollouts=9, tokens_sampled=1, tokens_trained=1, wall_seconds=1.0, seed=0)
    html = Result(folder=Path("runs/<x>"), checkpoint=Path("c"), summary=summary, metrics=())._repr_html_()
    assert "runs/&lt;x&gt;: 3 steps, 9 rollouts" in html
    for value in (">0.450<", ">0.750<", ">0.300<", ">True<"):
        assert value in html
