"""Recorded folders: what several processes wrote is read as one."""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

from lightning_core.backends.scripted import ScriptedBackend
from lightning_core.chat.chat import Chat
from lightning_core.endpoint.agents.routing import Routing
from lightning_core.otel import read_traces
from lightning_core.tools.cli.main import main
from lightning_core.tools.serving import ServingEndpoint
from lightning_core.tools.sft.examples import Selection, read_examples

WORKERS = """
import multiprocessing, sys
import httpx
from opentelemetry import trace
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags
from lightning_core import reward

HOST = SpanContext(7, 7, True, TraceFlags(1))

def ask(url, ids):
    with trace.use_span(NonRecordingSpan(HOST)):
        body = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}
        ids.put(httpx.post(f"{url}/chat/completions", json=body).json()["id"])

def rate(response):
    with trace.use_span(NonRecordingSpan(HOST)):
        reward(1.0)
    reward(0.5, call=response)

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    ids = context.Queue()
    asking = context.Process(target=ask, args=(sys.argv[1], ids))
    asking.start()
    rating = context.Process(target=rate, args=(ids.get(timeout=20),))
    asking.join()
    rating.start()
    rating.join()
"""


def test_rewards_and_calls_of_several_processes_come_together(
    tmp_path: Path,
):
    (tmp_path / "workers.py").write_text(WORKERS, encoding="utf-8")
    folder, backend = tmp_path / "traces", ScriptedBackend(lambda prompt: "hello")
    command = [sys.executable, "-m", "lightning_core.tools.cli.main", "record", "--to", str(folder), "--"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with ServingEndpoint(backend, Chat(backend.tokenizer), routing=Routing()) as provider:
        program = [sys.executable, str(tmp_path / "workers.py"), provider.url]
        done = subprocess.run([*command, *program], env=environment, capture_output=True, text=True, check=False)
    assert done.stderr == f"lightning-rl record: 1 call recorded in {folder}, none left out\n"
    assert len([*folder.iterdir()]) == 2
    left_out: Counter[str] = Counter()
    (trace,) = read_examples([folder], Selection(), left_out)
    assert [call.messages[0]["content"] for call in trace.calls] == ["hi"]
    assert [(reward.value, reward.call) for reward in trace.rewards] == [(1.0, None), (0.5, trace.calls[0].id)]
    assert not left_out
    assert main(["traces", "export", str(folder), "--as", "otlp", "-o", str(tmp_path / "out.jsonl")]) == 0
    assert read_traces(tmp_path / "out.jsonl") == [trace]
