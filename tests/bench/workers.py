"""Requests per second and CPU per request of the endpoint in this process and in several workers.

    python -m tests.bench.workers [--workers 1 2] [--requests 600] [--repeats 3] [--tokenizer NAME]

The endpoint samples through `VllmBackend` from a model server that costs next to nothing (`null_model.py`). It, the model server and two
senders of requests (`http_load.py`) run in separate processes; 64 streams share 32 rollouts. CPU is user and system time of the process of
the run and of the workers. All need the machine's processors: with as few as two the model server and the senders take a part of them, so
compare ratios. Medians over the repeats, which alternate.
"""

from __future__ import annotations

import argparse
import contextvars
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from typing import Any

from lightning_core import rollout
from lightning_core.backends.vllm.api import ServerInfo
from lightning_core.backends.vllm.backend import VllmBackend
from lightning_core.chat.chat import Chat
from lightning_core.endpoint.agents.routing import Routing
from lightning_core.endpoint.server import PolicyEndpoint
from lightning_core.endpoint.workers.messages import ChatSettings
from lightning_core.endpoint.workers.sharded import ShardedEndpoint
from tests.bench.endpoint import WORDS
from tests.bench.http_load import UNIQUE, Order
from tests.bench.our_gateway import load_tokenizer
from tests.bench.processes import cpu_seconds, process, raise_file_limit, read_line

ROLLOUTS = 32
STREAMS = 64
PROMPT, OUTPUT = 512, 64


def gateway(workers: int, model_server: str, tokenizer: str) -> None:
    """Serve until stdin is closed. Prints the processes, and the port and key of each rollout."""
    raise_file_limit()
    served = ServerInfo(model="policy", max_context=1 << 20, device="cuda", constrains=True)
    backend = VllmBackend(f"{model_server}/{PROMPT}/{OUTPUT}", model="policy", served=served)
    chat = Chat(load_tokenizer(tokenizer, PROMPT))
    routing = Routing(trained=frozenset({"agent"}), unnamed="agent", temperature=1.0, max_tokens=OUTPUT)
    chats = {"policy": ChatSettings.of(chat, {})}
    with (
        PolicyEndpoint(backend, chat) if workers == 1 else ShardedEndpoint(backend, chats, workers=workers) as endpoint
    ):
        targets: list[tuple[int, str]] = []
        for i in range(ROLLOUTS):
            # Each in its own context: scopes that are open at the same time must not be nested.
            run = contextvars.copy_context().run(rollout({"id": str(i)}).__enter__)
            key = endpoint.new_key()
            endpoint.open(key, run.address, routing)
            targets.append((int(endpoint.url_of(key).removesuffix("/v1").rpartition(":")[2]), key))
        pids = [os.getpid(), *(endpoint.pids if isinstance(endpoint, ShardedEndpoint) else [])]
        print(json.dumps({"pids": pids, "targets": targets}), flush=True)
        sys.stdin.readline()


def send(senders: list[subprocess.Popen[str]], targets: list[tuple[int, str]], requests: int, first: int) -> float:
    """Seconds for ``requests`` requests over `STREAMS` streams; each sender has one port."""
    ports = sorted({port for port, _ in targets})
    text = " ".join(random.Random(0).choices(WORDS, k=PROMPT - 20))
    body = json.dumps({"model": "policy", "messages": [{"role": "user", "content": f"{UNIQUE} {text}"}]})
    start = time.monotonic()
    for number, sender in enumerate(senders):
        port = ports[number % len(ports)]
        order = Order(
            port=port,
            targets=[("/v1/chat/completions", key) for at, key in targets if at == port],
            body=body,
            streams=STREAMS // len(senders),
            requests=requests // len(senders),
            first=first + number * requests,
        )
        print(order.to_json(), file=sender.stdin, flush=True)
    for sender in senders:
        read_line(sender)
    return time.monotonic() - start


def measure(
    workers: int, model_server: str, senders: list[Any], options: argparse.Namespace
) -> tuple[float, float, float]:
    """Requests per second, CPU seconds per request, and the part of them in the process of the run."""
    arguments = [str(workers), model_server, options.tokenizer]
    with process([sys.executable, "-m", "tests.bench.workers", "--gateway", *arguments]) as child:
        ready = json.loads(read_line(child))
        send(senders, ready["targets"], 2 * STREAMS, 10_000_000)
        before = [cpu_seconds(pid) for pid in ready["pids"]]
        seconds = send(senders, ready["targets"], options.requests, 20_000_000)
        used = [cpu_seconds(pid) - start for pid, start in zip(ready["pids"], before, strict=True)]
    return options.requests / seconds, sum(used) / options.requests, used[0] / options.requests


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--requests", type=int, default=600)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tokenizer", default="smollm2-135m-instruct", help="a model's folder or name")
    parser.add_argument("--gateway", nargs=3, metavar=("WORKERS", "URL", "TOKENIZER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.gateway:
        gateway(int(options.gateway[0]), *options.gateway[1:])
        return
    load = os.getloadavg()[0]
    print(f"Python {platform.python_version()}, {os.cpu_count()} cores, load {load:.1f}, {options.repeats} repeats")
    python = [sys.executable, "-m"]
    results: dict[int, list[tuple[float, float, float]]] = {number: [] for number in options.workers}
    with (
        process([*python, "tests.bench.null_model"]) as model,
        process([*python, "tests.bench.http_load"]) as one,
        process([*python, "tests.bench.http_load"]) as other,
    ):
        url = read_line(model)
        senders = [one, other]
        for sender in senders:
            read_line(sender)
        for _ in range(options.repeats):
            for number, measured in results.items():
                measured.append(measure(number, url, senders, options))
    medians = {n: [statistics.median(values) for values in zip(*some, strict=True)] for n, some in results.items()}
    first = medians[options.workers[0]]
    print(f"{'workers':>8s}{'requests/s':>14s}{'CPU/request':>16s}{'in the run':>14s}")
    for number, (rate, cpu, own) in medians.items():
        print(
            f"{number:8d}{rate:8.0f} {rate / first[0]:4.2f}x{cpu * 1000:8.2f} ms {cpu / first[1]:4.2f}x{own * 1000:10.2f} ms"
        )


if __name__ == "__main__":
    main()
