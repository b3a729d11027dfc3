"""The ledger: every kind of entry, from traces and from the store, which must agree."""

from __future__ import annotations

from collections.abc import Mapping
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console

from lightning_core import trace as tr
from lightning_core.records.ledger import Entry, Ledger, general_reason, routes, selectable_names, trace_ledger
from lightning_core.records.store import CallCredit, RolloutRecord, Store
from lightning_core.tools.cli.ledger import format_ledger
from lightning_core.trace import SpanRecord, spans_to_trace

CHAT, EMBEDDINGS = {tr.OPERATION: "chat"}, {tr.OPERATION: "embeddings"}
ELSEWHERE, COUNT = {tr.OPERATION: tr.ELSEWHERE}, {tr.OPERATION: tr.COUNT}
FORWARDED = {tr.HOST: "api.openai.com", tr.CREDENTIALS: "your key"}


def spans(rollout: str, requests: list[tuple[Mapping[str, Any], str | None]]) -> list[SpanRecord]:
    """The spans of a rollout with ``requests``: the attributes and the error of each."""
    root: dict[str, Any] = {tr.TASK_ID: "t", tr.TASK: "{}"}
    return [
        SpanRecord(
            name="span",
            trace_id=rollout,
            span_id=f"{number:016x}",
            parent_id="0" * 15 + "1" if number > 1 else None,
            start_ns=number,
            end_ns=number,
            attributes=attributes,
            error=error,
        )
        for number, (attributes, error) in enumerate([(root, None), *requests], 1)
    ]


def record(rollout: str) -> RolloutRecord:
    return RolloutRecord(
        id=rollout, step=0, task_id="t", phase="train", attempt=0, status="ok", reward=1.0, error=None, version=0,
        started_ns=1, ended_ns=2,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("attributes", "error", "expected"),
    [
        (
            {**CHAT, tr.AGENT: "writer", tr.REQUEST_MODEL: "gpt", tr.RESPONSE_MODEL: "policy", tr.TRAINED: True},
            None,
            Entry(kind="call", agent="writer", where="policy", detail="trained"),
        ),
        (
            {**CHAT, tr.AGENT: "judge", tr.REQUEST_MODEL: "gpt", tr.RESPONSE_MODEL: "base"},
            None,
            Entry(kind="call", agent="judge", where="base", detail="not trained"),
        ),
        (
            {**CHAT, tr.REQUEST_MODEL: "gpt", tr.RESPONSE_MODEL: "gpt-2026", **FORWARDED},
            None,
            Entry(kind="call", agent=None, where="api.openai.com", detail="gpt-2026, your key"),
        ),
        (
            {**CHAT, tr.AGENT: "judge", tr.RESPONSE_MODEL: "gpt", tr.HOST: "localhost:8000"},
            None,
            Entry(kind="call", agent="judge", where="localhost:8000", detail="gpt"),
        ),
        (
            {**CHAT, tr.AGENT: "judge", tr.RESPONSE_MODEL: "gpt", **FORWARDED},
            "UpstreamError: 500",
            Entry(kind="failed", agent="judge", where="api.openai.com", detail="gpt, your key"),
        ),
        (
            {**CHAT, tr.AGENT: "writer", tr.REQUEST_MODEL: "gpt", tr.REFUSED: "n: not supported"},
            "PolicyRequestError: n: not supported",
            Entry(kind="refused", agent="writer", where="gpt", detail="n: not supported"),
        ),
        (
            {**COUNT, tr.AGENT: "writer", tr.REQUEST_MODEL: "gpt", tr.RESPONSE_MODEL: "policy"},
            None,
            Entry(kind="other", agent="writer", where="policy", detail="count_tokens"),
        ),
        (
            {**EMBEDDINGS, tr.AGENT: "retriever", tr.REQUEST_MODEL: "small", tr.HOST: "api.openai.com"},
            None,
            Entry(kind="other", agent="retriever", where="api.openai.com", detail="embeddings"),
        ),
        (
            {**COUNT, tr.AGENT: "writer", tr.REQUEST_MODEL: "gpt", tr.REFUSED: "contents: missing"},
            "PolicyRequestError: contents: missing",
            Entry(kind="refused", agent="writer", where="gpt", detail="contents: missing"),
        ),
        (
            {**ELSEWHERE, tr.AGENT: "writer", tr.HOST: "db:5432", tr.REASON: "connection by other code"},
            None,
            Entry(kind="elsewhere", agent="writer", where="db:5432", detail="connection by other code"),
        ),
    ],
)
def test_every_kind_of_entry(tmp_path: Path, attributes: Mapping[str, Any], error: str | None, expected: Entry) -> None:
    assert ledgers(tmp_path / "store.db", [[(attributes, error)]]) == Ledger([expected])


def ledgers(path: Path, rollouts: list[list[tuple[Mapping[str, Any], str | None]]]) -> Ledger:
    """The ledger of ``rollouts``, after checking that the store finds the same."""
    summed = Ledger()
    with Store(path) as store:
        for number, requests in enumerate(rollouts, 1):
            recorded = spans(f"{number:032x}", requests)
            summed.update(trace_ledger(spans_to_trace(recorded)))
            store.add_rollout(record(f"{number:032x}"), recorded)
        assert store.ledger() == summed
    return summed


NAMES = st.sampled_from(["a", "b", "team/writer", "ü", ""])
REQUESTS = st.fixed_dictionaries(
    {tr.OPERATION: st.sampled_from(["chat", "embeddings", tr.COUNT, tr.ELSEWHERE, "invoke_agent", "execute_tool"])},
    optional={
        tr.AGENT: NAMES,
        tr.REQUEST_MODEL: NAMES,
        tr.RESPONSE_MODEL: NAMES,
        tr.CREDENTIALS: NAMES,
        tr.TRAINED: st.booleans(),
        tr.REFUSED: NAMES,
        tr.REASON: NAMES,
        tr.REQUESTS: st.integers(1, 9),
    },
)
HOSTS = st.sampled_from([{tr.HOST: "api.openai.com"}, {tr.HOST: "db:5432"}])


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(st.lists(st.tuples(REQUESTS, HOSTS, st.booleans(), st.none() | st.just("E: x")), max_size=8), max_size=3)
)
def test_the_store_finds_what_its_traces_contain(tmp_path_factory: pytest.TempPathFactory, rollouts: Any) -> None:
    """An event elsewhere always has a host, the others may."""
    given_spans = [
        [
            (request | (host if has_host or request[tr.OPERATION] == tr.ELSEWHERE else {}), error)
            for request, host, has_host, error in requests
        ]
        for requests in rollouts
    ]
    ledgers(tmp_path_factory.mktemp("store") / "store.db", given_spans)


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        (["n: not supported"], "n: not supported"),
        ([f"messages[{n}].role is {role!r}; expected one of ['system', 'user']" for n, role in ((0, "x"), (12, "it's"))], None),
        ([f"the prompt has {n} tokens, the context {n + 1:,}. Shorten it." for n in (5, 4096)], None),
        ([f"the model {name!r} does not exist. Known are {name!r}." for name in ("gpt-4o. Or", 'a "b"', "c' d")], None),
        ([f"tools is {value!r}; expected a list" for value in ({}, {"a": {"b": 1}}, {"c": [1, 2]})], None),
        ([f"stop is {value!r}; expected strings" for value in ([1], [1, 2.5, -3])], "stop is [N]; expected strings"),
        ([f"the agent's call didn't fit: {n}" for n in range(3)], "the agent's call didn't fit: N"),
        ([f"the prompt is {n * 'a'!r}"[:50] for n in (5, 500)], None),
        ([f"exit code 3 after {n} s" for n in (1, 2.5)], "exit code 3 after N s"),
    ],
)  # fmt: skip
def test_equal_reasons_of_a_refusal_are_one_entry(messages: list[str], expected: str | None) -> None:
    found = {general_reason(message) for message in messages}
    assert len({reason.replace('"', "'").rstrip("'") for reason in found}) == 1
    assert expected is None or found == {expected}


def test_an_entry_of_refused_requests_shows_the_numbers_of_the_first() -> None:
    reasons = [
        f"the prompt has {n} tokens; expected fewer than the context length of 2048. Shorten it" for n in (6031, 2049)
    ]
    requests: list[tuple[Mapping[str, Any], str | None]] = [
        ({**CHAT, tr.REFUSED: reason}, "PolicyRequestError") for reason in reasons
    ]
    ledger = trace_ledger(spans_to_trace(spans("a" * 32, requests)))
    assert list(ledger.values()) == [2]
    console = Console(width=200, file=StringIO())
    with console.capture() as shown:
        console.print(format_ledger(ledger))
    assert "the prompt has 6031 tokens; expected fewer than the context length of 2048" in shown.get()


@pytest.mark.parametrize("end", ["exit code {}", "exit status {}", "signal {}", "raised SystemExit({})"])
def test_the_ways_that_a_process_ends_are_different_reasons(end: str) -> None:
    reasons = [f"ProgramError: the program ended with {end.format(number)}" for number in (1, 2, -9, 137)]
    assert [general_reason(reason) for reason in reasons] == reasons


def test_a_reason_is_short() -> None:
    assert len(general_reason("many words " * 50)) == 120
    assert general_reason("It failed:\n no space. Use less.") == "It failed: no space."
    calls = [{**CHAT, tr.REFUSED: f"the prompt has {n} tokens"} for n in range(500)]
    assert len(trace_ledger(spans_to_trace(spans("1" * 32, [(call, None) for call in calls])))) == 1


def test_requests_of_one_event_are_all_counted(tmp_path: Path) -> None:
    event = {**ELSEWHERE, tr.HOST: "db", tr.REASON: "ignored", tr.REQUESTS: 3}
    found = ledgers(tmp_path / "store.db", [[(event, None), (event, None)], [(event, None)]])
    assert found == {Entry(kind="elsewhere", agent=None, where="db", detail="ignored"): 9}


@pytest.mark.parametrize("model", [tr.RESPONSE_MODEL, tr.REQUEST_MODEL])
def test_a_dropped_field_is_counted_beside_its_call(tmp_path: Path, model: str) -> None:
    call = {**CHAT, model: "policy", tr.TRAINED: True, tr.DROPPED: ["min_p: why", "x: unknown field"]}
    found = ledgers(tmp_path / "store.db", [[(call, None), (call, None)], [(call, None)]])
    assert {(entry.kind, entry.where, entry.detail): count for entry, count in found.items()} == {
        ("call", "policy", "trained"): 3,
        ("dropped", "policy", "min_p: why"): 3,
        ("dropped", "policy", "x: unknown field"): 3,
    }


def test_trained_agents_of_older_traces_are_known_from_their_credit(tmp_path: Path) -> None:
    call = {**CHAT, tr.AGENT: "writer", tr.RESPONSE_MODEL: "policy"}
    recorded = spans("1" * 32, [(call, None)])
    expected = Ledger([Entry(kind="call", agent="writer", where="policy", detail="trained")])
    with Store(tmp_path / "store.db") as store:
        store.add_rollout(record("1" * 32), recorded)
        assert store.ledger() != expected
        credit = CallCredit(
            rollout="1" * 32, call="0" * 15 + "2", agent="writer", step=0, reward=1.0, advantage=1.0, tokens=1
        )
        store.add_credit([credit])
        assert store.ledger() == expected
    assert trace_ledger(spans_to_trace(recorded), {"writer"}) == expected


def test_the_ledger_of_the_newest_rollouts(tmp_path: Path) -> None:
    call = {**CHAT, tr.AGENT: "writer", tr.RESPONSE_MODEL: "policy", tr.TRAINED: True}
    with Store(tmp_path / "store.db") as store:
        for rollout in ("1" * 32, "2" * 32, "3" * 32):
            store.add_rollout(record(rollout), spans(rollout, [(call, None)]))
        assert [store.ledger(after=n).total() for n in range(4)] == [3, 2, 1, 0]


def test_routes_name_the_model_and_the_key() -> None:
    calls = [{**CHAT, tr.AGENT: "classifier", tr.RESPONSE_MODEL: "policy", tr.TRAINED: True}]
    calls += [{**CHAT, tr.RESPONSE_MODEL: "gpt", **FORWARDED}, {**ELSEWHERE, tr.HOST: "db", tr.REASON: "ignored"}]
    found = trace_ledger(spans_to_trace(spans("1" * 32, [(call, None) for call in calls])))
    assert routes(found) == ["classifier → policy", "(no agent) → api.openai.com (gpt, your key)"]


def test_names_that_the_endpoint_gives_cannot_be_selected() -> None:
    entries = [
        Entry(kind="call", agent="coder", where="policy", detail="trained"),
        Entry(kind="call", agent="coder/title", where="policy", detail="not trained"),
        Entry(kind="call", agent="team/writer", where="policy", detail="trained"),
        Entry(kind="refused", agent="judge", where="", detail="n: not supported"),
        Entry(kind="call", agent="reward function", where="api.openai.com", detail="gpt, your key"),
        Entry(kind="elsewhere", agent="loader", where="db", detail="ignored"),
        Entry(kind="call", agent=None, where="policy", detail="trained"),
    ]
    assert selectable_names(entries) == ["coder", "judge", "team/writer"]
