"""Latency of small requests alone and beside a client that sends as much as it may.

    python -m tests.bench.neighbours [--seconds 10] [--repeats 3] [--tokenizer NAME]

The endpoint, the measured clients and the neighbour are three processes. The backend answers at once, so that only the endpoint
is measured. Prints the p50 and p99 of each neighbour, and their ratios to those of the quiet times right before.
"""

from __future__ import annotations

import argparse
import asyncio
import contextvars
import itertools
import json
import random
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from lightning_core import rollout
from lightning_core.backends.backend import Delta, SamplingParams
from lightning_core.chat.chat import Chat
from lightning_core.endpoint.server import PolicyEndpoint, Routing
from tests.bench.http_load import Stream

CLIENTS = 8
"""Measured clients, each a rollout."""
PAUSE_SECONDS = 0.05
"""Between the requests of a client."""
_START_SECONDS = 4.0
"""For which a neighbour makes its requests."""
_VARIANTS = 8
"""Different requests of a neighbour."""
PATH = "/v1/chat/completions"
WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "lazy", "dogs", "while", "programs", "read", "long", "files"]


class ReadyBackend:
    """Answers with the same tokens at once."""

    models = ("policy",)
    max_context = 1 << 22

    def check(self, params: SamplingParams) -> None:
        pass

    async def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, *, model: str, stream: bool = False
    ) -> AsyncGenerator[Delta]:
        del prompt_ids, params, model, stream
        yield Delta(token_ids=[100] * 32, logprobs=[-0.5] * 32, version=0, finish_reason="stop")


def prompt(characters: int) -> dict[str, Any]:
    text, size = list[str](), 0
    while size < characters:
        text.append(random.choice(WORDS))
        size += len(text[-1]) + 1
    return {"model": "policy", "messages": [{"role": "user", "content": " ".join(text)}]}


def stop_strings(count: int) -> dict[str, Any]:
    return {**prompt(100), "stop": [f"stop {i}" for i in range(count)]}


NEIGHBOURS: dict[str, Callable[[], dict[str, Any]]] = {
    "prompts of 200 KB": lambda: prompt(200_000),
    "prompts of 1 MB": lambda: prompt(1_000_000),
    "200,000 stop strings": lambda: stop_strings(200_000),
}


def request_of(port: int, key: str, body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    head = f"POST {PATH} HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\nauthorization: Bearer {key}\r\n"
    return f"{head}content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data


async def connect(port: int) -> Stream:
    _, stream = await asyncio.get_running_loop().create_connection(Stream, "127.0.0.1", port)
    return stream


async def measure(port: int, keys: Sequence[str], seconds: float) -> list[float]:
    """The latencies of the small requests of one client a key."""
    over = time.perf_counter() + seconds

    async def client(place: int, key: str) -> list[float]:
        stream, latencies = await connect(port), list[float]()
        await asyncio.sleep(PAUSE_SECONDS * place / len(keys))
        while time.perf_counter() < over:
            latencies.append(await stream.ask(request_of(port, key, prompt(200))))
            await asyncio.sleep(PAUSE_SECONDS)
        stream.close()
        return latencies

    return sorted(x for some in await asyncio.gather(*(client(i, key) for i, key in enumerate(keys))) for x in some)


async def trouble(port: int, key: str, kind: str) -> None:
    """Send requests of ``kind`` one after the other, for ever. They are made before, since that takes longer than to answer them."""
    stream = await connect(port)
    requests = [request_of(port, key, NEIGHBOURS[kind]()) for _ in range(_VARIANTS)]
    for request in itertools.cycle(requests):
        with suppress(RuntimeError):  # refused
            await stream.ask(request)


def serve(tokenizer: str) -> None:
    from lightning_core.model import source as model

    loaded: Any = model.load_tokenizer(model.resolve_model(tokenizer))
    chat = Chat(loaded)
    routing = Routing(trained=frozenset(), temperature=1.0, max_tokens=32)
    with PolicyEndpoint(ReadyBackend(), chat) as endpoint:
        keys: list[str] = []
        for i in range(CLIENTS + 1):
            # Each in its own context: scopes that are open at the same time must not be nested.
            run = contextvars.copy_context().run(rollout({"id": str(i)}).__enter__)
            keys.append(endpoint.new_key())
            endpoint.open(keys[-1], run.address, routing)
        port = int(endpoint.url.removesuffix("/v1").rpartition(":")[2])
        print(json.dumps({"port": port, "keys": keys}), flush=True)
        sys.stdin.readline()


@contextmanager
def process(*arguments: str) -> Generator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "tests.bench.neighbours", *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        try:
            yield child
        finally:
            child.kill()


def at(latencies: Sequence[float], part: float) -> float:
    """A percentile in milliseconds."""
    return latencies[min(int(len(latencies) * part), len(latencies) - 1)] * 1000


def compare(port: int, keys: Sequence[str], seconds: float, repeats: int) -> None:
    print(f"{'neighbour':22} {'p50 ms':>7} {'p99 ms':>7} {'p50 ratio':>10} {'p99 ratio':>10}   requests")
    *measured, key = keys
    asyncio.run(measure(port, measured, 1.0))
    for kind in NEIGHBOURS:
        quiet, beside = list[float](), list[float]()
        for _ in range(repeats):
            quiet += asyncio.run(measure(port, measured, seconds))
            with process("--trouble", str(port), key, kind):
                time.sleep(_START_SECONDS)
                beside += asyncio.run(measure(port, measured, seconds))
            time.sleep(1.0)
        for name, found in ((f"none, before {kind}", quiet), (kind, beside)):
            found.sort()
            ratios = [at(found, part) / at(quiet, part) for part in (0.5, 0.99)]
            print(
                f"{name[:22]:22} {at(found, 0.5):7.1f} {at(found, 0.99):7.1f} {ratios[0]:10.2f} {ratios[1]:10.2f}   "
                f"{len(found)}",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tokenizer", default="smollm2-135m-instruct", help="a model's folder or name")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--trouble", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.tokenizer)
    elif options.trouble:
        port, key, kind = options.trouble
        asyncio.run(trouble(int(port), key, kind))
    else:
        with process("--serve", "--tokenizer", options.tokenizer) as server:
            assert server.stdout is not None
            started = json.loads(server.stdout.readline())
            compare(started["port"], started["keys"], options.seconds, options.repeats)


if __name__ == "__main__":
    main()
