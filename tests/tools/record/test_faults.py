"""Faults of calls, files and processes end neither the recording nor its counts."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import openai
import pytest
import requests

from lightning_core import Trace, record, trainable
from lightning_core import trace as tr
from lightning_core.otel import read_traces
from lightning_core.testing.recording_server import RecordingServer
from lightning_core.tools.cli.main import main
from lightning_core.tools.record.assembling import TraceAssembler
from lightning_core.tools.record.background import BackgroundWork
from lightning_core.tools.record.counts import FAILED, QUEUE_FULL, UNREAD_RESPONSE, RecordCounts
from lightning_core.tools.record.files import TraceFiles
from lightning_core.tools.record.naming import CallNames
from lightning_core.tools.record.observed import ObservedCall
from lightning_core.tools.record.pipeline import RecordPipeline
from lightning_core.tools.record.served import ServedCalls
from lightning_core.tools.record.spans import SpanMaker
from lightning_core.tools.record.units import CallOrigin, new_trace, root_of
from lightning_core.trace import SpanRecord
from tests.tools.record.apps import user


def read(folder: Path) -> list[Trace]:
    return read_traces(folder) if any(folder.glob("*.jsonl")) else []


def ask(url: str, text: str = "hi") -> None:
    with openai.OpenAI(base_url=url, api_key="k", max_retries=0) as client:
        client.chat.completions.create(model="m", messages=user(text))


def span_of(name: str, trace: str, **more: Any) -> SpanRecord:
    """A span called ``name``, 16 hexadecimal digits, below the root of ``trace``."""
    fields: dict[str, Any] = {
        "start_ns": 1,
        "end_ns": 2,
        "parent_id": root_of(trace),
        "attributes": {tr.OPERATION: "chat"},
    }
    return SpanRecord(name="chat", trace_id=trace, span_id=name, **{**fields, **more})


class Pipe:
    """A pipeline that records to ``folder``, and calls as a client observes them."""

    def __init__(self, folder: Path, names: CallNames | None = None) -> None:
        self.counts = RecordCounts()
        files = TraceFiles(folder, most_bytes=None)
        self.pipeline = RecordPipeline(files, self.counts, share=1.0, maker=SpanMaker(None), names=names or CallNames())

    def receive(self, call: ObservedCall) -> None:
        self.pipeline.work([call])

    def call(
        self,
        messages: Sequence[Any],
        agent: str | None = None,
        host: str = "a",
        conversation: str | None = None,
        response: str = "r",
    ) -> None:
        trace = new_trace()
        call = ObservedCall(
            receiver=self,
            route="/chat/completions",
            path="/v1/chat/completions",
            host=host,
            body=json.dumps({"model": "m", "messages": messages}).encode(),
            origin=CallOrigin(trace, root_of(trace), agent, in_unit=False, conversation=conversation),
            sequence=0,
        )
        call.respond(200, "application/json")
        choice = {"index": 0, "message": {"role": "assistant", "content": "ok"}, "finish_reason": "stop"}
        call.add(json.dumps({"id": response, "model": "m", "choices": [choice]}).encode())
        call.end()


def test_names_that_are_not_utf_8_are_recorded_with_a_replacement(server: RecordingServer, tmp_path: Path):
    @trainable("caf\udce9")
    def read_file() -> None:
        ask(server.url)
        raise FileNotFoundError("caf\udce9")

    with record(tmp_path) as recording:
        with pytest.raises(FileNotFoundError):
            read_file()
        assert recording.flush()
        requests.post(f"{server.url}/chat/completions", json={"model": "m", "messages": user("\udce9")}, timeout=5)
    assert recording.counts.as_dict() == {"recorded": 2, "rewards": 0}
    first, second = read(tmp_path)
    assert {first.calls[0].agent, *(event.name for event in first.events)} == {"caf\ufffd", "rollout"}
    assert second.calls[0].messages[0]["content"] == "\ufffd"


def test_a_trace_that_cannot_be_written_is_counted_and_the_others_are_written(tmp_path: Path):
    counts = RecordCounts()
    traces = TraceAssembler(TraceFiles(tmp_path, most_bytes=None), counts)
    traces.add_call(span_of("a" * 16, "1" * 32, error="\udce9"))
    traces.add_call(span_of("b" * 16, "2" * 32))
    traces.close()
    assert counts.as_dict() == {FAILED: 1, "recorded": 1, "rewards": 0}
    assert [call.id for trace in read(tmp_path) for call in trace.calls] == ["b" * 16]


def test_the_thread_survives_a_batch_that_fails(caplog: pytest.LogCaptureFixture):
    done: list[str] = []

    def work(items: Sequence[str]) -> None:
        if "bad" in items:
            raise SystemExit
        done.extend(items)

    background = BackgroundWork(work)
    background.put("bad", 1)
    assert background.wait(5)
    background.put("good", 1)
    released: list[str] = []
    assert background.close(5, lambda: released.append("all")) == 1
    assert (done, released) == (["good"], ["all"])
    assert "a batch of 1 recorded items failed" in caplog.text


def test_spans_that_wait_take_no_more_memory_than_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("lightning_core.tools.record.background.MOST_BYTES", 10_000)
    trace = new_trace()
    with record(tmp_path) as recording:
        for number, text in enumerate(("x" * 20_000, "x")):
            attributes = {tr.OPERATION: "reward", tr.REWARD_VALUE: 0.5, tr.REWARD_CALL: "a" * 16, tr.REASON: text}
            recording.take_span(span_of(f"{number:016x}", trace, attributes=attributes))
        recording.take_span(span_of("a" * 16, trace))
        assert recording.flush()
        assert recording.counts.rewards == 1


def test_a_flush_waits_for_the_items_before_it_only():
    def work(items: Sequence[str]) -> None:
        background.put("another", 1)  # there is always an item that waits
        time.sleep(0.01)

    background = BackgroundWork(work, pause_seconds=0)
    background.put("first", 1)
    assert background.wait(2)
    background.close(5, lambda: None)


def test_calls_are_counted_while_no_thread_can_start(server: RecordingServer, tmp_path: Path):
    with record(tmp_path) as recording:
        size = threading.stack_size(1 << 46)  # more than there is
        try:
            ask(server.url)
        finally:
            threading.stack_size(size)
        ask(server.url)
    assert recording.counts.as_dict() == {QUEUE_FULL: 1, "recorded": 1, "rewards": 0}


def test_conversations_of_other_agents_hosts_and_names_are_other_traces(tmp_path: Path):
    pipe, more = Pipe(tmp_path), [*user("hi"), {"role": "assistant", "content": "ok"}, *user("more")]
    for agent, host in (("a", "x"), ("b", "x"), ("a", "y")):
        pipe.call(user("hi"), agent, host)
    for agent, host in (("a", "x"), ("b", "x"), ("a", "y")):
        pipe.call(more, agent, host)
    pipe.call(user("hi"), "a", conversation="1")
    pipe.call(user("other"), "a", conversation="1")
    pipe.call(more, "a", conversation="2")
    pipe.call(user("hi"), "b", conversation="1")
    pipe.pipeline.close()
    found = [[(call.agent, len(call.messages)) for call in trace.calls] for trace in read(tmp_path)]
    by_messages = [[("a", 1), ("a", 3)], [("b", 1), ("b", 3)], [("a", 1), ("a", 3)]]
    assert sorted(found) == sorted([*by_messages, [("a", 1), ("a", 1)], [("a", 3)], [("b", 1)]])


def reward_of(response: str) -> SpanRecord:
    attributes = {tr.OPERATION: "reward", tr.REWARD_VALUE: 0.5, tr.REWARD_CALL: response}
    return span_of(new_trace()[16:], new_trace(), attributes=attributes)


def test_rewards_that_no_call_or_several_calls_can_have_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    pipe = Pipe(tmp_path)
    pipe.pipeline.work([reward_of("once"), reward_of("twice"), reward_of("never")])
    for number, response in enumerate(("once", "twice", "twice")):
        pipe.call(user(str(number)), response=response)
    pipe.pipeline.work([reward_of("twice")])
    pipe.pipeline.close()
    once, *others = sorted(read(tmp_path), key=lambda trace: str(trace.calls[0].messages))
    assert [(reward.value, reward.call) for reward in once.rewards] == [(0.5, once.calls[0].id)]
    assert [trace.rewards for trace in others] == [(), ()]
    assert pipe.counts.as_dict() == {"recorded": 3, "rewards": 0}
    assert main(["trace", str(tmp_path)]) == 0
    shown = capsys.readouterr()
    assert shown.err == "left out: 2 rewards of a response id that several calls have; 1 rewards of no recorded call\n"
    assert [line.split()[2] for line in shown.out.splitlines()[1:4]] == ["0.500", "none", "none"]


def test_old_files_are_deleted_while_no_call_arrives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def make_old() -> Path:
        path = tmp_path / "20200101-000000-1.jsonl"
        path.write_text("")
        os.utime(path, (0, 0))
        return path

    monkeypatch.setattr("lightning_core.tools.record.background._IDLE_SECONDS", 0.05)
    monkeypatch.setattr("lightning_core.tools.record.files._SCAN_SECONDS", 0)
    old = make_old()
    served = ServedCalls(tmp_path, days=30)
    assert not old.exists()
    make_old()
    until = time.monotonic() + 5
    while old.exists() and time.monotonic() < until:
        time.sleep(0.01)
    assert not old.exists()
    served.close()


def test_files_stay_open_while_the_thread_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("lightning_core.tools.record.served._CLOSE_SECONDS", 0.05)
    begun, may_write, write = threading.Event(), threading.Event(), os.write

    def write_slowly(file: int, data: bytes) -> int:
        """As a file system that hangs for a while."""
        if b"lightning-record" in data[:300]:
            begun.set()
            may_write.wait(5)
        return write(file, data)

    monkeypatch.setattr(os, "write", write_slowly)
    served = ServedCalls(tmp_path)
    served.add(span_of("a" * 16, "1" * 32))
    assert begun.wait(5)
    assert served.close().endswith("1 left out (1 not written before the program ended)")
    may_write.set()
    for thread in threading.enumerate():
        if thread.name == "lightning-record":
            thread.join(5)
    assert len(read(tmp_path)) == 1


UNUSED = (
    "lightning-rl record: 0 calls recorded, the program imported none of httpx, httpx2, requests, aiohttp, urllib3\n"
)


def test_options_of_python_are_read_with_their_arguments(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delattr(os, "execvpe")  # which would replace the process of the tests
    for options in (["-W", "ignore", "-I"], ["-X", "dev", "-I"], ["-uE"], ["--check-hash-based-pycs", "never", "-S"]):
        assert main(["record", "--to", str(tmp_path), "--", "python3", *options, "app.py"]) == 2
        assert f"python3 {options[-1]} ignores the variables" in capsys.readouterr().err
    command = [sys.executable, "-m", "lightning_core.tools.cli.main", "record", "--to", str(tmp_path), "--"]
    program = [sys.executable, "-Wignore::ImportWarning", '-cprint("ISE")']
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([*command, *program], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ISE\n", UNUSED)


PARENT = """
import httpx, json, os, pathlib, subprocess, sys
counts = json.loads(os.environ["LIGHTNING_RECORD"])["counts"]
pathlib.Path(counts, "1.json").write_text('{"recor')  # as of a process that was killed
subprocess.Popen([sys.executable, "-c", sys.argv[1], sys.argv[2]], stdin=subprocess.PIPE)
"""
CHILD = """
import httpx, sys
sys.stdin.read()  # until the parent ends
httpx.post(sys.argv[1], json={"model": "m", "messages": [{"role": "user", "content": "hi"}]})
"""


def test_a_child_that_outlives_its_parent_prints_its_own_line(server: RecordingServer, tmp_path: Path):
    traces, temporary = tmp_path / "traces", tmp_path / "temporary"
    temporary.mkdir()
    command = [sys.executable, "-m", "lightning_core.tools.cli.main", "record", "--to", str(traces), "--"]
    program = [sys.executable, "-c", PARENT, CHILD, f"{server.url}/chat/completions"]
    path = os.pathsep.join(filter(None, sys.path))
    environment = {**os.environ, "PYTHONPATH": path, "TMPDIR": str(temporary), "PYTHONWARNINGS": "ignore"}
    done = subprocess.run([*command, *program], env=environment, capture_output=True, text=True, check=False)
    assert done.stderr.splitlines() == [
        f"lightning-rl record: 0 calls recorded in {traces}, none left out; "
        "1 file with the counts of a child process cannot be read",
        f"lightning-rl record: 1 call recorded in {traces}, none left out",
    ]
    assert [file.suffix for file in traces.iterdir()] == [".jsonl"]
    assert not [*temporary.iterdir()]


WORKERS = """
import httpx, multiprocessing, os, sys

def ask(text):
    httpx.post(sys.argv[1], json={"model": "m", "messages": [{"role": "user", "content": text}]})

with multiprocessing.get_context("fork").Pool(2) as pool:
    pool.map(ask, ["a", "b", "c"])
    pool.close()
    pool.join()
body = {"model": "m", "messages": [{"role": "user", "content": "d"}], "stream": True}
with httpx.stream("POST", sys.argv[1], json=body) as response:  # which the child process inherits
    if os.fork() == 0:
        response.close()
        ask("e")
        os._exit(0)
    os.wait()
    response.read()
os._exit(0)
"""


def run_recorded(program: str, server: RecordingServer, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "lightning_core.tools.cli.main", "record", "--to", str(folder), "--"]
    arguments = [sys.executable, "-W", "ignore", "-c", program, f"{server.url}/chat/completions"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.run([*command, *arguments], env=environment, capture_output=True, text=True, check=False)


SERVER = """
import asyncio, httpx, os, signal, sys, threading, uvicorn

async def app(scope, receive, send):
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.sleep(0.2)
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    async with httpx.AsyncClient() as client:
        (await client.post(f"{sys.argv[1]}/chat/completions", json=body)).raise_for_status()
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"answered"})

server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="critical", lifespan="off"))

def ask():
    while not server.started:
        pass
    port = server.servers[0].sockets[0].getsockname()[1]
    httpx.get(f"http://127.0.0.1:{port}/")

threading.Thread(target=ask).start()
server.run()
"""


def test_a_server_that_ends_its_requests_after_sigterm_loses_none(server: RecordingServer, tmp_path: Path):
    done = run_recorded(SERVER, server, tmp_path / "traces")
    assert done.returncode == -signal.SIGTERM, done.stderr
    assert f"1 call recorded in {tmp_path / 'traces'}, none left out" in done.stderr


@pytest.mark.parametrize("program", ["pass", "import os; os.fork() or os._exit(0); os.wait()"])
def test_a_program_without_a_client_says_that_nothing_was_recorded(
    program: str, server: RecordingServer, tmp_path: Path
):
    done = run_recorded(program, server, tmp_path / "traces")
    assert done.stderr == UNUSED


def test_the_calls_of_forked_workers_are_recorded_once(server: RecordingServer, tmp_path: Path):
    done = run_recorded(WORKERS, server, tmp_path)
    assert done.stderr.splitlines() == [f"lightning-rl record: 5 calls recorded in {tmp_path}, none left out"]
    calls = [call for trace in read(tmp_path) for call in trace.calls]
    assert sorted((call.messages[0]["content"], call.error) for call in calls) == [(text, None) for text in "abcde"]


TERMINATED = """
import glob, httpx, json, multiprocessing, os, sys, time

def work(connection):
    httpx.post(sys.argv[1], json={"model": "m", "messages": [{"role": "user", "content": "hi"}]})
    counts = json.loads(os.environ["LIGHTNING_RECORD"])["counts"]
    began = time.monotonic()
    while not glob.glob(f"{counts}/*.json") and time.monotonic() - began < 10:  # until the call is written and counted
        time.sleep(0.01)
    connection.send("ready")
    sum(range(10**11))  # no bytecode and no other thread runs meanwhile

context = multiprocessing.get_context("fork")
ours, theirs = context.Pipe()
child = context.Process(target=work, args=(theirs,))
child.start()
ours.recv()
time.sleep(0.2)
child.terminate()
child.join(3)
print(child.exitcode)
child.kill()
"""


def test_sigterm_ends_a_forked_process_as_ever_and_written_calls_count(server: RecordingServer, tmp_path: Path):
    done = run_recorded(TERMINATED, server, tmp_path)
    assert done.stdout == "-15\n"
    assert done.stderr.splitlines() == [f"lightning-rl record: 1 call recorded in {tmp_path}, none left out"]


EXIT = """
import os, sys
from lightning_core import record
recording = record(sys.argv[1])
recording.on_finish = lambda _: 1 / 0
os._exit(7)
"""


def test_os_exit_ends_the_process_when_the_recording_fails(tmp_path: Path):
    assert subprocess.run([sys.executable, "-c", EXIT, str(tmp_path)], check=False).returncode == 7


def test_the_recording_ends_while_other_threads_start_calls(tmp_path: Path):
    request = ("POST", "http://a/v1/chat/completions", json.dumps({"model": "m", "messages": user("hi")}).encode())
    recording, later = record(tmp_path), list[ObservedCall | None]()

    def start_another(*step: Any) -> None:
        later.append(recording.observe(lambda: request))

    calls = [recording.observe(lambda: request) for _ in range(3)]
    sys.setprofile(start_another)  # as another thread or a finalizer does, between any two steps
    try:
        recording.finish()
    finally:
        sys.setprofile(None)
        recording.close()
    assert recording.counts.recorded >= len(calls)


def test_a_second_thread_that_ends_the_recording_waits_for_the_first(server: RecordingServer, tmp_path: Path):
    begun = threading.Event()

    def redact_slowly(call: dict[str, Any]) -> dict[str, Any]:
        begun.set()
        time.sleep(0.3)
        return call

    with record(tmp_path, redact=redact_slowly) as recording:
        ask(server.url)
        thread = threading.Thread(target=recording.finish)
        thread.start()
        assert begun.wait(5)
        recording.finish()
        assert recording.counts.recorded == 1
        thread.join()


def test_a_streamed_response_that_is_read_raw_is_counted(server: RecordingServer, tmp_path: Path):
    body = {"model": "m", "messages": user("hi")}
    with record(tmp_path) as recording:
        response = requests.post(f"{server.url}/chat/completions", json=body, stream=True, timeout=5)
        assert b"ok" in response.raw.read()
        response.close()
    assert recording.counts.as_dict() == {UNREAD_RESPONSE: 1, "recorded": 0, "rewards": 0}


class CountedRule(Mapping[str, Any]):
    """A rule under ``agents.named`` that counts how often it is read."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self._fields, self.read = fields, 0

    def __getitem__(self, name: str) -> Any:
        return self._fields[name]

    def __iter__(self) -> Iterator[str]:
        self.read += 1
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)


def test_the_rules_of_a_configuration_are_read_once(tmp_path: Path):
    rule = CountedRule({"name": "seller", "contains": "sell"})
    pipe = Pipe(tmp_path, CallNames(rules=(rule,)))
    pipe.call(user("sell"))
    pipe.call(user("buy"))
    pipe.pipeline.close()
    assert [call.agent for trace in read(tmp_path) for call in trace.calls] == ["seller", None]
    assert rule.read == 1
