"""A copy of a rollout's contents in another process is the same, and is sent only what is new."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from lightning_core import trace as tr
from lightning_core.content.increments import Increments
from lightning_core.content.shared_content import SharedAttributes, SharedContent
from lightning_core.endpoint.workers.messages import SentSpan, decode, encode
from tests.content.test_shared_content import conversation


def sent(spans: Any, increments: Increments) -> list[bytes]:
    """The messages of a worker with ``spans``, of which each is sent when it ends."""
    messages: list[bytes] = []
    for span in spans:
        a = span.attributes
        assert isinstance(a, SharedAttributes)
        plain = replace(span, attributes=a.own)
        messages.append(encode("span", span=SentSpan(plain, a.references, increments.take())))
    return messages


def received(messages: list[bytes]) -> list[tr.SpanRecord]:
    copy = SharedContent()
    spans = [decode(message)[2] for message in messages]
    return [span.read(copy) for span in spans if span is not None]


def test_a_copy_has_the_same_spans_also_of_forks() -> None:
    content = SharedContent()
    increments = Increments(content)
    spans = conversation(content, 5)
    messages = sent(spans[:1], increments)
    for cut in (3, 150, 400):
        last = spans[3].attributes
        ids = np.frombuffer(last[tr.PROMPT_IDS], "<u4")[:cut].tobytes()
        said = '[{"role": "user", "content": "\\ud83d"}]' if cut == 3 else last[tr.INPUT_MESSAGES]
        fork = {**last, tr.PROMPT_IDS: ids, tr.INPUT_MESSAGES: said, tr.TOOL_DEFINITIONS: f"[{cut}]"}
        spans.append(content.share(replace(spans[0], span_id=str(cut), attributes=fork)))
        messages += sent(spans[-1:], increments)
    messages += sent(spans[1:5], increments)
    found = {span.span_id: dict(span.attributes) for span in received(messages)}
    assert found == {span.span_id: dict(span.attributes) for span in spans}


def test_the_bytes_of_a_conversation_are_linear() -> None:
    sizes: list[int] = []
    content = SharedContent()
    increments = Increments(content)
    for turns in (10, 11, 40, 41):
        spans = conversation(content, turns)
        sizes.append(len(sent(spans[-1:], increments)[0]))
    assert sizes[3] < 1.1 * sizes[1] < sizes[0] / 3
