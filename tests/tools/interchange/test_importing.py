"""``lightning-rl traces import`` of files that the vendors' own packages wrote; samples/README.md has how."""

from __future__ import annotations

import json
import threading
from base64 import b64encode
from collections.abc import Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import parse_qs, urlsplit

import anthropic
import pytest

from lightning_core.errors import ConfigError
from lightning_core.otel import read_traces
from lightning_core.tools.cli import traces as command
from lightning_core.tools.cli.main import main
from lightning_core.tools.interchange import importing
from lightning_core.tools.interchange.exporting import TARGET_FORMATS
from lightning_core.tools.interchange.formats import SOURCE_FORMATS
from lightning_core.tools.interchange.importing import ImportOptions, ImportSummary, import_traces
from lightning_core.tools.interchange.messages import read_exchange
from lightning_core.trace import CACHED_TOKENS, INPUT_TOKENS, OUTPUT_TOKENS, Trace

SAMPLES = Path(__file__).parent / "samples"
SYSTEM = {"role": "system", "content": "You calculate with tools."}
QUESTION = {"role": "user", "content": "What is 2 + 3?"}
ADD = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2, "b": 3}'}}
CALLED = {"role": "assistant", "content": None, "tool_calls": [ADD]}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "5"}
SUM = {"role": "assistant", "content": "The sum is 5."}


def read(names: Sequence[str], folder: Path, **options: Any) -> tuple[ImportSummary, list[Trace]]:
    summary = import_traces([SAMPLES / name for name in names], folder, ImportOptions(**options))
    return summary, [] if summary.file is None else read_traces(summary.file)


@pytest.mark.parametrize(
    ("names", "source", "agent", "options"),
    [
        (["phoenix_spans.json", "phoenix_annotations.json"], "Phoenix", "calculator", {}),
        (["phoenix_frame.jsonl", "phoenix_annotations.json"], "Phoenix", "calculator", {}),
        (["mlflow_traces.json"], "MLflow", "calculator", {}),
        (["mlflow_frame.jsonl"], "MLflow", "calculator", {}),
        (["langsmith_runs.json"], "LangSmith", "calculator", {"agent_key": "agent"}),
        (["langsmith_query.jsonl"], "LangSmith", "calculator", {"agent_key": "agent"}),
        (["langfuse_trace.json", "langfuse_pages.jsonl"], "Langfuse", "calculator", {}),
        (["logfire_rows.json"], "Logfire", "calculator", {}),
        (["logfire_columns.json"], "Logfire", "calculator", {}),
    ],
)
def test_a_product_s_traces_have_calls_tools_agents_errors_and_scores(
    names: Sequence[str], source: str, agent: str, options: Mapping[str, Any], tmp_path: Path
) -> None:
    summary, (good, failed) = read(names, tmp_path, reward="correct", **options)
    assert (summary.format, summary.traces, summary.failed, summary.rewarded) == (source, 2, 1, 1)
    assert set(summary.left_out) <= {"spans that were read before"}
    first, second = good.calls
    assert [dict(m) for m in first.messages] == [SYSTEM, QUESTION]
    assert first.response == CALLED
    assert [dict(m) for m in second.messages] == [SYSTEM, QUESTION, CALLED, RESULT]
    assert second.response == SUM
    assert {call.agent for call in good.calls} == {agent}
    assert {call.model for call in good.calls} == {"gpt-4o-mini-2024-07-18"}
    assert [tool["function"]["name"] for call in good.calls for tool in call.tools or ()] == ["add", "add"]
    assert {call.temperature for call in good.calls} == {0.5}
    assert (good.error, good.reward) == (None, 1.0)
    assert failed.error is not None
    assert "the model refuses to fail" in failed.error
    assert failed.calls[0].error is not None
    assert failed.calls[0].response is None
    (document, _) = [json.loads(line) for line in (tmp_path / f"{name_of(source)}-0001.jsonl").read_text().splitlines()]
    (counts, _) = [
        {entry["key"]: entry["value"] for entry in span["attributes"]}
        for span in document["resourceSpans"][0]["scopeSpans"][0]["spans"]
        if INPUT_TOKENS in str(span["attributes"])
    ]
    assert (counts[INPUT_TOKENS]["intValue"], counts[OUTPUT_TOKENS]["intValue"]) == ("60", "9")
    assert CACHED_TOKENS not in counts


@pytest.mark.parametrize("name", ["langsmith_langchain.json", "mlflow_langchain.json"])
def test_messages_and_agents_of_langchain_are_read(name: str, tmp_path: Path) -> None:
    _, (trace,) = read([name], tmp_path)
    assert [call.agent for call in trace.calls] == ["calculator", "calculator"]
    assert [call.response for call in trace.calls] == [CALLED, SUM]
    assert [(m["role"], m["content"] or "") for m in trace.calls[1].messages] == [
        ("system", "You calculate with tools."),
        ("user", "What is 2 + 3?"),
        ("assistant", ""),
        ("tool", "5"),
    ]
    assert trace.calls[1].messages[2]["tool_calls"] == [ADD]
    assert [bool(call.tools) for call in trace.calls] == [True, True]


def test_messages_of_other_apis_are_those_of_chat_completions() -> None:
    block = anthropic.types.ToolUseBlock(id="call_1", name="add", input={"a": 2, "b": 3}, type="tool_use")
    thinking = anthropic.types.ThinkingBlock(thinking="I add.", signature="s", type="thinking")
    text = anthropic.types.TextBlock(text="Wait.", type="text")
    usage = anthropic.types.Usage(input_tokens=1, output_tokens=1)
    answer = anthropic.types.Message(
        id="m", content=[thinking, text, block], model="claude", role="assistant", stop_reason="tool_use", type="message", usage=usage
    )  # fmt: skip
    results: dict[str, Any] = {
        "type": "tool_result",
        "tool_use_id": "call_1",
        "content": [{"type": "text", "text": "5"}],
    }
    request = {
        "system": [{"type": "text", "text": SYSTEM["content"]}],
        "messages": [
            QUESTION,
            {"role": "assistant", "content": [block.model_dump()]},
            {"role": "user", "content": [results]},
        ],
        "tools": [{"name": "add", "input_schema": {"type": "object", "properties": {}}}],
    }
    found = read_exchange(request, json.dumps(answer.model_dump()))
    assert found.messages == [SYSTEM, QUESTION, CALLED, RESULT]
    assert found.response == {**CALLED, "content": "Wait.", "reasoning_content": "I add."}
    assert found.finish_reason == "tool_use"
    assert found.tools == [
        {"type": "function", "function": {"name": "add", "parameters": request["tools"][0]["input_schema"]}}
    ]

    called = {"type": "function_call", "call_id": "call_1", "name": "add", "arguments": ADD["function"]["arguments"]}
    given = {"type": "function_call_output", "call_id": "call_1", "output": "5"}
    spoken = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": SUM["content"]}]}
    request = {"instructions": SYSTEM["content"], "input": [QUESTION, called, given]}
    found = read_exchange(request, {"output": [spoken], "status": "completed"})
    assert (found.messages, found.response) == ([SYSTEM, QUESTION, CALLED, RESULT], SUM)
    assert read_exchange("hi", "hello").messages == [{"role": "user", "content": "hi"}]


def name_of(title: str) -> str:
    return next(source.name for source in SOURCE_FORMATS if source.title == title)


def test_stored_completions_are_joined_with_their_messages_and_by_a_metadata_key(tmp_path: Path) -> None:
    names = ["openai_completions.json", "openai_messages.jsonl"]
    summary, (apart, other) = read(names, tmp_path / "apart", agent_key="agent")
    assert (summary.traces, len(apart.calls), len(other.calls)) == (2, 1, 1)
    assert summary.calls == {"calculator": 2}
    _, (trace,) = read(names, tmp_path / "joined", trace_key="session")
    assert [call.response for call in trace.calls] == [CALLED, SUM]
    assert [dict(m) for m in trace.calls[1].messages] == [SYSTEM, QUESTION, CALLED, RESULT]
    summary, none = read(names[:1], tmp_path / "none")
    assert none == []
    assert next(iter(summary.left_out)).startswith("completions without their messages")


def test_completions_of_one_second_are_in_the_order_of_their_conversation(tmp_path: Path) -> None:
    texts = [(SAMPLES / name).read_text() for name in ("openai_completions.json", "openai_messages.jsonl")]
    for identity in "ae":  # their hashes are in the one order, and in the other
        (tmp_path / f"{identity}.jsonl").write_text("\n".join(texts).replace("chatcmpl-", f"chatcmpl-{identity}"))
        _, (trace,) = read([str(tmp_path / f"{identity}.jsonl")], tmp_path / identity, trace_key="session")
        assert [call.response for call in trace.calls] == [CALLED, SUM]


def test_a_trajectory_has_a_call_for_each_step_of_an_agent(tmp_path: Path) -> None:
    summary, (trace,) = read(["atif.json"], tmp_path, reward="reward")
    assert [call.agent for call in trace.calls] == ["calculator", "adder", "calculator"]
    first, nested, last = trace.calls
    assert first.response == {**CALLED, "reasoning_content": "I add the numbers."}
    assert first.prompt_ids is not None
    assert first.output_ids is not None
    assert first.logprobs is not None
    assert [*first.prompt_ids, *first.output_ids, *first.logprobs] == [1, 2, 3, 4, 5, -0.5, -0.25]
    assert nested.model == "small"
    assert last.messages == (QUESTION, first.response, RESULT)
    assert (trace.reward, summary.scores) == (1.0, {"reward": 1})


def test_log_records_bring_messages_and_whole_calls(tmp_path: Path) -> None:
    _, (trace,) = read(["otlp_logs.json"], tmp_path, reward="correct")
    by_span, alone = trace.calls
    assert (by_span.agent, by_span.messages, by_span.response) == ("calculator", (SYSTEM, QUESTION), CALLED)
    assert (alone.messages, alone.response) == ((QUESTION,), SUM)
    assert [(reward.value, reward.call) for reward in trace.rewards] == [(0.5, by_span.id)]
    assert len(read_traces(SAMPLES / "otlp_logs.json")) == 1  # without an import, too
    summary, _ = read(["otlp_logs.json"], tmp_path / "named", agent_key="gen_ai.agent.name")
    assert summary.calls["calculator"] >= 1
    with pytest.raises(ConfigError, match=r"--agent-key 'team': no metadata has this key; found .*'gen_ai.agent.name'"):
        read(["otlp_logs.json"], tmp_path / "wrong", agent_key="team")


def test_a_trace_is_imported_once(tmp_path: Path) -> None:
    read(["mlflow_traces.json", "mlflow_frame.jsonl"], tmp_path)
    again, none = read(["mlflow_frame.jsonl"], tmp_path)
    assert none == []
    assert again.left_out == {"traces that the folder has already": 2}
    other, _ = read(["langfuse_pages.jsonl"], tmp_path)
    assert (other.traces, len(list(tmp_path.glob("*.jsonl")))) == (2, 2)


def test_two_imports_at_once_write_two_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = importing.write_atomically

    def write_second(path: Path, text: str) -> None:
        monkeypatch.setattr(importing, "write_atomically", write)
        (tmp_path / "other.json").write_text((SAMPLES / "mlflow_langchain.json").read_text())
        import_traces([tmp_path / "other.json"], tmp_path, ImportOptions())
        write(path, text)

    monkeypatch.setattr(importing, "write_atomically", write_second)
    first = import_traces([SAMPLES / "mlflow_traces.json"], tmp_path, ImportOptions())
    assert first.file is not None
    assert {path.name: len(read_traces(path)) for path in tmp_path.glob("*.jsonl")} == {
        "mlflow-0001.jsonl": 2,
        "mlflow-0002.jsonl": 1,
    }


def test_a_trace_without_its_root_is_counted(tmp_path: Path) -> None:
    pages = [json.loads(line) for line in (SAMPLES / "langfuse_pages.jsonl").read_text().splitlines()]
    for page in pages:
        page["data"] = [item for item in page["data"] if "type" not in item or item.get("parentObservationId")]
    (tmp_path / "late.jsonl").write_text("\n".join(map(json.dumps, pages)))
    summary = import_traces([tmp_path / "late.jsonl"], tmp_path / "out", ImportOptions())
    missing = next(number for reason, number in summary.left_out.items() if reason.startswith("roots of imported"))
    assert missing == summary.traces > 0


def test_all_lists_of_a_page_are_read(tmp_path: Path) -> None:
    first, *others = [json.loads(line) for line in (SAMPLES / "langfuse_pages.jsonl").read_text().splitlines()]
    rows = [item for page in others for item in page["data"]]
    (tmp_path / "page.json").write_text(json.dumps({"data": first["data"], "rows": rows}))
    summary = import_traces([tmp_path / "page.json"], tmp_path / "out", ImportOptions())
    apart, _ = read(["langfuse_pages.jsonl"], tmp_path / "apart")
    assert summary.calls == apart.calls


def test_a_bad_record_rejects_its_own_trace_only(tmp_path: Path) -> None:
    pages = [json.loads(line) for line in (SAMPLES / "langfuse_pages.jsonl").read_text().splitlines()]
    pages[0]["data"][1]["startTime"] = "soon"
    pages[1]["data"].append({"id": "x", "type": "SPAN", "startTime": "2026-11-27T12:00:00Z", "traceId": ""})
    lines = [*map(json.dumps, pages), '{"data": [', '"text"']
    (tmp_path / "bad.jsonl").write_text("\n".join(lines))
    summary = import_traces([tmp_path / "bad.jsonl"], tmp_path / "out", ImportOptions())
    assert (summary.traces, summary.failed) == (1, 1)
    assert summary.left_out == {
        "lines of bad.jsonl that are not JSON": 1,
        "values that are not JSON objects": 1,
        "records without a trace: ValueError: expected traceId": 1,
        "traces: a record cannot be read: ValueError: Invalid isoformat string: 'soon'": 1,
    }


def test_a_score_becomes_a_reward_only_if_it_is_named(tmp_path: Path) -> None:
    summary, traces = read(["mlflow_traces.json"], tmp_path / "none")
    assert summary.scores == {"correct": 1, "style": 1}
    assert [trace.rewards for trace in traces] == [(), ()]
    summary, traces = read(["mlflow_traces.json"], tmp_path / "text", reward="style")
    assert [trace.rewards for trace in traces] == [(), ()]
    assert summary.left_out == {"scores 'style' that are not numbers": 1}
    with pytest.raises(ConfigError, match=r"--reward 'corect': no trace has .* found .*'correct'"):
        read(["mlflow_traces.json"], tmp_path / "wrong", reward="corect")


def test_the_command_shows_what_was_imported_and_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["traces", "import", str(SAMPLES / "mlflow_traces.json"), "-o", "mine"]) == 0
    shown = capsys.readouterr().out
    assert "MLflow: 2 traces in mine/mlflow-0001.jsonl, 1 of them failed" in shown
    assert "No score is a reward. Choose one with --reward NAME" in shown
    assert main(["traces", "import", str(SAMPLES / "mlflow_traces.json"), "-o", "mine"]) == 0
    assert "traces that the folder has already       2" in capsys.readouterr().out
    assert main(["trace", "mine/mlflow-0001.jsonl"]) == 0
    assert "calculator" in capsys.readouterr().out
    (tmp_path / "unknown.json").write_text('{"a": 1}')
    assert main(["traces", "import", "unknown.json"]) == 2
    assert "the format of the traces is not known: found an object with the keys a" in capsys.readouterr().err
    assert main(["traces", "import", str(SAMPLES / "atif.json"), "--trace-key", "x"]) == 2
    assert "--trace-key is for stored completions of OpenAI" in capsys.readouterr().err


class _Langfuse(BaseHTTPRequestHandler):
    """The two lists of Langfuse's API, with pages of the sample; the first request meets a rate limit."""

    requests: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self.requests.append(self.path)
        path, query = urlsplit(self.path).path, parse_qs(urlsplit(self.path).query)
        if self.headers["Authorization"] != f"Basic {b64encode(b'pk:sk').decode()}":
            return self._send(401, {"message": "Invalid credentials"})
        if path.startswith("/page/"):
            return self._send(200, None)
        if len(self.requests) == 1:
            return self._send(429, {"message": "slow down"})
        pages = [json.loads(line)["data"] for line in (SAMPLES / "langfuse_pages.jsonl").read_text().splitlines()]
        if path == "/api/public/v2/observations":
            number = int(query.get("cursor", ["0"])[0])
            meta = {"cursor": "1"} if number == 0 else {}
            return self._send(200, {"data": pages[number], "meta": meta})
        subject = {"kind": "observation", "id": pages[0][0]["id"], "traceId": pages[0][0]["traceId"]}
        score = {"id": "s", "name": "correct", "value": 1, "dataType": "NUMERIC", "subject": subject}
        return self._send(200, {"data": [score], "meta": {}})

    def _send(self, status: int, document: dict[str, Any] | None) -> None:
        data = b"<html>Sign in</html>" if document is None else json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Retry-After", "0")
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        pass


def test_langfuse_s_api_is_read_page_by_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Langfuse)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    arguments = ["traces", "import", "--url", f"http://127.0.0.1:{server.server_port}", "-o", str(tmp_path)]
    monkeypatch.delenv("LANGFUSE_SECRET_KEY", raising=False)
    monkeypatch.setenv("LANGFUSE_PUBLIC_KEY", "pk")
    assert main(arguments) == 2
    assert "set the environment variables LANGFUSE_SECRET_KEY" in capsys.readouterr().err
    monkeypatch.setenv("LANGFUSE_SECRET_KEY", "sk")
    assert main([*arguments, "--reward", "correct", "--since", "2026-11-01T00:00:00Z"]) == 0
    (file,) = tmp_path.glob("*.jsonl")
    first, second = read_traces(file)
    assert [reward.call for reward in first.rewards] == [first.calls[0].id]
    assert second.error is not None
    assert "expandMetadata=tools" in _Langfuse.requests[0]
    assert "fromStartTime=2026-11-01T00%3A00%3A00Z" in _Langfuse.requests[0]
    assert main(["traces", "import", "--url", f"{arguments[3]}/page", "-o", str(tmp_path)]) == 2
    assert "could not be read: expected a JSON object, got: <html>Sign in" in capsys.readouterr().err
    monkeypatch.setenv("LANGFUSE_SECRET_KEY", "wrong")
    assert main(arguments) == 2
    assert "status 401" in capsys.readouterr().err
    server.shutdown()
    server.server_close()


def test_parquet_needs_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow.parquet", None)
    with pytest.raises(ConfigError, match="needs pyarrow, which is not installed"):
        read(["langsmith_export.parquet"], tmp_path)
    with pytest.raises(ConfigError, match=r"--reward 'correct': .* found no scores. Left out: .* needs pyarrow"):
        read(["langsmith_export.parquet", "langsmith_feedback.jsonl"], tmp_path, reward="correct")


def test_the_command_names_the_formats_that_there_are() -> None:
    assert tuple(source.name for source in SOURCE_FORMATS) == command.SOURCES
    assert tuple(target.name for target in TARGET_FORMATS) == command.TARGETS
