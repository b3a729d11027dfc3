"""Traces → transitions → rows, against hand-computed cases."""

import dataclasses
import json
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_core import Call, Trace, Transition, trace_to_transitions, transitions_to_rows
from lightning_core.transitions import refused_calls


def call(sequence: int, agent: str | None, prompt: list[int], output: list[int], **changes: object) -> Call:
    fields: dict[str, object] = {
        "id": f"c{sequence}",
        "rollout": "r",
        "parent": None,
        "agent": agent,
        "sequence": sequence,
        "model": "policy",
        "policy_version": 3,
        "messages": (),
        "response": {"role": "assistant", "content": ""},
        "prompt_ids": np.array(prompt, dtype="<u4"),
        "output_ids": np.array(output, dtype="<u4"),
        "logprobs": -np.arange(1, len(output) + 1, dtype="<f4"),
        "temperature": 0.5,
        "constraint": None,
        "digest": f"digest of {sequence}",
        "finish_reason": "stop",
        "context": "new",
        "context_reason": None,
        "error": None,
        "start_ns": sequence,
        "end_ns": sequence + 1,
    }
    return Call(**{**fields, **changes})  # type: ignore[arg-type]


def trace(*calls: Call) -> Trace:
    return Trace(rollout="r", task_id="t", task=None, calls=calls, events=(), rewards=())


def test_messages_given_as_json_are_parsed_when_read_and_equal_to_those_given_as_values():
    messages = ({"role": "user", "content": "ü"},)
    answer = {"role": "assistant", "content": "ja"}
    ids = {"prompt_ids": None, "output_ids": None, "logprobs": None}  # arrays have no single truth value to compare

    def unread() -> Call:
        return call(1, "a", [], [], messages=json.dumps(messages), response=json.dumps([answer]), **ids)

    plain = call(1, "a", [], [], messages=messages, response=answer, **ids)
    one = unread()
    assert (one.messages, one.response) == (messages, answer)
    assert one.messages is one.messages, "parsed once"
    assert unread() == plain
    assert repr(unread()) == repr(plain)
    assert dataclasses.asdict(unread()) == dataclasses.asdict(plain)
    assert dataclasses.replace(unread(), agent="b") == dataclasses.replace(plain, agent="b")
    assert pickle.loads(pickle.dumps(unread())) == plain
    assert pickle.loads(pickle.dumps(one)) == plain
    with pytest.raises(dataclasses.FrozenInstanceError):
        unread().messages = ()  # type: ignore[misc]


def test_reading_tokens_parses_no_messages():
    t = trace(call(1, "a", [1], [2], messages="not JSON", response="not JSON"))
    assert len(transitions_to_rows(trace_to_transitions(t, agents={"a"}))) == 1
    pickle.loads(pickle.dumps(t))


def test_only_calls_of_the_named_agents_become_transitions():
    t = trace(call(1, "writer", [1], [2]), call(2, "underwriter", [1], [2]), call(3, None, [1], [2]))
    assert [x.call for x in trace_to_transitions(t, agents={"writer"})] == ["c1"]


def test_interleaved_agents_give_two_rows():
    """A1 B1 A2 B2: each agent's second call continues its first, whichever calls are between (pitfall: consecutive-only merging)."""
    t = trace(
        call(1, "a", [1, 2], [3]),
        call(2, "b", [9, 8], [7, 6]),
        call(3, "a", [1, 2, 3, 4], [5]),
        call(4, "b", [9, 8, 7, 6, 1], [2]),
    )
    rows = transitions_to_rows(trace_to_transitions(t, agents={"a", "b"}), {"c1": 0.5, "c2": -1, "c3": 2, "c4": 0})
    assert len(rows) == 2
    a, b = rows
    assert a.token_ids.tolist() == [1, 2, 3, 4, 5]
    assert a.mask.tolist() == [False, False, True, False, True]
    assert a.logprobs.tolist() == [0, 0, -1, 0, -1]
    assert a.advantages is not None
    assert a.advantages.tolist() == [0, 0, 0.5, 0, 2]
    assert a.temperatures.tolist() == [1, 1, 0.5, 1, 0.5]
    assert [(s.call, s.start, s.stop, s.version) for s in a.segments] == [("c1", 2, 3, 3), ("c3", 4, 5, 3)]
    assert b.token_ids.tolist() == [9, 8, 7, 6, 1, 2]
    assert b.mask.tolist() == [False, False, True, True, False, True]


def test_the_same_context_under_two_agents_stays_apart():
    t = trace(call(1, "a", [1, 2], [3]), call(2, "b", [1, 2, 3, 4], [5]))
    assert len(transitions_to_rows(trace_to_transitions(t, agents={"a", "b"}))) == 2


def test_a_broken_prefix_begins_a_new_row():
    """A template that strips the thinking of earlier turns: three turns, three rows, no token lost or trained twice."""
    t = trace(call(1, "a", [1], [2, 3]), call(2, "a", [1, 3, 4], [5]), call(3, "a", [1, 3, 4, 6], [7]))
    rows = transitions_to_rows(trace_to_transitions(t, agents={"a"}))
    assert [r.token_ids[r.mask].tolist() for r in rows] == [[2, 3], [5], [7]]


def test_branches_of_one_context_train_the_shared_response_once():
    t = trace(call(1, "a", [1], [2]), call(2, "a", [1, 2, 3], [4]), call(3, "a", [1, 2, 5], [6]))
    rows = transitions_to_rows(trace_to_transitions(t, agents={"a"}))
    assert [r.token_ids[r.mask].tolist() for r in rows] == [[2, 4], [6]]


def test_masked_calls_are_context_but_not_trained():
    """The second call is masked: its tokens stay in the context of the third, and a row ends at its last trained call."""
    t = trace(
        call(1, "a", [1], [2, 3]), call(2, "a", [1, 2, 3, 4], [5, 6]), call(3, "a", [1, 2, 3, 4, 5, 6, 7], [8]),
        call(4, "b", [9], [10]),
    )  # fmt: skip
    found = trace_to_transitions(t, agents={"a", "b"})
    advantages = {"c1": 0.5, "c2": 9.0, "c3": -1.0, "c4": 9.0}
    (row,) = transitions_to_rows(found, advantages, masked={"c2", "c4"})
    assert row.token_ids.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert row.mask.tolist() == [False, True, True, False, False, False, False, True]
    assert row.advantages is not None
    assert row.advantages.tolist() == [0, 0.5, 0.5, 0, 0, 0, 0, -1]
    assert row.logprobs.tolist() == [0, -1, -2, 0, 0, 0, 0, -1]
    assert [s.call for s in row.segments] == ["c1", "c3"]
    (short,) = transitions_to_rows(found, advantages, masked={"c2", "c3", "c4"})
    assert short.token_ids.tolist() == [1, 2, 3]


def test_identical_requests_are_all_kept():
    """Best of n, self-consistency: the same prompt sampled twice is two transitions, even with equal answers."""
    t = trace(call(1, "a", [1], [2]), call(2, "a", [1], [2]))
    assert len(transitions_to_rows(trace_to_transitions(t, agents={"a"}))) == 2


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"prompt_ids": None}, "no token ids"),
        ({"output_ids": None}, "no token ids"),
        ({"logprobs": None}, "expected 1 logprobs, found none"),
        ({"logprobs": np.zeros(3, dtype="<f4")}, "expected 1 logprobs, found 3"),
        (
            {"output_ids": np.array([], dtype="<u4"), "logprobs": np.array([], dtype="<f4")},
            "the prompt or the response is empty",
        ),
        ({"digest": None}, "no digest: not recorded by a policy endpoint, or recorded by an older version"),
        ({"policy_version": None, "model": "gpt"}, "sampled by 'gpt', which is not a trained policy"),
        ({"error": "Boom"}, "the call failed: Boom"),
    ],
)
def test_calls_that_cannot_be_trained_on_are_refused_with_a_reason(changes: dict[str, object], reason: str):
    t = trace(call(1, "a", [1], [2], **changes), call(2, "a", [1], [2]))
    assert [x.call for x in trace_to_transitions(t, agents={"a"})] == ["c2"]
    (refusal,) = refused_calls(t, agents={"a"})
    assert refusal.call == "c1"
    assert reason in refusal.reason


def test_missing_advantages_are_an_error():
    t = trace(call(1, "a", [1], [2]))
    with pytest.raises(KeyError):
        transitions_to_rows(trace_to_transitions(t, agents={"a"}), {})


token = st.integers(0, 3)


@given(
    st.lists(
        st.tuples(
            st.sampled_from("ab"), st.lists(token, min_size=1, max_size=6), st.lists(token, min_size=1, max_size=3)
        )
    )
)
def test_every_sampled_token_is_trained_exactly_once(calls: list[tuple[str, list[int], list[int]]]):
    t = trace(*(call(i, agent, prompt, output) for i, (agent, prompt, output) in enumerate(calls)))
    transitions: list[Transition] = trace_to_transitions(t, agents={"a", "b"})
    rows = transitions_to_rows(transitions)
    assert sum(int(r.mask.sum()) for r in rows) == sum(len(output) for _, _, output in calls)
    assert sorted(s.call for r in rows for s in r.segments) == sorted(x.call for x in transitions)
    by_call = {x.call: x for x in transitions}
    for row in rows:
        for s in row.segments:
            assert row.token_ids[: s.start].tolist() == by_call[s.call].prompt_ids.tolist()
            assert row.token_ids[s.start : s.stop].tolist() == by_call[s.call].output_ids.tolist()
