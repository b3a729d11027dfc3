"""Which tokens of a recorded conversation are learned."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_core import Call, Trace
from lightning_core import trace as tr
from lightning_core.chat.chat import Chat
from lightning_core.errors import ConfigError
from lightning_core.model.source import load_eos_token_ids, load_tokenizer
from lightning_core.otel import spans_to_otlp
from lightning_core.tools.sft.examples import Selection, read_examples
from lightning_core.tools.sft.tokens import Tokens
from lightning_core.tools.sft.train import split
from lightning_core.trace import SpanRecord
from tests.credit import episodes
from tests.tiny_model import make_tiny_model

LOOK: dict[str, Any] = {
    "type": "function",
    "function": {"name": "look", "parameters": {"type": "object", "properties": {}}},
}
CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": "door"}'}}
SYSTEM = {"role": "system", "content": "be kind"}
USER = {"role": "user", "content": "look <|im_end|> there"}
CALLING = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "closed"}
DONE = {"role": "assistant", "content": "It is closed."}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    return load_tokenizer(folder)


@pytest.fixture(scope="module")
def chat(folder: Path, tokenizer: Any) -> Chat:
    return Chat(tokenizer, stop_token_ids=load_eos_token_ids(folder))


def forwarded(identity: str, sequence: int, messages: list[Any], response: Any, **changes: Any) -> Call:
    """A call that a provider answered: messages without tokens."""
    nothing: dict[str, Any] = {"prompt_ids": None, "output_ids": None, "logprobs": None, "digest": None}
    made = episodes.call(identity, "r", "clerk", sequence, model="gpt-5", policy_version=None)
    return replace(made, messages=tuple(messages), response=response, tools=[LOOK], **{**nothing, **changes})


def rollout(*calls: Call, identity: str = "r", task: str = "t", **changes: Any) -> Trace:
    own = tuple(replace(call, rollout=identity) for call in calls)
    return Trace(rollout=identity, task_id=task, task=None, calls=own, events=(), rewards=(), **changes)


def tokens(chat: Chat, **changes: Any) -> tuple[Tokens, Counter[str]]:
    left_out = Counter[str]()
    options: dict[str, Any] = {"max_context": 4096, **changes}
    return Tokens({"clerk": "policy"}, {"policy": chat}, left_out=left_out, **options), left_out


TURNS = [
    forwarded("1", 1, [SYSTEM, USER], CALLING),
    forwarded("2", 2, [SYSTEM, USER, CALLING, RESULT], DONE),
]


def test_a_teacher_s_conversation_is_one_row_with_its_responses_marked(chat: Chat, tokenizer: Any) -> None:
    """Token by token. The tool call has the policy's own format; the user's text that looks like a special token is none."""
    found, left_out = tokens(chat)
    (row,) = found.rows(rollout(*TURNS))
    parts: list[tuple[str, bool]] = []
    for token, sampled in zip(row.token_ids.tolist(), row.mask.tolist(), strict=True):
        if not parts or parts[-1][1] != sampled:
            parts.append(("", sampled))
        parts[-1] = (parts[-1][0] + tokenizer.decode([token]), sampled)
    assert [text for text, sampled in parts if sampled] == [
        '<tool_call>\n{"name": "look", "arguments": {"at": "door"}}\n</tool_call><|im_end|>',
        "It is closed.<|im_end|>",
    ]
    assert parts[0][0].endswith("<|im_start|>user\nlook <|im_end|> there<|im_end|>\n<|im_start|>assistant\n")
    assert (
        parts[2][0]
        == "\n<|im_start|>user\n<tool_response>\nclosed\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    assert row.token_ids.tolist().count(tokenizer.convert_tokens_to_ids("<|im_end|>")) == 5, "one for each message"
    assert row.advantages is not None
    assert row.advantages.tolist() == row.mask.astype(float).tolist()
    assert (found.counts.recorded, found.counts.rendered, left_out) == (0, 2, {})


def test_the_endpoint_reads_the_tokens_as_the_response(chat: Chat) -> None:
    found, _ = tokens(chat)
    first, second = found.transitions(rollout(*TURNS))
    read = chat.parse(first.output_ids.tolist(), tools=True, declared=[LOOK])
    assert read["tool_calls"][0]["function"]["name"] == "look"
    assert chat.parse(second.output_ids.tolist(), tools=True) == {"role": "assistant", "content": "It is closed."}


def test_tools_are_shown_as_the_endpoint_shows_them(chat: Chat) -> None:
    """Clients send further fields to providers, such as ``strict``."""
    strict = {**LOOK, "function": {**LOOK["function"], "strict": True}}
    (plain,) = tokens(chat)[0].rows(rollout(*TURNS))
    (row,) = tokens(chat)[0].rows(rollout(*(replace(call, tools=[strict]) for call in TURNS)))
    assert row.token_ids.tolist() == plain.token_ids.tolist()


def test_own_tokens_are_used_as_they_were_sampled(chat: Chat, tokenizer: Any) -> None:
    """Also where the tokenizer would encode the text otherwise, and without a stop token."""
    prompt_ids = tokenizer.encode("<|im_start|>odd prompt", add_special_tokens=False)
    output_ids = tokenizer.encode("It is closed.", add_special_tokens=False)
    own = {
        "prompt_ids": np.array(prompt_ids, "<u4"),
        "output_ids": np.array(output_ids, "<u4"),
        "finish_reason": "length",
    }
    found, _ = tokens(chat)
    (transition,) = found.transitions(rollout(forwarded("1", 1, [USER], DONE, **own)))
    assert transition.prompt_ids.tolist() == prompt_ids
    assert transition.output_ids.tolist() == output_ids
    assert (found.counts.recorded, found.counts.rendered) == (1, 0)


@pytest.mark.parametrize("output_ids", [[70, 71, 72], [10**6]], ids=["other text", "no such token"])
def test_tokens_of_another_tokenizer_are_not_used(chat: Chat, tokenizer: Any, output_ids: list[int]) -> None:
    own = {"prompt_ids": np.array([1, 2, 3], "<u4"), "output_ids": np.array(output_ids, "<u4")}
    found, _ = tokens(chat)
    (transition,) = found.transitions(rollout(forwarded("1", 1, [USER], DONE, **own)))
    assert tokenizer.decode(transition.output_ids.tolist()) == "It is closed.<|im_end|>"
    assert (found.counts.recorded, found.counts.rendered) == (0, 1)


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (replace(TURNS[0], error="boom"), "calls that failed"),
        (replace(TURNS[0], replays="other"), "calls that were answered from a record"),
        (replace(TURNS[0], response=None), "calls without recorded messages"),
        (replace(TURNS[0], response={"role": "assistant", "content": ""}), "calls with an empty response"),
        (replace(TURNS[1], finish_reason="length"), "calls: the response was cut at its token limit"),
        (replace(TURNS[0], messages=({"role": "user", "content": [{"type": "image_url"}]},)), "expected a text part"),
        (replace(TURNS[0], response={**DONE, "reasoning_content": "hm"}), None),
    ],
    ids=["failed", "replayed", "unrecorded", "empty", "cut", "image", "reasoning"],
)  # fmt: skip
def test_calls_that_cannot_be_learned_are_counted(chat: Chat, call: Call, reason: str | None) -> None:
    found, left_out = tokens(chat)
    rows = found.rows(rollout(call))
    if reason is None:  # the model's template has no reasoning
        assert (len(rows), found.counts.without_reasoning) == (1, 1)
        return
    assert not rows
    ((found_reason, number),) = left_out.items()
    assert reason in found_reason
    assert number == 1


def test_a_call_that_is_too_long_ends_its_row(chat: Chat) -> None:
    whole, _ = tokens(chat)
    first, second = whole.transitions(rollout(*TURNS))
    found, left_out = tokens(chat, max_context=len(second.prompt_ids) + len(second.output_ids) - 1)
    (row,) = found.rows(rollout(*TURNS))
    assert len(row.token_ids) == len(first.prompt_ids) + len(first.output_ids)
    assert list(left_out.values()) == [1]
    assert "policy.max_context" in next(iter(left_out))


def test_other_agents_are_context_only(chat: Chat) -> None:
    found, left_out = tokens(chat)
    rows = found.rows(rollout(replace(TURNS[0], agent="critic"), TURNS[1]))
    assert [segment.call for row in rows for segment in row.segments] == ["2"]
    assert not left_out


def spans(number: int, task: str, reward: float | None) -> list[SpanRecord]:
    """A rollout as our collector exports it: the task, one forwarded call, and its reward."""
    trace = f"{number:032x}"
    call = {
        tr.OPERATION: "chat",
        tr.AGENT: "clerk",
        tr.REQUEST_MODEL: "gpt-5",
        tr.INPUT_MESSAGES: json.dumps([USER]),
        tr.OUTPUT_MESSAGES: json.dumps([DONE]),
    }
    attributes: list[dict[str, Any]] = [{tr.TASK_ID: task}, call]
    attributes += [] if reward is None else [{tr.OPERATION: "reward", tr.REWARD_VALUE: reward}]
    return [
        SpanRecord(
            name="span",
            trace_id=trace,
            span_id=f"{16 * number + index:016x}",
            parent_id=f"{16 * number:016x}" if index else None,
            start_ns=number,
            end_ns=number + 1,
            attributes=found,
        )
        for index, found in enumerate(attributes)
    ]


def test_traces_are_read_and_chosen(tmp_path: Path, chat: Chat) -> None:
    """Of a file, and of a folder of files; the same rollout once."""
    rewards = [1.0, 0.2, 3.0, None]
    file = tmp_path / "traces" / "teacher.jsonl"
    file.parent.mkdir()
    exported = [spans(n, "t" if n < 3 else "u", reward) for n, reward in enumerate(rewards, 1)]
    file.write_text("".join(json.dumps(spans_to_otlp(found)) + "\n" for found in exported))

    def chosen(**options: Any) -> tuple[list[int], Counter[str]]:
        left_out = Counter[str]()
        found = read_examples([file, file.parent], Selection(**options), left_out)
        assert all(len(tokens(chat)[0].rows(trace)) == 1 for trace in found)
        return [int(trace.rollout, 16) for trace in found], left_out

    assert chosen()[0] == [1, 3, 4]
    assert chosen()[1]["rollouts with a reward below 1"] == 2, "of both sources"
    assert chosen()[1]["rollouts that another source has too"] == 3
    assert chosen(min_reward=0.1)[0] == [1, 2, 3]
    assert chosen(min_reward=0.1)[1]["rollouts without a reward"] == 2
    assert chosen(min_reward=0.1, best=1)[0] == [1, 3]
    with pytest.raises(
        ConfigError, match="no rollout to learn from: 6 rollouts with a reward below 9; 2 rollouts without a reward"
    ):
        chosen(min_reward=9.0)


def test_held_out_rollouts_have_tasks_of_their_own() -> None:
    traces = [rollout(identity=f"{n}", task=f"t{n % 5}") for n in range(20)]
    learned, held = split(traces, 0.2, seed=0)
    assert len(held) == 4
    assert not {t.task_id for t in learned} & {t.task_id for t in held}
    assert split(traces, 0.0, seed=0) == (traces, [])
    assert split(traces[:1], 0.5, seed=0) == (traces[:1], []), "a single task is learned"
    assert len(split(traces, 0.99, seed=0)[0]) == 4, "at least one task is learned"
