"""Imported token counts: input tokens include those of the prompt cache, output tokens include reasoning."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from lightning_core.otel.reading import read_rollouts
from lightning_core.records.statistics.usage import calls_of_spans
from lightning_core.tools.interchange.importing import ImportOptions, import_traces

TRACE, SPAN = "0" * 31 + "1", "0" * 15 + "1"
START, END = "2026-11-01T00:00:00Z", "2026-11-01T00:00:01Z"
MESSAGES = [{"role": "user", "content": "hi"}]
ANSWER = {"role": "assistant", "content": "hello"}
ANTHROPIC = {
    "input_tokens": 5,
    "cache_read_input_tokens": 900,
    "cache_creation_input_tokens": 100,
    "output_tokens": 7,
}
OPENAI = {"input_tokens": 1000, "input_tokens_details": {"cached_tokens": 700}, "output_tokens": 50}


def langfuse(usage: Mapping[str, Any]) -> dict[str, Any]:
    times = {"startTime": START, "endTime": END}
    texts = {"input": MESSAGES, "output": ANSWER, "usageDetails": usage}
    return {"id": SPAN, "traceId": TRACE, "type": "GENERATION", "name": "c", "model": "m", **times, **texts}


def logfire(usage: Mapping[str, Any]) -> dict[str, Any]:
    data = {"request_data": {"messages": MESSAGES}, "response_data": {"message": ANSWER, "usage": usage}}
    times = {"start_timestamp": START, "end_timestamp": END}
    return {"trace_id": TRACE, "span_id": SPAN, "span_name": "chat", "kind": "span", "attributes": data, **times}


def langsmith(usage: Mapping[str, Any], **outputs: Any) -> dict[str, Any]:
    run = {"id": TRACE, "trace_id": TRACE, "name": "c", "run_type": "llm", "start_time": START, "end_time": END}
    outputs = outputs or {"usage": usage}
    return {**run, **usage, "inputs": {"messages": MESSAGES}, "outputs": {"choices": [{"message": ANSWER}], **outputs}}


def mlflow(usage: Mapping[str, Any]) -> dict[str, Any]:
    attributes = {
        "mlflow.spanType": "CHAT_MODEL",
        "mlflow.spanInputs": {"messages": MESSAGES},
        "mlflow.spanOutputs": {"choices": [{"message": ANSWER}]},
        "mlflow.chat.tokenUsage": usage,
    }
    span = {"name": "c", "span_id": SPAN, "start_time_unix_nano": 10**18, "attributes": attributes}
    return {"info": {"trace_id": f"tr-{TRACE}"}, "data": {"spans": [span]}}


@pytest.mark.parametrize(
    ("document", "counts"),
    [
        (
            langfuse({"input": 300, "input_cached_tokens": 700, "output": 20, "output_reasoning": 30, "total": 1050}),
            (1000, 700, 50),
        ),
        (
            langfuse({"input": 5, "output": 7, **{k: n for k, n in ANTHROPIC.items() if "cache" in k}, "total": 1012}),
            (1005, 900, 7),
        ),
        (langfuse({"input": 1005, "cache_read_input_tokens": 900, "output": 7, "total": 1012}), (1005, 900, 7)),
        (langfuse({"input": 300, "input_cache_read": 700, "input_priority": 300, "output": 50}), (1000, 700, 50)),
        (logfire(ANTHROPIC), (1005, 900, 7)),
        (logfire(OPENAI), (1000, 700, 50)),
        (langsmith(ANTHROPIC), (1005, 900, 7)),
        (
            langsmith(
                {},
                usage_metadata={
                    "input_tokens": 1005,
                    "output_tokens": 7,
                    "total_tokens": 1012,
                    "input_token_details": {"cache_read": 900, "cache_creation": 100},
                },
            ),
            (1005, 900, 7),
        ),
        (
            langsmith(
                {"prompt_tokens": 1000, "completion_tokens": 50, "prompt_token_details": {"cache_read": 700}}, id="r"
            ),
            (1000, 700, 50),
        ),
        (
            mlflow({"input_tokens": 1005, "cache_read_input_tokens": 900, "output_tokens": 7, "total_tokens": 1012}),
            (1005, 900, 7),
        ),
    ],
    ids=lambda value: None if isinstance(value, tuple) else next(iter(value)),
)
def test_the_tokens_of_a_prompt_cache_are_input_tokens(
    document: Mapping[str, Any], counts: tuple[int, int, int], tmp_path: Path
) -> None:
    (tmp_path / "a.json").write_text(json.dumps([document]))
    summary = import_traces([tmp_path / "a.json"], tmp_path / "out", ImportOptions())
    assert summary.file is not None
    (call,) = (call for spans in read_rollouts(summary.file) for call in calls_of_spans(spans))
    assert (call.input_tokens, call.cached_tokens, call.output_tokens) == counts
