"""Counts what `lightning-rl serve` with recording loses under load: `python -m tests.bench.load`.

    python -m tests.bench.load [--minutes 10] [--clients 32] [--run FOLDER] [--keep FOLDER]

A provider, the server and the clients are processes of their own. Without --run the server is a switch of two models; shares are promoted,
rolled back and reloaded while clients send conversations in three wire formats, whole and streamed, leave some in the middle, and give
feedback. At the end the server gets SIGTERM with requests in progress. With --run it is a plain server of this run. Prints the requests by
outcome, and those that are missing in the record, or failed although the provider answered; the exit code is 1 if there are any.
--keep: the folder for what the server writes.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import re
import signal
import sqlite3
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from time import monotonic
from typing import Any

import httpx
import numpy as np

from lightning_core.errors import plural
from lightning_core.otel import read_traces
from lightning_core.trace import Call
from tests.bench.load.clients import AGENTS, FORMATS, Load, Sent
from tests.bench.load.provider import cuts, number_of, refuses
from tests.bench.processes import process, read_line, resident_bytes

PROBES = 100
"""Requests that measure the latency before the load, to the provider and to the server in turn."""


ORDERS: Sequence[dict[str, Any]] = (
    {"promote": "new"},
    {"rollback": True},
    {"arms": {"old": 0.3, "new": 0.7}},
    {"reload": True},
)


def plan_of(provider: str, folder: Path, models: Sequence[str], place: int = 0) -> str:
    """The plan of a switch whose models are all at ``provider``; another ``place`` there replaces them all."""
    named = {name: {"base_url": f"{provider}/{place}/v1", "model": name} for name in models}
    agents = {name: {"arms": {"old": 0.5, "new": 0.5}, "fallback": "old"} for name in AGENTS}
    return json.dumps({"models": named, "agents": agents, "folder": str(folder)})  # which is YAML


async def probe(urls: Sequence[str], model: str) -> list[list[float]]:
    """Seconds of requests that are answered at once, of each URL."""
    found: list[list[float]] = [[] for _ in urls]
    body = {"model": model, "messages": [{"role": "user", "content": "at once"}], "max_tokens": 1}
    async with httpx.AsyncClient(trust_env=False, headers={"lightning-agent": "writer"}) as http:
        for _ in range(PROBES):
            for url, seconds in zip(urls, found, strict=True):
                began = monotonic()
                (await http.post(f"{url}/chat/completions", json=body)).raise_for_status()
                seconds.append(monotonic() - began)
    return found


async def change(url: str, provider: str, plan: Path, folder: Path, load: Load, pause: float) -> int:
    """Change shares and models until the load ends; return the number of changes."""
    models = itertools.cycle((["old", "new", "third"], ["old", "new"]))
    done = 0
    async with httpx.AsyncClient(timeout=60, trust_env=False) as http:
        while True:
            await asyncio.sleep(pause)
            if load.ended:
                return done
            order, path = ORDERS[done % len(ORDERS)], f"switch/{AGENTS[done // 4 % 2]}"
            if "reload" in order:
                plan.write_text(plan_of(provider, folder, next(models), place=done))
                path = "switch"
            try:
                response = await http.post(f"{url}/{path}", json=order)
            except httpx.TransportError:
                if load.ending:
                    return done
                raise
            assert response.status_code == 200 or load.ending, response.text
            done += 1


async def send(
    load: Load, options: argparse.Namespace, server: subprocess.Popen[str], changing: bool, where: Sequence[Path | str]
) -> int:
    """Send the load, then SIGTERM; return the number of changes."""
    seconds, memory = options.minutes * 60, list[int]()
    provider, plan, folder = where
    running: list[asyncio.Task[Any]] = [asyncio.create_task(load.run(options.clients))]
    if changing:
        running.append(
            asyncio.create_task(change(load.url, str(provider), Path(plan), Path(folder), load, min(5.0, seconds / 8)))
        )
    for place in range(3):  # after a twentieth of the time, so that everything is loaded
        await asyncio.sleep(seconds / 20 if place == 0 else seconds * 19 / 40)
        memory.append(resident_bytes(server.pid))
    for task in running:
        if task.done():
            await task
    began, load.ending = monotonic(), True
    server.send_signal(signal.SIGTERM)
    await asyncio.sleep(0.5)
    load.ended = True
    _, *changes = await asyncio.gather(*running)
    await asyncio.to_thread(server.wait, 60)
    print(
        "resident memory "
        + ", ".join(
            f"{bytes_ / 1e6:.1f} MB {when}"
            for bytes_, when in zip(memory, ("at the start", "in the middle", "at the end"), strict=True)
        )
    )
    print(f"shutdown with requests in progress: {monotonic() - began:.1f} s, exit code {server.returncode}")
    return sum(changes)


def read_recorded(traces: Path) -> tuple[dict[int, list[Call]], int]:
    """The recorded calls by the number of their request, and the number of rewards."""
    calls: dict[int, list[Call]] = defaultdict(list)
    rewards = 0
    for trace in read_traces(traces):
        rewards += len(trace.rewards)
        for call in trace.calls:
            calls[number_of(call.messages[-1]["content"])].append(call)
    return calls, rewards


def _lack(one: Sent, calls: Sequence[Call]) -> str | None:
    if not one.ending:
        if one.outcome == "not accepted":
            return f"while the server ran: {one.reason}"
        if one.outcome == "failed" and not refuses(one.number):
            return f"not as the provider answered: {one.reason}"
        if one.outcome == "cut" and not (one.streamed and cuts(one.number)):
            return f"which the provider did not do: {one.reason}"
    if one.outcome in ("left early", "not accepted"):  # perhaps before the server had it
        return None
    if not calls:
        return "not recorded"
    texts = [None if call.response is None else call.response.get("content") for call in calls]
    errors = [call.error or "" for call in calls if call.response is None]
    if one.outcome == "answered" and one.text not in texts:
        return f"with {texts[0]!r}" if texts[0] else f"without its response: {errors}"
    if one.outcome in ("failed", "cut") and not errors:
        return "recorded without its error"
    if one.outcome == "cut" and any("client" in error for error in errors):
        return f"recorded as the client's doing: {errors}"
    return None


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--run", help="serve this run, or this model, instead of a switch")
    parser.add_argument("--keep", type=Path)
    options = parser.parse_args()
    with ExitStack() as stack:
        home = options.keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        home.mkdir(parents=True, exist_ok=True)
        provider = read_line(stack.enter_context(process([sys.executable, "-m", "tests.bench.load.provider"])))
        plan, folder, traces = home / "plan.yaml", home / "switch", home / "traces"
        plan.write_text(plan_of(provider, folder, ["old", "new"]))
        command = [sys.executable, "-m", "lightning_core.tools.cli.main", "serve", options.run or str(plan)]
        log = home / "server.log"
        with log.open("w") as sink:
            server = subprocess.Popen(
                [*command, "--port", "0", "--record", str(traces)], stdout=sink, stderr=sink, text=True
            )
        stack.callback(server.kill)
        url = _url(log, server)
        model = "policy" if options.run else "gpt"
        times = asyncio.run(probe([f"{provider}/v1", url] if not options.run else [url], model))
        load = Load(url=url, with_feedback=not options.run, model=model)
        changes = asyncio.run(send(load, options, server, not options.run, (provider, plan, folder)))
        quantiles = [np.percentile(one, (50, 99)) * 1e3 for one in times]
        if len(quantiles) == 2:
            added = quantiles[1] - quantiles[0]
            print(f"latency added to one client: p50 {added[0]:.1f} ms, p99 {added[1]:.1f} ms")
        return report(load, traces, None if options.run else folder, log, changes)


def report(load: Load, traces: Path, folder: Path | None, log: Path, changes: int) -> int:
    """Print the counts; return the exit code."""
    outcomes = Counter(one.outcome for one in load.sent)
    p50, p99 = np.percentile([one.seconds for one in load.sent if one.outcome == "answered"], (50, 99)) * 1e3
    print(f"latency under load: p50 {p50:.0f} ms, p99 {p99:.0f} ms")
    print(
        f"requests sent {len(load.sent)}: " + ", ".join(f"{number} {name}" for name, number in outcomes.most_common())
    )
    for reason, number in Counter(re.sub(r"\d+", "N", one.reason) for one in load.sent if one.reason).most_common(5):
        print(f"  {number} {reason}")
    calls, rewards = read_recorded(traces)
    recorded, probes = sum(map(len, calls.values())), len(calls.pop(-1, ()))
    again = recorded - probes - len(calls)
    print(f"recorded calls {recorded}: {probes} probes, {len(calls)} requests, {again} again, by the fallback")
    absent = Counter(one.outcome for one in load.sent if one.number not in calls)
    print("requests without a record: " + (", ".join(f"{number} {name}" for name, number in absent.items()) or "none"))
    lost = Counter(f"{one.outcome}: {lack}" for one in load.sent if (lack := _lack(one, calls.get(one.number, ()))))
    before = [one for one in load.sent if not one.ending]
    kinds = Counter((one.path, one.streamed) for one in before if one.outcome == "answered")
    lost |= Counter({
        "kinds of request without an answer": 2 * len(FORMATS) - len(kinds),
        "answers fewer than three in four": len(before) * 3 // 4 - kinds.total(),
    })  # fmt: skip
    print(f"changes {changes}, feedback accepted {load.feedback}, rewards in the traces {rewards}")
    if folder is not None:
        with closing(sqlite3.connect(folder / "switch.db")) as database:
            rows, stored = (
                database.execute(f"SELECT count(*) FROM {table}").fetchone()[0] for table in ("calls", "feedback")
            )
        print(f"rows in switch.db: {rows} calls, {stored} feedback")
        lost |= Counter({
            "kinds of change not made": len(ORDERS) - changes,
            "feedback never accepted": int(not load.feedback),
            "calls in only one of the traces and switch.db": abs(rows - recorded),
            "feedback not in switch.db": load.feedback - stored,
            "feedback not in the traces": load.feedback - rewards,
        })  # fmt: skip
    print(f"server: {log.read_text().strip().splitlines()[-2:]}")
    lost |= Counter({"errors of the server": log.read_text().count("Traceback")})
    lost = +lost
    for reason, number in lost.most_common():
        print(f"LOST {number} {reason}")
    print(f"difference {lost.total()}: {plural(lost.total(), 'request')} not recorded as the client saw it")
    return 1 if lost else 0


def _url(log: Path, server: subprocess.Popen[str]) -> str:
    while server.poll() is None:
        if found := re.search(r"(http://127\.0\.0\.1:\d+)", log.read_text()):
            return f"{found[1]}/v1"
        asyncio.run(asyncio.sleep(0.1))
    raise RuntimeError(f"the server did not start: {log.read_text()[-2000:]}")


if __name__ == "__main__":
    sys.exit(main())
