"""``lightning-rl traces export``: what is written is read back, and follows the rules of each format."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_core import trace as tr
from lightning_core.capture import reward, rollout, scope
from lightning_core.errors import ConfigError
from lightning_core.otel import read_traces, spans_to_otlp
from lightning_core.otel.reading import read_rollouts
from lightning_core.records.store import Store
from lightning_core.tools.cli.main import main
from lightning_core.tools.interchange.exporting import ExportOptions, export_traces
from lightning_core.tools.interchange.importing import ImportOptions, import_traces
from lightning_core.trace import Call, Trace
from tests.tools.cli.recorded import call, keep, try_it

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """A rollout of two agents: a writer with a tool, whose second call continues the first, and a judge."""
    looked = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at":1}'}}
    first = {"role": "assistant", "content": None, "reasoning_content": "I look.", "tool_calls": [looked]}
    example = [{"role": "user", "content": "1?"}, {"role": "assistant", "content": "one"}]
    prompt: list[Any] = [*example, {"role": "user", "content": "2?"}]
    tools = {tr.TOOL_DEFINITIONS: json.dumps([TOOL])}
    with rollout(task={"id": "q1", "q": "2?"}) as run:
        with scope("writer"):
            call("writer", prompt, first, **tools)
            with scope("judge"):
                call("judge", "fine?", {"role": "assistant", "content": "yes"}, version=None, **{tr.SEQUENCE: 2})
            continued = [*prompt, first, {"role": "tool", "tool_call_id": "c1", "content": "two"}]
            last = call("writer", continued, {"role": "assistant", "content": "two"}, **tools, **{tr.SEQUENCE: 3})
        reward(1.0)
        reward(0.5, call=last, name="form")
    path = tmp_path / "recorded.json"
    path.write_text(json.dumps(spans_to_otlp(run.spans)))
    return path


def comparable(found: Call) -> dict[str, Any]:
    """The fields of a call that a trajectory keeps; ids as lists."""
    names = ("id", "agent", "sequence", "model", "messages", "response", "tools", "temperature", "finish_reason")
    arrays = {name: getattr(found, name) for name in ("prompt_ids", "output_ids", "logprobs")}
    times = (found.start_ns, found.end_ns)
    return {
        **{name: getattr(found, name) for name in names},
        **{name: None if array is None else np.asarray(array).tolist() for name, array in arrays.items()},
        "times": times,
    }


def export(source: Path, output: Path, form: str, **options: Any) -> list[Any]:
    export_traces([source], ExportOptions(format=form, output=output, **options))
    return [json.loads(line) for line in output.read_text().splitlines()]


def again(path: Path, folder: Path) -> Trace:
    summary = import_traces([path], folder, ImportOptions())
    assert summary.file is not None
    (trace,) = read_traces(summary.file)
    return trace


def test_a_trajectory_reads_back_as_the_same_calls_and_rewards(recorded: Path, tmp_path: Path) -> None:
    (before,) = read_traces(recorded)
    (document,) = export(recorded, tmp_path / "atif.jsonl", "atif")
    after = again(tmp_path / "atif.jsonl", tmp_path / "back")
    assert [comparable(found) for found in after.calls] == [comparable(found) for found in before.calls]
    assert after.rewards == before.rewards
    assert (after.rollout, after.task_id, after.task, after.error) == (before.rollout, "q1", before.task, None)
    assert (document["schema_version"], document["agent"]["name"]) == ("ATIF-v1.7", "writer")
    assert document["agent"]["tool_definitions"] == [TOOL]
    (judge,) = document["subagent_trajectories"]
    assert (judge["agent"]["name"], judge["trajectory_id"]) == ("judge", f"{before.rollout}-1")
    steps = document["steps"]
    assert [step["step_id"] for step in steps] == list(range(1, len(steps) + 1))
    assert [step["source"] for step in steps] == ["system", "user", "agent", "user", "agent", "agent"]
    assert [step.get("is_copied_context", False) for step in steps] == [False, False, True, False, False, False]
    assert steps[4]["observation"] == {"results": [{"source_call_id": "c1", "content": "two"}]}
    assert steps[4]["metrics"]["completion_token_ids"] == list(range(5))
    assert document["final_metrics"]["total_completion_tokens"] == 10


def test_otlp_reads_back_as_the_same_spans(recorded: Path, tmp_path: Path) -> None:
    export(recorded, tmp_path / "out.jsonl", "otlp")
    assert read_rollouts(tmp_path / "out.jsonl") == read_rollouts(recorded)
    (before,) = read_traces(recorded)
    imported = again(tmp_path / "out.jsonl", tmp_path / "back")
    assert [comparable(found) for found in imported.calls] == [comparable(found) for found in before.calls]
    assert (imported.rewards, imported.events[1:]) == (before.rewards, before.events[1:])


def test_fine_tuning_data_have_each_longest_conversation_of_the_chosen_agents_once(
    recorded: Path, tmp_path: Path
) -> None:
    (line,) = export(recorded, tmp_path / "tuning.jsonl", "openai", agents=["wr*"])
    messages = line["messages"]
    assert [message["role"] for message in messages] == [
        *("system", "user", "assistant", "user", "assistant", "tool", "assistant"),
    ]
    assert [message.get("weight") for message in messages if message["role"] == "assistant"] == [0, None, None]
    assert line["tools"] == [TOOL]
    check_tuning_line(line)
    assert len(export(recorded, tmp_path / "all.jsonl", "openai")) == 2
    with pytest.raises(ConfigError, match="there is nothing to write: 1 rollouts with a reward below 2"):
        export(recorded, tmp_path / "none.jsonl", "openai", min_reward=2.0)


def check_tuning_line(line: dict[str, Any]) -> None:
    """The rules of OpenAI's fine-tuning data: known keys, results that follow their calls, the assistant last."""
    assert set(line) <= {"messages", "tools", "parallel_tool_calls"}
    waiting: set[str] = set()
    for message in line["messages"]:
        assert message["role"] in ("system", "user", "assistant", "tool")
        assert set(message) <= {"role", "content", "name", "tool_calls", "tool_call_id", "weight"}
        if message["role"] == "tool":
            waiting.remove(message["tool_call_id"])
        else:
            assert not waiting
        waiting |= {called["id"] for called in message.get("tool_calls", ())}
        assert message.get("content") or message.get("tool_calls")
        assert "weight" not in message or (message["role"] == "assistant" and message["weight"] in (0, 1))
    assert line["messages"][-1]["role"] == "assistant"
    assert line["messages"][-1].get("weight", 1) == 1


def test_a_cut_response_is_not_the_end_of_a_conversation(recorded: Path, tmp_path: Path) -> None:
    text = recorded.read_text()
    document = json.loads(text)
    spans = document["resourceSpans"][0]["scopeSpans"][0]["spans"]
    last = max((span for span in spans if "gen_ai.output.messages" in str(span)), key=lambda s: s["startTimeUnixNano"])
    for entry in last["attributes"]:
        if entry["key"] == tr.FINISH_REASONS:
            entry["value"] = {"arrayValue": {"values": [{"stringValue": "length"}]}}
    recorded.write_text(json.dumps(document))
    (line,) = export(recorded, tmp_path / "tuning.jsonl", "openai", agents=["writer"])
    assert line["messages"][-1]["tool_calls"][0]["function"]["name"] == "look"
    check_tuning_line(line)


def test_the_command_writes_a_run_s_rollouts_to_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").touch()
    with Store(Path("run", "store.db")) as store:
        for status in ("ok", "failed", "infrastructure"):
            run, _ = try_it()
            keep(store, run, id=run.rollout, status=status, phase="eval_manual")
    assert main(["traces", "export", "run", "--as", "atif", "-o", "trajectories", "--agents", "judge"]) == 0
    shown = capsys.readouterr().out
    assert "ATIF-v1.7: 2 rollouts in 2 documents, in trajectories" in shown
    assert "rollouts with an infrastructure failure or an invalid reward       1" in shown
    file, _ = (tmp_path / "trajectories").iterdir()
    assert json.loads(file.read_text())["agent"]["name"] == "judge"
    assert main(["traces", "export", "run", "--as", "openai", "-o", "tuning.jsonl", "--phase", "eval_manual"]) == 0
    assert "OpenAI fine-tuning data: 1 rollout in 2 documents, in tuning.jsonl" in capsys.readouterr().out
    assert main(["traces", "export", "run", "--as", "openai", "-o", "tuning.jsonl"]) == 2
    held_out = "no rollouts of the phase 'train', but 3 of eval_manual: choose one with --phase or as FOLDER:PHASE"
    assert held_out in " ".join(capsys.readouterr().err.split())
    with Store(Path("run", "store.db")) as store:
        run, _ = try_it()
        keep(store, run, id=run.rollout, phase="fork", error="fork dropped: no reward differs")
    assert main(["traces", "export", "run", "--as", "openai", "-o", "tuning.jsonl", "--phase", "all"]) == 0
    assert re.search(r"OpenAI.*: 1 rollout in 2 .*forks that were dropped +1", capsys.readouterr().out, re.DOTALL)
    for wrong, message in (
        (["run", "--as", "openai", "-o", "folder"], "-o 'folder': expected a file that ends in .jsonl"),
        (["run", "--as", "otlp", "-o", "a.jsonl", "--agents", "writer"], "--agents: OTLP/JSON has whole rollouts"),
        (["trajectories", "--as", "atif", "-o", "a.jsonl", "--phase", "eval"], "--phase is for runs"),
        (["nowhere", "--as", "atif", "-o", "a.jsonl"], "'nowhere' does not exist"),
    ):
        assert main(["traces", "export", *wrong]) == 2
        assert message in capsys.readouterr().err
