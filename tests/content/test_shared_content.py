"""The calls of a rollout come back as they were, and take memory once for what they have in common."""

from __future__ import annotations

import gc
import json
import pickle
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from lightning_core import rollout
from lightning_core import trace as tr
from lightning_core.backends.backend import SamplingParams
from lightning_core.capture import ActiveRollout, current_address
from lightning_core.capture.address import Address
from lightning_core.capture.spans import add_span_processor, deliver, remove_span_processor
from lightning_core.chat.chat import RenderedPrompt
from lightning_core.content.shared_content import References, SharedAttributes, SharedContent
from lightning_core.content.token_tree import TokenTree
from lightning_core.dialects.exchange import ChatRequest, Choice
from lightning_core.endpoint.record import CallSpan
from lightning_core.records.sqlite.span_rows import to_rows
from lightning_core.records.store import Store
from lightning_core.trace import SpanRecord, TokenIds, spans_to_trace
from lightning_core.transitions import trace_to_transitions
from tests.records.test_store import record

texts = st.text(st.characters(exclude_categories=()), max_size=6) | st.sampled_from(["\ud83d", "x" * 2000, "é" * 2000])
ids = st.lists(st.sampled_from([0, 1, 2, 0xFFFFFFFF]), max_size=5)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | texts, st.lists, max_leaves=3
)
messages = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant"]), "content": texts}, optional={"x": values}
)
tools = st.none() | st.lists(messages, min_size=1, max_size=2)
turns = st.tuples(
    st.integers(0, 20),  # the earlier call that it goes on after
    st.integers(0, 9),  # how many of its tokens and messages are cut off; mostly none
    st.lists(messages, max_size=3),
    ids,
    ids,
    messages,
    tools,
    st.sampled_from(["a", "b"]),
    st.booleans(),  # whether the endpoint records it, or another program
)


def call(
    run: ActiveRollout, number: int, asked: list[Any], given_tools: Any, prompt: list[int], output: list[int], **of: Any
) -> Any:
    """Record a call with the endpoint's own span, or as a plain span that arrives; return the attributes that it must have."""
    response, agent, ours = of["response"], of["agent"], of["ours"]
    expected: dict[str, Any] = {
        tr.INPUT_MESSAGES: json.dumps(asked, ensure_ascii=False),
        tr.OUTPUT_MESSAGES: json.dumps([response], ensure_ascii=False),
        tr.PROMPT_IDS: np.array(prompt, dtype="<u4").tobytes(),
        tr.OUTPUT_IDS: np.array(output, dtype="<u4").tobytes(),
        tr.LOGPROBS: np.array([-0.5] * len(output), dtype="<f4").tobytes(),
    }
    if given_tools:
        expected[tr.TOOL_DEFINITIONS] = json.dumps(given_tools, ensure_ascii=False)
    address = Address(rollout=run.rollout, span=run.address.span, agent=agent)
    if ours:
        span = CallSpan(address, ChatRequest(model="policy", messages=asked, tools=given_tools, body={}), "policy")
        span.sampled(
            RenderedPrompt(ids=tuple(prompt), write=str, context="clean"),
            Choice(message=response, token_ids=output, logprobs=[-0.5] * len(output), finish_reason="stop"),
            SamplingParams(max_tokens=9),
        )
        span.trainable(version=0, first_version=None, digest="0")
        span.end()
        return span.id, expected
    plain = expected | {tr.OPERATION: "chat", tr.AGENT: agent, tr.SEQUENCE: number}
    foreign = SpanRecord(
        name="chat",
        trace_id=run.rollout,
        span_id=f"{number + 1:016x}",
        parent_id=None,
        start_ns=number,
        end_ns=number,
        attributes=plain,
    )
    assert deliver(foreign)
    return foreign.span_id, expected


def check(spans: Any, expected: dict[str, dict[str, Any]]) -> None:
    found = {span.span_id: span.attributes for span in spans if span.attributes.get(tr.OPERATION) == "chat"}
    assert found.keys() == expected.keys()
    for span, attributes in expected.items():
        assert {key: found[span].get(key) for key in attributes} == attributes
        assert (tr.TOOL_DEFINITIONS in found[span]) == (tr.TOOL_DEFINITIONS in attributes)
    calls = {c.id: c for c in spans_to_trace(spans).calls}
    for span, attributes in expected.items():
        one = pickle.loads(pickle.dumps(calls[span]))
        assert one.prompt_ids.tobytes() == attributes[tr.PROMPT_IDS]
        assert one.output_ids.tobytes() == attributes[tr.OUTPUT_IDS]
        assert list(one.messages) == json.loads(attributes[tr.INPUT_MESSAGES])
        assert [one.response] == json.loads(attributes[tr.OUTPUT_MESSAGES])
        assert one.tools == json.loads(attributes.get(tr.TOOL_DEFINITIONS, "null"))


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(st.lists(turns, min_size=1, max_size=8))
def test_trees_of_conversations_come_back_as_they_were(made: list[Any]) -> None:
    """From the rollout, from pickles and from the store; each token and each text is kept once."""
    history: list[tuple[list[Any], list[int]]] = [([], [])]
    expected: dict[str, dict[str, Any]] = {}
    sequences: list[list[int]] = []
    with rollout({"id": "t"}) as run:
        for number, (after, cut, new, more, output, response, with_tools, agent, ours) in enumerate(made):
            said, before = history[after % len(history)]
            cut = max(0, cut - 5)
            asked, prompt = [*said[: len(said) - cut], *new], [*before[: len(before) - cut], *more]
            span, attributes = call(
                run, number, asked, with_tools, prompt, output, response=response, agent=agent, ours=ours
            )
            expected[span] = attributes
            sequences.append([*prompt, *output])
            history.append(([*asked, response], sequences[-1]))
    check(run.spans, expected)
    check(pickle.loads(pickle.dumps(run.spans)), expected)
    with tempfile.TemporaryDirectory() as folder, Store(Path(folder) / "store.db") as store:
        store.add_rollout(record(run.rollout), run.spans)
        check(store.spans(1), expected)
        for span, attributes in expected.items():
            (one,) = store.spans(1, only=span)
            assert one.attributes[tr.INPUT_MESSAGES] == attributes[tr.INPUT_MESSAGES]
        assert store.tokens_sampled() == sum(len(a[tr.OUTPUT_IDS]) for a in expected.values()) // 4
    beginnings = {tuple(ids[:length]) for ids in sequences for length in range(1, len(ids) + 1)}
    assert sum(len(ids) for _, _, ids in run.content.tokens.branches) == len(beginnings)
    assert len(run.content.texts) == len(set(run.content.texts))


def conversation(content: SharedContent, turns: int) -> list[SpanRecord]:
    """The spans of an agent whose conversation grows in ``turns`` calls, by 200 tokens each."""
    rng, spans = np.random.default_rng(0), list[SpanRecord]()
    said: list[Any] = [{"role": "user", "content": "start"}]
    tokens = np.empty(0, dtype="<u4")
    for turn in range(turns):
        new = rng.integers(50_000, size=200, dtype="<u4")
        answer = {"role": "assistant", "content": " ".join(map(str, new[100:]))}
        prompt = np.concatenate([tokens, new[:100]])
        attributes = {
            tr.OPERATION: "chat",
            tr.INPUT_MESSAGES: json.dumps(said),
            tr.OUTPUT_MESSAGES: json.dumps([answer]),
            tr.PROMPT_IDS: prompt.tobytes(),
            tr.OUTPUT_IDS: new[100:].tobytes(),
            tr.SEQUENCE: turn,
        }
        span = SpanRecord(
            name="chat",
            trace_id="1" * 32,
            span_id=f"{turn:016x}",
            parent_id=None,
            start_ns=0,
            end_ns=0,
            attributes=attributes,
        )
        spans.append(content.share(span))
        said = [*said, answer, {"role": "user", "content": f"turn {turn}"}]
        tokens = np.concatenate([prompt, new[100:]])
    return spans


def test_a_pickled_trace_is_linear_in_its_conversation() -> None:
    root = SpanRecord(
        name="r", trace_id="1" * 32, span_id="r", parent_id=None, start_ns=0, end_ns=0, attributes={tr.TASK_ID: "t"}
    )
    sizes = [len(pickle.dumps(spans_to_trace([root, *conversation(SharedContent(), turns)]))) for turns in (20, 40, 80)]
    assert sizes[2] - sizes[1] < 2.2 * (sizes[1] - sizes[0])


def test_the_store_has_what_calls_refer_to_only() -> None:
    """Not the messages that the index of conversations has besides."""
    content = SharedContent()
    spans = conversation(content, 4)
    (before,) = to_rows(spans).contents
    first = to_rows(spans[:1]).contents
    content.keep([{"role": "user", "content": "not in a call"}] * 3)
    content.keep_ids(np.arange(1000, dtype="<u4"))
    assert to_rows(spans).contents == [before]
    assert len(first[0]) < len(before) / 2


def test_a_pickled_call_has_its_own_path_only() -> None:
    calls = [tr.span_to_call(span) for span in conversation(SharedContent(), 40)]
    sizes = [len(pickle.dumps(call)) for call in calls]
    assert sizes[0] < 3000
    assert sizes[9] < sizes[39] / 3
    read = pickle.loads(pickle.dumps(calls[9]))
    assert (read.messages, read.response) == (calls[9].messages, calls[9].response)
    np.testing.assert_array_equal(read.prompt_ids, calls[9].prompt_ids)


def test_calls_of_one_conversation_are_parts_of_one_read_only_array() -> None:
    """Also if it forks from another one: its ids are copied once for all calls that are read together."""
    content = SharedContent()
    spans = conversation(content, 5)
    fork = np.concatenate([np.frombuffer(spans[0].attributes[tr.PROMPT_IDS], "<u4"), np.arange(4, dtype="<u4")])
    for length in (102, 104):
        attributes = {tr.OPERATION: "chat", tr.PROMPT_IDS: fork[:length].tobytes(), tr.OUTPUT_IDS: b""}
        last = SpanRecord(
            name="chat",
            trace_id="1" * 32,
            span_id=f"f{length}",
            parent_id=None,
            start_ns=0,
            end_ns=0,
            attributes=attributes,
        )
        spans.append(content.share(last))
    arrays = [tr.span_to_call(span).prompt_ids for span in spans]
    assert all(a is not None and not a.flags.writeable for a in arrays)
    assert len({id(a.base) for a in arrays[:5] if a is not None}) == 1
    assert arrays[5] is not None
    assert arrays[6] is not None
    assert arrays[5].base is arrays[6].base
    base = arrays[6].base
    with pytest.raises(ValueError, match="read-only"):
        arrays[6][0] = 1
    assert base is not None
    del arrays, base
    gc.collect()
    assert tr.span_to_call(spans[6]).prompt_ids.tobytes() == fork.tobytes()  # type: ignore[union-attr]


def test_a_span_that_ends_while_another_one_is_added_keeps_its_own_content() -> None:
    """The garbage collector may end a span on the thread that adds one."""
    (ended,) = conversation(SharedContent(), 1)
    plain = replace(ended, attributes=dict(ended.attributes))
    inner: list[SpanRecord] = []
    kept: list[Any] = []

    class Tokens(TokenTree):
        def add(self, ids: TokenIds) -> int:
            inner.append(content.share(plain))
            kept.append(
                (
                    [text.read() for text in content.keep([1, 2])],
                    content.keep_text(3).read(),
                    content.keep_ids(ids).read(),
                )
            )
            return super().add(ids)

    content = SharedContent(Tokens())
    content.add_call(response="5", ids=(packed := bytes(range(8)), b""))
    assert [(texts, text, ids.tobytes()) for texts, text, ids in kept] == [([1, 2], 3, packed)]
    assert not isinstance(inner[0].attributes, SharedAttributes)
    assert inner[0].attributes == ended.attributes


@pytest.mark.parametrize("added", ["messages", "call"])
def test_a_large_request_is_prepared_while_others_are_added(added: str) -> None:
    """An event loop adds the others: it must not wait for the JSON and the compression of the large one."""
    content, others = SharedContent(), list[References]()

    class Messages(list[Any]):
        """While it is read, another thread adds a message."""

        def __iter__(self) -> Iterator[Any]:
            other = threading.Thread(
                target=lambda: others.append(content.add_messages([{"role": "user"}])), daemon=True
            )
            other.start()
            other.join(timeout=10)
            assert others, "the other thread waits"
            return super().__iter__()

    if added == "messages":
        found = content.add_messages(Messages(["a", "b"]))
    else:
        found = content.add_call(messages=Messages(['"a"', '"b"']))
    assert content.value(found, tr.INPUT_MESSAGES) == ("a", "b")
    assert content.value(others[0], tr.INPUT_MESSAGES) == ({"role": "user"},)


def test_a_call_has_messages_of_its_own_which_are_not_kept() -> None:
    """A change of the messages of one call, by a reward function, is in no other call."""
    first, *_, last = map(tr.span_to_call, conversation(SharedContent(), 3))
    said: Any = last.messages[0]
    said["content"] = "changed"
    assert first.messages[0] == {"role": "user", "content": "start"}
    assert last.messages[0] == first.messages[0]


def test_a_trace_that_is_read_during_the_rollout_stays_as_it_was() -> None:
    with rollout({"id": "t"}) as run:
        address = current_address()
        assert address is not None
        first = call(
            run,
            0,
            [{"role": "user", "content": "a"}],
            None,
            [1, 2],
            [3],
            response={"role": "assistant"},
            agent="a",
            ours=True,
        )
        before = run.trace.calls[0].prompt_ids
        for number in range(50):
            call(
                run, number, [{"role": "user"}], None, [1, 2, 3, *range(number)], [], response={}, agent="a", ours=True
            )
        assert before is not None
        assert before.tolist() == [1, 2]
        assert first[0] == run.trace.calls[0].id
    found = trace_to_transitions(run.trace, agents={"a"}, refused=True)
    assert found[-1].prompt_ids.tolist() == [1, 2, 3, *range(49)]


def test_a_span_processor_changes_nothing_in_the_record_and_gets_the_whole_span() -> None:
    """Without one, OpenTelemetry's objects are left out."""
    exporter = InMemorySpanExporter()
    processor = SimpleSpanProcessor(exporter)
    said = [{"role": "user", "content": "ü\ud83d"}, {"role": "user", "content": "x" * 3000}]
    of = {"response": {"role": "assistant", "content": "b"}, "agent": "a", "ours": True}
    with rollout({"id": "t"}) as run:
        first, _ = call(run, 0, said, said, [1, 2], [3], **of)
        add_span_processor(processor)
        try:
            second, expected = call(run, 0, said, said, [1, 2], [3], **of)
        finally:
            remove_span_processor(processor)
    one, two = (next(s for s in run.spans if s.span_id == span) for span in (first, second))
    assert {**one.attributes, tr.SEQUENCE: 0} == {**two.attributes, tr.SEQUENCE: 0}
    assert (one.name, one.parent_id, one.error) == (two.name, two.parent_id, two.error)
    (exported,) = exporter.get_finished_spans()
    attributes = dict(exported.attributes or {})
    assert attributes == two.attributes
    assert {key: attributes[key] for key in expected} == expected
