"""Our endpoint and the anchor's gateway before the same model server, which answers at once: what each of them costs. In one run.

    python -m tests.bench.bench_endpoint [--repeats 3] [--workload short long] [--anchor-python PATH | --no-anchor] [--tokenizer NAME]

The anchor is agentlightning 1.0.2 (its `agl-server`, as shipped); it needs Python 3.12 or later and is installed into the cache folder.
Both gateways, the model server (`null_model.py`) and the load (`http_load.py`) are processes of their own. Lines of ours:

- *http*: as the anchor, it asks the model server over HTTP; *in process*: its backend has the tokens ready;
- *free tokens*: tokenising costs nothing, as for the anchor, whose model server does that; else it is TOKENIZER's;
- *streamed*: the answer comes token by token, from the model server too. The anchor refuses to stream.

CPU is user and system time of the gateway's process a request, at 64 streams. Added latency is that of the request less that of the same
request without a gateway, at p50 and p99; streams ask again at once, so that with 64 and more it is mostly waiting for one another.
RAM is what a request leaves behind while its rollout goes on, and after all rollouts have ended. Medians over the repeats; gateways
take turns.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.bench import anchor_gateway
from tests.bench.http_load import UNIQUE, Order
from tests.bench.processes import cpu_seconds, process, read_line, resident_bytes

WORDS = (
    "time",
    "year",
    "people",
    "way",
    "day",
    "man",
    "thing",
    "woman",
    "life",
    "child",
    "world",
    "school",
    "state",
    "family",
)
ROLLOUTS = 64
STREAMS = (1, 64, 1000)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Sizes in tokens, and how many requests are sent with 1, 64 and 1,000 streams."""

    name: str
    prompt: int
    output: int
    requests: tuple[int, int, int]

    def body(self, stream: bool) -> str:
        text = " ".join(random.Random(0).choices(WORDS, k=self.prompt - 20))
        messages = [{"role": "user", "content": f"{UNIQUE} {text}"}]
        extra = {"stream": True} if stream else {}
        return json.dumps({"model": "policy", "messages": messages, "max_tokens": self.output, **extra})


WORKLOADS = (
    Workload(name="short", prompt=64, output=16, requests=(300, 1280, 2000)),
    Workload(name="long", prompt=8192, output=512, requests=(50, 256, 1000)),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gateway:
    """One that is measured: how it is called in the table, and whether it is asked to stream."""

    name: str
    stream: bool = False
    tokenizer: str | None = None
    in_process: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A gateway that is running."""

    pid: int
    port: int
    targets: list[tuple[str, str]]
    end_rollouts: Callable[[], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Seconds and bytes, a request."""

    cpu: float
    added: tuple[tuple[float, float], ...]
    """p50 and p99, for each of `STREAMS`."""
    kept: float
    left: float


class Load:
    """The process that sends requests."""

    def __init__(self, child: Any) -> None:
        self._child = child
        self._next = 10_000_000

    def send(self, port: int, targets: list[tuple[str, str]], body: str, streams: int, requests: int) -> list[float]:
        """Latencies in seconds, sorted."""
        first, self._next = self._next, self._next + requests
        order = Order(port=port, targets=targets, body=body, streams=streams, requests=requests, first=first)
        print(order.to_json(), file=self._child.stdin, flush=True)
        return sorted(json.loads(read_line(self._child))["latencies"])


def quantiles(latencies: list[float]) -> tuple[float, float]:
    return latencies[len(latencies) // 2], latencies[int(len(latencies) * 0.99)]


@contextmanager
def serve(gateway: Gateway, workload: Workload, null: str, anchor: Path | None) -> Generator[Served]:
    upstream = f"{null}/{workload.prompt}/{workload.output}/v1"
    if gateway.tokenizer is None:
        assert anchor is not None
        with anchor_gateway.serve(anchor, upstream, ROLLOUTS) as (pid, port, rollouts):
            targets = [(anchor_gateway.path(rollout), "k") for rollout in rollouts]
            yield Served(
                pid=pid, port=port, targets=targets, end_rollouts=lambda: anchor_gateway.end_rollouts(port, rollouts)
            )
        return
    command = [sys.executable, "-m", "tests.bench.our_gateway", str(ROLLOUTS), gateway.tokenizer]
    sizes = ["--tokens", str(workload.prompt), str(workload.output)]
    with process([*command, *([] if gateway.in_process else ["--upstream", upstream]), *sizes]) as child:
        ready = json.loads(read_line(child))

        def end_rollouts() -> None:
            print(file=child.stdin, flush=True)
            read_line(child)

        targets = [("/v1/chat/completions", key) for key in ready["keys"]]
        yield Served(pid=child.pid, port=ready["port"], targets=targets, end_rollouts=end_rollouts)


def measure(load: Load, gateway: Gateway, workload: Workload, null: str, anchor: Path | None) -> Measured:
    """One gateway, started afresh, under one workload."""
    body = workload.body(gateway.stream)
    operation = "completions" if gateway.stream else "chat/completions"
    direct = [(f"/{workload.prompt}/{workload.output}/v1/{operation}", "k")]
    null_port = int(null.rpartition(":")[2])
    added: list[tuple[float, float]] = []
    with serve(gateway, workload, null, anchor) as served:
        load.send(served.port, served.targets, body, 64, 128)
        before, cpu = resident_bytes(served.pid), 0.0
        kept = 0.0
        for streams, requests in zip(STREAMS, workload.requests, strict=True):
            alone = quantiles(load.send(null_port, direct, body, streams, requests))
            start = cpu_seconds(served.pid)
            through = quantiles(load.send(served.port, served.targets, body, streams, requests))
            added.append((through[0] - alone[0], through[1] - alone[1]))
            if streams == 64:
                cpu = (cpu_seconds(served.pid) - start) / requests
                kept = (resident_bytes(served.pid) - before) / sum(workload.requests[:2])
        served.end_rollouts()
        left = (resident_bytes(served.pid) - before) / sum(workload.requests)
    return Measured(cpu=cpu, added=tuple(added), kept=kept, left=left)


def median(runs: list[Measured]) -> Measured:
    middle = statistics.median
    added = tuple(
        (middle(run.added[i][0] for run in runs), middle(run.added[i][1] for run in runs)) for i in range(len(STREAMS))
    )
    return Measured(
        cpu=middle(run.cpu for run in runs),
        added=added,
        kept=middle(run.kept for run in runs),
        left=middle(run.left for run in runs),
    )


def report(workload: Workload, results: dict[str, Measured]) -> None:
    print(f"\n{workload.name}: prompt {workload.prompt} tokens, response {workload.output}")
    heads = "".join(f"{f'{streams} streams':>20s}" for streams in STREAMS)
    print(f"{'':34s}{'CPU':>9s}{heads}{'RAM kept':>12s}{'left':>11s}")
    for name, m in results.items():
        cells = "".join(f"{p50 * 1000:10.2f}/{p99 * 1000:6.1f} ms" for p50, p99 in m.added)
        print(f"{name:34s}{m.cpu * 1000:6.2f} ms{cells}{m.kept / 1024:8.1f} KiB{m.left / 1024:7.1f} KiB", flush=True)
    anchor = results.get("anchor")
    for name, m in results.items():
        if m is anchor:
            continue
        words = [f"p50 added {m.added[0][0] * 1000:.2f} ms {verdict(m.added[0][0] < 0.001)} < 1 ms"]
        if anchor is not None:
            cpu, ram = anchor.cpu / m.cpu, anchor.kept / max(m.kept, 1)
            words += [f"CPU 1/{cpu:.1f} {verdict(cpu >= 5)} 1/5", f"RAM 1/{ram:.1f} {verdict(ram >= 10)} 1/10"]
        print(f"  {name:34s}{', '.join(words)}")


def verdict(met: bool) -> str:
    return "meets" if met else "MISSES"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--workload", nargs="+", choices=[w.name for w in WORKLOADS], default=["short", "long"])
    parser.add_argument("--tokenizer", default="smollm2-135m-instruct", help="a model's folder or name")
    parser.add_argument("--anchor-python", metavar="PATH", help="an interpreter, 3.12 or later, to install it with")
    parser.add_argument("--no-anchor", action="store_true")
    parser.add_argument("--only", metavar="TEXT", default="", help="only gateways whose name has this in it")
    options = parser.parse_args()
    anchor = None if options.no_anchor else anchor_gateway.install(options.anchor_python)
    real = options.tokenizer
    gateways = [
        *([] if anchor is None else [Gateway(name="anchor")]),
        Gateway(name="ours, http, free tokens", tokenizer="free"),
        Gateway(name="ours, http", tokenizer=real),
        Gateway(name="ours, http, streamed", tokenizer=real, stream=True),
        Gateway(name="ours, http, streamed, free tokens", tokenizer="free", stream=True),
        Gateway(name="ours, in process", tokenizer=real, in_process=True),
        Gateway(name="ours, in process, streamed", tokenizer=real, in_process=True, stream=True),
    ]
    gateways = [gateway for gateway in gateways if options.only in gateway.name]
    print(
        f"Python {platform.python_version()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, {options.repeats} repeats"
    )
    python = [sys.executable, "-m"]
    with process([*python, "tests.bench.null_model"]) as null, process([*python, "tests.bench.http_load"]) as loader:
        url = read_line(null)
        read_line(loader)
        load = Load(loader)
        for workload in (w for w in WORKLOADS if w.name in options.workload):
            runs: dict[str, list[Measured]] = {gateway.name: [] for gateway in gateways}
            for _ in range(options.repeats):
                for gateway in gateways:
                    runs[gateway.name].append(measure(load, gateway, workload, url, anchor))
            report(workload, {name: median(some) for name, some in runs.items()})


if __name__ == "__main__":
    main()
