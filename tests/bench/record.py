"""CPU time of an app with and without recording, in the same run: `python -m tests.bench.record`.

The app has two agents with the openai package, whole and streamed calls, and a prompt of 8 kB with tools. Its provider is another process
on this machine, so the app waits for nothing: the ratio is the worst case. Blocks with and without recording take turns.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from openai import OpenAI

from lightning_core import record, trainable
from lightning_core.testing.recording_server import recording_server

TURN = "The customer wants to know where the parcel is, and says that it should have arrived on Monday. " * 4
MESSAGES: list[Any] = [
    {"role": "system", "content": TURN * 4},
    *({"role": role, "content": TURN} for _ in range(8) for role in ("user", "assistant")),
    {"role": "user", "content": "where is it?"},
]
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": f"tool_{i}",
            "description": TURN[:200],
            "parameters": {"type": "object", "properties": {}},
        },
    }
    for i in range(4)
]


def provide(connection: Connection) -> None:
    """Serve until the other end is closed."""
    with recording_server() as server:
        connection.send(server.url)
        while not connection.poll(0.5):
            server.requests.clear()


@trainable("planner")
def plan(client: OpenAI) -> str:
    return client.chat.completions.create(model="m", messages=MESSAGES, tools=TOOLS).choices[0].message.content or ""


@trainable("writer")
def write(client: OpenAI) -> str:
    stream = client.chat.completions.create(model="m", messages=MESSAGES, stream=True)
    return "".join(chunk.choices[0].delta.content or "" for chunk in stream)


@trainable("team")
def team(client: OpenAI) -> tuple[str, str]:
    return plan(client), write(client)


def block(client: OpenAI, units: int) -> float:
    """CPU seconds of this process, all its threads included."""
    began = time.process_time()
    for _ in range(units):
        assert team(client) == ("ok", "ok")
    return time.process_time() - began


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--units", type=int, default=15, help="units of work in a block, with two calls each")
    parser.add_argument("--blocks", type=int, default=20, help="blocks of each kind")
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    context.Process(target=provide, args=(theirs,), daemon=True).start()
    client = OpenAI(base_url=f"{ours.recv()}/v1", api_key="k")
    plain: list[float] = []
    recorded: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(options.blocks + 1):
            without = block(client, options.units)
            with record(Path(folder)) as recording:
                began = time.process_time()
                block(client, options.units)
                recording.flush()
                with_it = time.process_time() - began
            assert recording.counts.recorded == 2 * options.units, recording.summary
            if number:  # the first block loads modules
                plain.append(without)
                recorded.append(with_it)
    ours.send(None)
    calls = 2 * options.units
    before, after = statistics.median(plain) / calls, statistics.median(recorded) / calls
    print(f"CPU time of a call: {before * 1e3:.2f} ms without recording, {after * 1e3:.2f} ms with it")
    print(f"ratio {after / before:.3f}; {(after - before) * 1e6:.0f} µs a call, {after - before:.3%} of a call of 1 s")


if __name__ == "__main__":
    main()
