"""Compares the cost of our endpoint with that of other gateways, in front of a model server that costs nothing.

    python -m tests.bench.endpoint [--quick] [--repeats 3] [--workload short long] [--peers anchor litellm] [--only TEXT]
        [--anchor-python PATH]
    python -m tests.bench.endpoint --streams 1000

Peers, each as its package starts it, in an environment of its own in the cache folder: the anchor's gateway (`agl-server` of
agentlightning 1.0.2, which requires Python 3.12 or later), and LiteLLM's proxy, which records nothing. A peer that cannot be installed is
left out, with the reason. vLLM's own server (`vllm_server.py`) is no gateway: it has a tiny model, so only the CPU of its API process is
measured, with the short workload. The gateways, the model server (`null_model.py`) and the load (`http_load.py`) run in separate
processes. Variants of ours:

- *http*: requests the model server with the product's own `VllmBackend`; *in process*: its backend has the tokens ready;
- *free tokens*: tokenising costs nothing, as for the peers, whose model server tokenises; otherwise TOKENIZER is used;
- *streamed*: the response arrives token by token, from the model server too. The anchor does not support streaming.

CPU is user and system time of the gateway's process per request, with 64 streams. RAM is the memory that a request leaves in the process
while its rollout is open. Added latency is the difference to the same request without a gateway. Streams send the next request immediately:
with 64 streams and more, the latency is the queueing time of a saturated gateway. In the last column of the short workload the model takes
ten seconds, as real models do, so a thousand requests are in progress and the gateway is mostly idle. Medians over the repeats; gateways
alternate. A response that is an error, or has one in its stream, ends the benchmark.

--quick: fewer requests, once, of the short workload, with the peers that are installed.

--streams: only ours over HTTP, with so many streams at once; the model takes ten seconds. Prints errors, p50 and p99 instead.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import random
import statistics
import sys
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx

from tests.bench import anchor_gateway, litellm_proxy, vllm_server
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
HOLD_SECONDS = 10.0
"""What a real model takes for a response."""
PEERS = {"anchor": anchor_gateway.install, "litellm": litellm_proxy.install, "vllm": vllm_server.find}
CPU_RATIO, CPU_MS, ADDED_MS = 5, 0.5, 1.0
"""Targets: a fraction of the anchor's CPU where neither tokenises, in process, and at the median of one stream."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """A number of requests over a number of streams."""

    streams: int
    requests: int
    hold: float = 0.0
    """Seconds that the model takes. Streams start spread over this time, so that all are open at once."""

    @property
    def name(self) -> str:
        return f"{self.streams} streams{f', {self.hold:g} s' if self.hold else ''}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Sizes in tokens, and the phases; CPU and RAM are measured in the second phase."""

    name: str
    prompt: int
    output: int
    phases: tuple[Phase, ...]

    def body(self, stream: bool, **fields: Any) -> str:
        text = " ".join(random.Random(0).choices(WORDS, k=self.prompt - 20))
        messages = [{"role": "user", "content": f"{UNIQUE} {text}"}]
        extra = {"stream": True, **fields} if stream else fields
        return json.dumps({"model": "policy", "messages": messages, "max_tokens": self.output, **extra})


def at_once(one: int, some: int) -> tuple[Phase, ...]:
    return (Phase(streams=1, requests=one), Phase(streams=64, requests=some), Phase(streams=1000, requests=1000))


WORKLOADS = (
    Workload(
        name="short",
        prompt=64,
        output=16,
        phases=(*at_once(200, 640), Phase(streams=1000, requests=1000, hold=HOLD_SECONDS)),
    ),
    Workload(name="long", prompt=8192, output=512, phases=at_once(50, 192)),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gateway:
    """A gateway to measure: its name in the table, and whether responses are streamed. ``command``: of a peer."""

    name: str
    command: Path | None = None
    stream: bool = False
    tokenizer: str = "free"
    in_process: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A gateway that is running."""

    pid: int
    port: int
    targets: list[tuple[str, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Seconds and bytes per request."""

    cpu: float
    kept: float
    added: tuple[tuple[float, float], ...]
    """p50 and p99 of added latency, for each of `PHASES`."""


class Load:
    """The process that sends the requests."""

    def __init__(self, child: Any) -> None:
        self._child = child
        self._next = 10_000_000

    def send(self, port: int, targets: list[tuple[str, str]], body: str, phase: Phase) -> list[float]:
        """Latencies in seconds, sorted."""
        return self.count(port, targets, body, phase, count_errors=False)[0]

    def count(
        self, port: int, targets: list[tuple[str, str]], body: str, phase: Phase, *, count_errors: bool = True
    ) -> tuple[list[float], list[str]]:
        """Latencies in seconds, sorted, and errors."""
        first, self._next = self._next, self._next + phase.requests
        order = Order(
            port=port,
            targets=targets,
            body=body,
            streams=phase.streams,
            requests=phase.requests,
            first=first,
            spread=phase.hold,
            count_errors=count_errors,
        )
        print(order.to_json(), file=self._child.stdin, flush=True)
        done = json.loads(read_line(self._child))
        return sorted(done["latencies"]), done["errors"]


def quantiles(latencies: list[float]) -> tuple[float, float]:
    return latencies[len(latencies) // 2], latencies[int(len(latencies) * 0.99)]


@contextmanager
def serve(gateway: Gateway, workload: Workload, null: str) -> Generator[Served]:
    upstream = f"{null}/{workload.prompt}/{workload.output}/v1"
    if gateway.name == "anchor" and gateway.command is not None:
        with anchor_gateway.serve(gateway.command, upstream, ROLLOUTS) as (pid, port, rollouts):
            yield Served(pid=pid, port=port, targets=[(anchor_gateway.path(rollout), "k") for rollout in rollouts])
        return
    if gateway.name == "vllm" and gateway.command is not None:
        with vllm_server.serve(gateway.command, gateway.tokenizer) as (pid, port):
            yield Served(pid=pid, port=port, targets=[(vllm_server.PATH, "k")])
        return
    if gateway.command is not None:
        with litellm_proxy.serve(gateway.command, upstream) as (pid, port, key):
            yield Served(pid=pid, port=port, targets=[(litellm_proxy.PATH, key)])
        return
    command = [sys.executable, "-m", "tests.bench.our_gateway", str(ROLLOUTS), gateway.tokenizer]
    sizes = ["--tokens", str(workload.prompt), str(workload.output)]
    with process([*command, *([] if gateway.in_process else ["--upstream", upstream]), *sizes]) as child:
        ready = json.loads(read_line(child))
        yield Served(
            pid=child.pid, port=ready["port"], targets=[("/v1/chat/completions", key) for key in ready["keys"]]
        )


def measure(load: Load, gateway: Gateway, workload: Workload, null: str) -> Measured:
    """Measure one gateway, newly started, under one workload."""
    has_model = gateway.name == "vllm"
    body = workload.body(gateway.stream, **(vllm_server.FIELDS if has_model else {}))
    operation = "completions" if gateway.stream else "chat/completions"
    direct = [(f"/{workload.prompt}/{workload.output}/v1/{operation}", "k")]
    null_port = int(null.rpartition(":")[2])
    added: list[tuple[float, float]] = []
    cpu = kept = 0.0
    with serve(gateway, workload, null) as served:
        load.send(served.port, served.targets, body, Phase(streams=64, requests=128))
        resident = resident_bytes(served.pid)
        for phase in workload.phases:
            # A backend in process has no model server, so no response is held.
            if (phase.hold and gateway.in_process) or (has_model and phase is not workload.phases[1]):
                added.append((math.nan, math.nan))
                continue
            httpx.get(f"{null}/hold/{phase.hold}")
            alone = quantiles(load.send(null_port, direct, body, phase))
            start = cpu_seconds(served.pid)
            through = quantiles(load.send(served.port, served.targets, body, phase))
            added.append((through[0] - alone[0], through[1] - alone[1]) if not has_model else (math.nan, math.nan))
            if phase is workload.phases[1]:
                cpu = (cpu_seconds(served.pid) - start) / phase.requests
                kept = (resident_bytes(served.pid) - resident) / sum(p.requests for p in workload.phases[:2])
    httpx.get(f"{null}/hold/0")
    return Measured(cpu=cpu, kept=kept, added=tuple(added))


def median(runs: list[Measured]) -> Measured:
    middle = statistics.median
    added = tuple(
        (middle(p50 for p50, _ in phase), middle(p99 for _, p99 in phase))
        for phase in zip(*(run.added for run in runs), strict=True)
    )
    return Measured(cpu=middle(run.cpu for run in runs), kept=middle(run.kept for run in runs), added=added)


def report(workload: Workload, results: dict[str, Measured]) -> None:
    print(
        f"\n{workload.name}: prompt {workload.prompt} tokens, response {workload.output}; added latency p50 / p99 in ms"
    )
    heads = "".join(f"{phase.name:>20s}" for phase in workload.phases)
    print(f"{'':30s}{'CPU':>9s}{'RAM kept':>12s}{heads}")
    for name, m in results.items():
        cells = "".join(f"{p50 * 1000:11.2f}/{p99 * 1000:8.1f}" for p50, p99 in m.added)
        print(f"{name:30s}{m.cpu * 1000:6.2f} ms{m.kept / 1024:8.1f} KiB{cells}", flush=True)
    peers = {name: m for name, m in results.items() if name in PEERS}
    for name, m in results.items():
        if name in peers:
            continue
        added = m.added[0][0] * 1000
        words = [f"p50 added {added:.2f} ms {verdict(added <= ADDED_MS)} {ADDED_MS:g} ms"]
        for peer, other in peers.items():
            ratio = other.cpu / m.cpu
            target = f" {verdict(ratio >= CPU_RATIO)} 1/{CPU_RATIO}" if peer == "anchor" and "free" in name else ""
            words.append(f"CPU 1/{ratio:.1f} of {peer}'s{target}, RAM 1/{other.kept / max(m.kept, 1):.1f}")
        if "in process" in name and "streamed" not in name and workload.name == "short":
            words.append(f"CPU {m.cpu * 1000:.2f} ms {verdict(m.cpu * 1000 <= CPU_MS)} {CPU_MS:g} ms")
        print(f"  {name:28s}{', '.join(words)}")


def report_client(workload: Workload, null: str) -> None:
    """Print what `VllmBackend` costs without an endpoint."""
    url, sizes = f"{null}/{workload.prompt}/{workload.output}/v1", [workload.prompt, workload.output]
    arguments = [url, *map(str, sizes), str(2 * workload.phases[1].requests)]
    with process([sys.executable, "-m", "tests.bench.vllm_client", *arguments]) as child:
        once, streamed = json.loads(read_line(child))
    print(f"  VllmBackend alone             CPU {once:.2f} ms, streamed {streamed:.2f} ms", flush=True)


def verdict(met: bool) -> str:
    return "meets" if met else "MISSES"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--workload", nargs="+", choices=[w.name for w in WORKLOADS], default=["short", "long"])
    parser.add_argument("--tokenizer", default="smollm2-135m-instruct", help="a model's folder or name")
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=list(PEERS))
    parser.add_argument("--anchor-python", metavar="PATH", help="an interpreter, 3.12 or later, to install it with")
    parser.add_argument("--only", metavar="TEXT", default="", help="only gateways whose name has this in it")
    parser.add_argument("--streams", type=int, metavar="N", help="only N streams at once")
    options = parser.parse_args()
    workloads = [w for w in WORKLOADS if w.name in options.workload]
    if options.quick:
        options.repeats = 1
        workloads = [replace(WORKLOADS[0], phases=(Phase(streams=1, requests=100), Phase(streams=64, requests=320)))]
    real = options.tokenizer
    gateways = [
        *peers([] if options.streams else options.peers, options.anchor_python, real),
        Gateway(name="ours, http, free tokens"),
        Gateway(name="ours, http", tokenizer=real),
        Gateway(name="ours, http, streamed", tokenizer=real, stream=True),
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
        if options.streams:
            report_streams(load, options.streams, gateways, url)
            return
        for workload in workloads:
            runs: dict[str, list[Measured]] = {gateway.name: [] for gateway in gateways}
            for _ in range(options.repeats):
                for gateway in gateways:
                    if gateway.name == "vllm" and workload.name != "short":
                        continue
                    print(f"{workload.name}, {gateway.name} …", file=sys.stderr, flush=True)
                    runs[gateway.name].append(measure(load, gateway, workload, url))
            report(workload, {name: median(some) for name, some in runs.items() if some})
            report_client(workload, url)


def report_streams(load: Load, streams: int, gateways: list[Gateway], null: str) -> None:
    """Print the errors and latencies of ``streams`` requests at once through each gateway with a model server."""
    workload, phase = WORKLOADS[0], Phase(streams=streams, requests=2 * streams, hold=HOLD_SECONDS)
    httpx.get(f"{null}/hold/{phase.hold}")
    print(f"{phase.name}, {phase.requests} requests; latency without the model's {phase.hold:g} s")
    for gateway in gateways:
        if gateway.in_process:
            continue
        with serve(gateway, workload, null) as served:
            start = cpu_seconds(served.pid)
            latencies, errors = load.count(served.port, served.targets, workload.body(gateway.stream), phase)
            cpu = (cpu_seconds(served.pid) - start) / phase.requests
        p50, p99 = (1000 * (seconds - phase.hold) for seconds in quantiles(latencies or [math.nan]))
        text = f"{len(errors)} errors, p50 {p50:.1f} ms, p99 {p99:.1f} ms, CPU {1000 * cpu:.2f} ms"
        print(f"  {gateway.name:28s}{text}{f'; the first error: {errors[0]}' if errors else ''}", flush=True)


def peers(names: list[str], interpreter: str | None, tokenizer: str) -> Generator[Gateway]:
    """The peers that can be installed. vLLM tokenises, the others do not."""
    for name in names:
        try:
            yield Gateway(
                name=name, command=PEERS[name](interpreter), tokenizer=tokenizer if name == "vllm" else "free"
            )
        except SystemExit as error:
            print(f"{name} is left out: {error}")


if __name__ == "__main__":
    main()
