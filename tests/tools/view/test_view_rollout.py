"""The page of one rollout: its tree, calls, tokens, errors and credit."""

from __future__ import annotations

import re
import sqlite3
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any

import httpx
import pytest

from lightning_core import load_config
from lightning_core import trace as tr
from lightning_core.records.store import Store
from lightning_core.trace import SpanRecord
from tests.tools.view.made_runs import make_run, rollout
from tests.tools.view.pages import Seen, browsing, is_harmless
from tests.tools.view.recorded_run import AGENT, ERROR, PART, QUESTION, REASON, TASK, TOOL, record, root, span


def calls_of(html: str) -> list[str]:
    return re.findall(r'id="call-([0-9a-f]{16})"', html)


def test_every_text_of_an_agent_is_text(sample: httpx.Client) -> None:
    html = sample.get("/runs/sample/rollouts/2").raise_for_status().text
    text = Seen(html).text
    for written in (AGENT, TOOL, ERROR, REASON, TASK, QUESTION, PART, "Be <i>brief</i>.", "<script>alert(2)</script>"):
        assert written in text
    assert is_harmless(html)
    for call in calls_of(html):
        for part in ("", "?part=tokens", "?part=history&count=9"):
            assert is_harmless(sample.get(f"/runs/sample/rollouts/2/calls/{call}{part}").raise_for_status().text)


def test_the_header_says_what_was_recorded(sample: httpx.Client) -> None:
    seen = Seen(sample.get("/runs/sample/rollouts/6").text)
    assert (
        f"task {TASK} phase train step 2 reward 1.000 status ok time 0.25 s policy version 3 judge rollout 10"
        in seen.text
    )
    assert f"Rewards episode, {PART} +1.000" in seen.text
    assert {"/runs/sample/rollouts/5", "/runs/sample/rollouts/7", "/runs/sample/rollouts/10"} <= set(seen.links)
    failed = Seen(sample.get("/runs/sample/rollouts/9").text).text
    assert f"Error: TimeoutError: {ERROR}" in failed
    assert "Nothing was recorded in this rollout: it ended before its agent ran." in failed
    assert "No calls were recorded." in Seen(sample.get("/runs/sample/rollouts/10").text).text


def test_the_tree_has_every_span_in_its_place(sample: httpx.Client) -> None:
    html = sample.get("/runs/sample/rollouts/2").text
    rows = re.findall(r'<li class="row (\w+)( failed)? d(\d+)"', html)
    assert rows == [
        ("elsewhere", "", "0"), ("agent", "", "0"), ("call", "", "1"), ("tool", " failed", "1"), ("call", "", "1"),
        ("call", " failed", "1"),
    ]  # fmt: skip
    for link in Seen(html[html.index('<ol class="outline"') : html.index("</ol>")]).links:
        assert f'id="{link.removeprefix("#")}"' in html


def test_refused_and_failed_requests_and_those_that_went_elsewhere_have_their_reason(sample: httpx.Client) -> None:
    text = Seen(sample.get("/runs/sample/rollouts/2").text).text
    assert "Refused: messages is empty; expected at least one message" in text
    assert f"tool {TOOL} of {AGENT} Failed: LookupError: {ERROR}" in text
    assert f"elsewhere api.example.com of {AGENT}" in text
    assert f"requests 3 reason {REASON}" in text


def test_only_new_messages_are_open_and_the_call_has_all(sample: httpx.Client) -> None:
    html = sample.get("/runs/sample/rollouts/2").text
    first, second, _ = calls_of(html)
    shown = Seen(html[html.index(f'id="call-{second}"') :]).text
    assert "3 earlier messages" in shown
    assert "found nothing" in shown
    assert QUESTION not in shown
    (part,) = re.findall(r'data-fragment="([^"]+)"', html)
    assert unescape(part) == f"/runs/sample/rollouts/2/calls/{second}?part=history&count=3"
    history = Seen(sample.get(unescape(part)).text).text
    assert QUESTION in history
    assert '"query": "<i>naïve</i>"' in history
    assert "found nothing" not in history
    whole = Seen(sample.get(f"/runs/sample/rollouts/2/calls/{second}").text).text
    assert (
        whole.index("Be <i>brief</i>.") < whole.index(QUESTION) < whole.index("found nothing") < whole.index("It is ")
    )
    assert "tools offered search" in whole
    assert "The prompt continues an earlier call: it begins with exactly the recorded tokens" in whole
    assert "The prompt starts a new sequence" in Seen(sample.get(f"/runs/sample/rollouts/2/calls/{first}").text).text


def tokens(html: str) -> list[tuple[str, str, dict[str, str]]]:
    """Class, text and data of each token."""
    found = re.findall(r'<span class="t ([^"]*)"((?: data-\w+="[^"]*")*)>([^<]*)</span>', html)
    return [
        (marks, unescape(text), dict(re.findall(r'data-(\w+)="([^"]*)"', data)))
        for marks, data, text in found
        if "data-id" in data
    ]


def test_each_token_has_its_exact_text_and_numbers(sample: httpx.Client, sample_folder: Path) -> None:
    pytest.importorskip("tokenizers")
    _, second, _ = calls_of(sample.get("/runs/sample/rollouts/2").text)
    html = sample.get(f"/runs/sample/rollouts/2/calls/{second}?part=tokens").text
    found = tokens(html)
    with Store(sample_folder / "sample" / "store.db", read_only=True) as store:
        call = next(c for c in store.trace(2).calls if c.id == second)
        advantage = next(c.advantage for c in store.credit(rollout=2) if c.call == second)
    assert call.response is not None
    assert call.output_ids is not None
    assert call.logprobs is not None
    assert "".join(text for _, text, _ in found) == f"{call.response['content']}<|im_end|>"
    assert [int(data["id"]) for _, _, data in found] == call.output_ids.tolist()
    assert [float(data["logprob"]) for _, _, data in found] == pytest.approx(call.logprobs.tolist(), abs=1e-4)
    assert {data["change"] for _, _, data in found} == {"+0.0500", "-0.2000"}
    assert f'data-advantage="{advantage:+.4f}"' in html
    rocket = [(text, data["bytes"]) for marks, text, data in found if "part" in marks]
    assert rocket == [("", "f0"), ("", "9f"), ("", "9a"), ("🚀", "80")]
    assert [text for marks, text, _ in found if "line" in marks] == ["\n", "\n"]
    assert found[0][0].startswith("p0 ")
    assert found[-1][0].startswith("p4 ")
    assert "was not measured" not in html


def test_without_a_tokenizer_tokens_are_ids(own_runs: Path) -> None:
    pytest.importorskip("tokenizers")
    (own_runs / "model" / "tokenizer.json").unlink()
    with browsing(own_runs) as client:
        first = calls_of(client.get("/runs/sample/rollouts/1").text)[0]
        html = client.get(f"/runs/sample/rollouts/1/calls/{first}?part=tokens").text
        assert all(text == data["id"] for _, text, data in tokens(html))
        assert "tokenizer.json in a checkpoint of the run, or in the folder policy.model" in Seen(html).text
        (own_runs / "model" / "tokenizer.json").write_text("{}")
        damaged = client.get(f"/runs/sample/rollouts/1/calls/{first}?part=tokens")
        assert "tokenizer.json' cannot be read" in Seen(damaged.text).text


def test_a_call_says_which_numbers_it_does_not_have(sample: httpx.Client, tmp_path: Path) -> None:
    first = calls_of(sample.get("/runs/sample/rollouts/11").text)[0]
    held_out = Seen(sample.get(f"/runs/sample/rollouts/11/calls/{first}?part=tokens").text).text
    assert "No advantage: this call was not trained on." in held_out
    assert "was not measured" not in held_out
    made = rollout(1)
    ids = {tr.OUTPUT_IDS: tr.pack([5, 6], "<u4"), tr.LOGPROBS: tr.pack([-0.5], "<f4")}
    call = replace(made[1][1], attributes={**made[1][1].attributes, **ids})
    make_run(tmp_path / "made", rollouts=[(made[0], [made[1][0], call]), rollout(2)])
    with browsing(tmp_path) as client:
        html = client.get(f"/runs/made/rollouts/1/calls/{'b' * 16}?part=tokens").text
        assert "No change: this call was not trained on." in Seen(html).text
        assert [set(data) for _, _, data in tokens(html)] == [{"id"}, {"id"}]
        assert "returned no token ids" in client.get(f"/runs/made/rollouts/2/calls/{'b' * 16}?part=tokens").text


def test_a_change_that_was_not_measured_names_the_setting_to_raise(own_runs: Path) -> None:
    with Store(own_runs / "sample" / "store.db") as store:
        call = store.trace(2).calls[0].id
    with sqlite3.connect(own_runs / "sample" / "store.db") as db:
        db.execute("DELETE FROM arrays WHERE key = ?", (tr.LOGPROBS_AFTER,))
    db.close()
    with browsing(own_runs) as client:
        text = Seen(client.get(f"/runs/sample/rollouts/2/calls/{call}?part=tokens").text).text
    found = re.search(r"for (\S+) rollouts with an advantage per step \(now (\d+)\) ?; raise it to measure more", text)
    assert found is not None
    raised = int(found[2]) + 1
    config = load_config(own_runs / "sample" / "config.yaml", [f"{found[1]}={raised}"])
    assert config.trainer.measure_change == raised


@pytest.mark.parametrize("part", ["tokens", "history&count=9"])
def test_a_part_of_a_call_reads_no_other_span(sample: httpx.Client, monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    _, second, _ = calls_of(sample.get("/runs/sample/rollouts/2").text)
    found: list[list[str]] = []
    spans = Store.spans

    def read(self: Store, *given: Any, **options: Any) -> tuple[SpanRecord, ...]:
        result = spans(self, *given, **options)
        found.append([span.span_id for span in result])
        return result

    monkeypatch.setattr(Store, "spans", read)
    sample.get(f"/runs/sample/rollouts/2/calls/{second}?part={part}").raise_for_status()
    assert found == [[second]]


def test_unknown_rollouts_and_calls_are_not_found(sample: httpx.Client) -> None:
    for path in ("13", "0", "99999999999999999999", "1/calls/0000000000000000", "9/calls/x", "1/calls/%2e%2e"):
        response = sample.get(f"/runs/sample/rollouts/{path}")
        assert response.status_code == 404, path
        assert "This page cannot be shown" in response.text
    assert sample.get("/runs/sample/rollouts/x").status_code == 404
    assert "the run has 12, numbered from 1" in sample.get("/runs/sample/rollouts/13").text


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("?import=maybe", "import: found 'maybe', expected one of yes"),
        ("?step=<i>", "step: unknown parameter, expected one of import"),
        ("/calls/x?part=all", "part: found 'all', expected one of tokens, history"),
        ("/calls/x?part=history&count=-1", "count: found '-1', expected a whole number from 0"),
        ("/calls/x?full=1", "full: unknown parameter, expected one of part, count"),
    ],
)
def test_a_bad_value_is_a_message(sample: httpx.Client, query: str, message: str) -> None:
    response = sample.get(f"/runs/sample/rollouts/2{query}")
    assert response.status_code == 400
    assert message in Seen(response.text).text
    assert is_harmless(response.text)


def test_spans_that_form_a_cycle_or_have_unknown_parents_are_shown(tmp_path: Path) -> None:
    identity = "c" * 32
    tool = {tr.OPERATION: "execute_tool", tr.TOOL: "tool"}
    spans = [
        root(identity),
        span(identity, 1, 2, tool, name="one"),
        span(identity, 2, 1, tool, name="two"),
        span(identity, 3, 3, {tr.NODE: "own parent"}),
        span(identity, 4, 77, {tr.NODE: "orphan"}),
        span(identity, 5, 0, {}, name="foreign", end_ns=0),
    ]
    html = page_of(tmp_path, spans, identity)
    rows = re.findall(r'class="row (\w+) d(\d+)" id="row-0+(\d)"', html)
    assert sorted(rows) == [
        ("node", "0", "3"),
        ("node", "0", "4"),
        ("other", "0", "5"),
        ("tool", "0", "1"),
        ("tool", "1", "2"),
    ]


def test_spans_that_make_no_trace_are_a_message(tmp_path: Path) -> None:
    identity = "d" * 32
    chat = {tr.OPERATION: "chat", tr.SEQUENCE: ["not a number"]}
    text = Seen(page_of(tmp_path, [root(identity), span(identity, 1, 0, chat)], identity)).text
    assert "The spans of this rollout cannot be read" in text


def test_messages_of_any_form_are_shown(tmp_path: Path) -> None:
    identity = "e" * 32
    messages = """[{"role": "user", "content": [{"type": "text", "text": "look"}, {"type": "image_url"}, "odd"]}, "bare", 7,
        {"role": ["x"], "content": {"a": 1}, "tool_calls": [3, {"function": null, "name": 5, "arguments": {"b": 2}}]},
        {"role": "assistant", "parts": [{"type": "text", "content": "in a part"}], "reasoning_content": "thought"}]"""
    chat = {tr.OPERATION: "chat", tr.AGENT: "a", tr.INPUT_MESSAGES: messages, tr.TOOL_DEFINITIONS: '[{"name": "t"}, 4]'}
    text = Seen(page_of(tmp_path, [root(identity), span(identity, 1, 0, chat)], identity)).text
    for shown in (
        "look ⟨image_url⟩ odd",
        '"bare"',
        '"a": 1',
        '"b": 2',
        "in a part",
        "reasoning, 7 characters thought",
        "t, 4",
    ):
        assert shown in text
    assert "No response was recorded." in text


def test_a_long_text_is_cut_and_the_call_has_all_of_it(tmp_path: Path) -> None:
    made = rollout(1, text="x" * 30_000)
    make_run(tmp_path / "long", rollouts=[made])
    with browsing(tmp_path) as client:
        html = client.get("/runs/long/rollouts/1").text
        assert "10000 more characters" in html
        assert "x" * 20_001 not in html
        assert "x" * 30_000 in client.get(f"/runs/long/rollouts/1/calls/{'b' * 16}").text


def page_of(folder: Path, spans: list[SpanRecord], identity: str, **values: Any) -> str:
    make_run(folder / "made", rollouts=[(record(1, identity, **values), spans)])
    with browsing(folder) as client:
        return client.get("/runs/made/rollouts/1").raise_for_status().text


def test_what_was_not_recorded_is_counted(tmp_path: Path) -> None:
    identity = "f" * 32
    text = Seen(page_of(tmp_path, [root(identity)], identity, counters={"reward": 2}, attempt=1)).text
    assert "Not recorded: reward, 2 times." in text
    assert "repeated 1 time" in text
