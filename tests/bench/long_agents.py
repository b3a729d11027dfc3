"""Measures what conversations of long agents take: memory and bytes of the store for each token, and CPU for each turn.

    python -m tests.bench.long_agents [--turns 25 50 100 200] [--tokenizer NAME]

The endpoint runs in a process of its own, with a real tokenizer and a backend in that process that makes its responses. A client in
another process sends the whole conversation in each turn, as an agent does: paragraphs of this repository's documentation, some of them in
other alphabets, of which the model answers a third. Two runs:

- memory: bytes that `tracemalloc` finds in the endpoint's process after a turn, less those before the first one, while the rollout is open.
  *spans* were allocated by the modules that record calls, *index* by `lightning_core.chat`, which finds the calls that a prompt continues;
  the rest are connections and caches. The store is a file with this rollout alone, less an empty one;
- CPU: user and system time of the endpoint's process for each of the last five turns: HTTP, JSON, rendering, tokenising and recording.
  Below it, the parts of it: the time of the functions in `PHASES`, each without the others in it; *HTTP and the loop* is the rest.

With ``--template NAME``, the tokenizer has that chat template of `tests.chat.native_templates`, and each response calls a tool.

At the end, the memory that a rollout with one request of 8,192 and 512 tokens keeps. Nothing else should run: the CPU is not a median.
"""

from __future__ import annotations

import argparse
import contextvars
import functools
import gc
import importlib
import json
import os
import platform
import random
import sys
import tempfile
import threading
import time
import tracemalloc
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from lightning_core import rollout
from lightning_core.backends.backend import Delta, SamplingParams
from lightning_core.capture import ActiveRollout
from lightning_core.chat.chat import Chat
from lightning_core.endpoint.server import PolicyEndpoint, Routing
from lightning_core.records.store import RolloutRecord, Store
from lightning_core.trace import SpanRecord
from tests.bench import our_gateway
from tests.bench.processes import process, read_line
from tests.chat import native_templates

DOCS = Path(__file__).parents[2] / "docs"
OTHER_ALPHABETS = (
    "Le modèle a répondu à la question, mais l’évaluation n’a pas encore été enregistrée.",
    "Модель ответила на вопрос, но оценка ещё не записана.",
    "模型已经回答了这个问题，但评分尚未记录。",
    "モデルは質問に答えましたが、評価はまだ記録されていません。",
)
LONG = 8
"""Rollouts with one long request."""
MEASURED = 5
"""Turns that the CPU is a mean of."""
WARM = 5
"""Turns before the first measurement, in a rollout of their own."""
ASKED, ANSWERED = 505, 250
"""Tokens of a turn, without those of the template."""


TOOL: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": "read",
        "description": "Reads a page.",
        "parameters": {"type": "object", "properties": {"page": {"type": "string"}}, "required": ["page"]},
    },
}
MODEL = "the benchmark's model"
"""The part of a turn in which the backend makes its response, which is no work of the endpoint."""
PHASES: Sequence[tuple[str, str, str]] = (
    ("JSON of the request", "lightning_core.endpoint.request", "read_json"),
    ("its digest", "lightning_core.endpoint.request", "RequestHandler._parse"),
    ("agent and route", "lightning_core.endpoint.respond", "Responder._decide"),
    ("fields", "lightning_core.endpoint.respond", "Responder._parse"),
    ("span", "lightning_core.endpoint.record", "CallSpan.__init__"),
    ("span", "lightning_core.endpoint.record", "CallSpan.sampled"),
    ("continuation", "lightning_core.chat.history.places", "Memory.find"),
    ("rendering", "lightning_core.chat.history.outline", "Outlines.write"),
    ("tokenizing", "lightning_core.chat.encoding", "Encoder.encode"),
    ("prompt", "lightning_core.endpoint.respond", "Responder._prepare"),
    ("response and record", "lightning_core.endpoint.sample", "Sampler._finish"),
    ("response and record", "lightning_core.dialects.openai_chat", "write_response"),
    (MODEL, "__main__", "Backend.response"),
)
"""Names of parts of a turn, and the functions whose time they are."""


class Phases:
    """Measures the CPU time of `PHASES`, each function without those that it calls."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys((name for name, _, _ in PHASES), 0.0)
        self._threads: dict[int, list[float]] = {}
        """For each thread, the time of inner functions, for each function that is being called."""
        for name, module, path in PHASES:
            owner: Any = importlib.import_module(module)
            *outer, last = path.split(".")
            for part in outer:
                owner = getattr(owner, part)
            setattr(owner, last, self._timed(name, getattr(owner, last)))

    def _timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            inner = self._threads.setdefault(threading.get_ident(), [])
            inner.append(0.0)
            start = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                used = time.thread_time() - start
                self.seconds[name] += used - inner.pop()
                if inner:
                    inner[-1] += used

        return call


def load_tokenizer(name: str, template: str | None) -> Any:
    """The tokenizer, with a chat template of `native_templates` if there is one."""
    loaded = our_gateway.load_tokenizer(name, 0)
    if template is not None:
        loaded.chat_template = native_templates.family(template).source
    return loaded


def paragraphs() -> Iterator[str]:
    """Texts without end, in the same order in each process."""
    rng = random.Random(0)
    known = [p for page in sorted(DOCS.rglob("*.md")) for p in page.read_text("utf-8").split("\n\n")]
    while True:
        rng.shuffle(known)
        for number, paragraph in enumerate(known):
            yield f"{paragraph}\n\n{rng.choice(OTHER_ALPHABETS)}" if number % 20 == 0 else paragraph


class Texts:
    """Texts of a number of tokens."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._paragraphs = paragraphs()
        self._ids: list[int] = []

    def take(self, tokens: int) -> tuple[str, list[int]]:
        while len(self._ids) < tokens:
            self._ids += self._tokenizer.encode(f"{next(self._paragraphs)}\n\n", add_special_tokens=False)
        taken, self._ids = self._ids[:tokens], self._ids[tokens:]
        return self._tokenizer.decode(taken, skip_special_tokens=False), taken


class Backend:
    """Responses of ``max_tokens`` tokens, with the token that ends them."""

    models = ("policy",)
    max_context = 1 << 20

    def __init__(self, texts: Texts, tokenizer: Any, *, calls: bool) -> None:
        self._texts = texts
        self._tokenizer = tokenizer
        self._calls = calls
        self._rng = random.Random(1)

    def check(self, params: SamplingParams) -> None:
        pass

    async def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, *, model: str, stream: bool = False
    ) -> AsyncGenerator[Delta]:
        ids = [*self.response(params.max_tokens - 1), min(params.stop_token_ids)]
        logprobs = [-self._rng.expovariate(2.0) for _ in ids]
        yield Delta(token_ids=ids, logprobs=logprobs, version=0, finish_reason="stop")

    def response(self, tokens: int) -> list[int]:
        """The ids of a response."""
        text, ids = self._texts.take(tokens)
        if self._calls:
            call = json.dumps({"name": "read", "arguments": {"page": text}}, ensure_ascii=False)
            ids = self._tokenizer.encode(f"<tool_call>\n{call}\n</tool_call>", add_special_tokens=False)
        return ids


def store_bytes(spans: Sequence[SpanRecord], run: ActiveRollout) -> int:
    """What a store has for one rollout, less an empty one."""
    sizes: list[int] = []
    for stored in ((), spans):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "store.db"
            with Store(path) as store:
                if stored:
                    record = RolloutRecord(
                        id=run.rollout, step=1, task_id="t", phase="train", attempt=0, status="ok", reward=1.0, error=None,
                        version=0, started_ns=0, ended_ns=1,
                    )  # fmt: skip
                    store.add_rollout(record, stored)
            sizes.append(path.stat().st_size)
    return sizes[1] - sizes[0]


SPANS = ("content/shared_content.py", "content/token_tree.py", "content/packing.py", "capture/call_spans.py",
         "capture/run.py", "capture/spans.py", "capture/span_ids.py", "endpoint/record.py", "lightning_core/trace.py")  # fmt: skip


def held() -> Mapping[str, int]:
    """The bytes that Python objects and arrays hold, by the part that allocated them."""
    parts = {"total": 0, "spans": 0, "index": 0}
    for found in tracemalloc.take_snapshot().statistics("filename"):
        name = found.traceback[0].filename
        parts["total"] += found.size
        parts["spans"] += found.size * name.endswith(SPANS)
        parts["index"] += found.size * ("lightning_core/chat/" in name)
    return parts


def serve(tokenizer: str, template: str | None, *, memory: bool) -> None:
    """Serve until stdin is closed; print a measurement for each line, which is the number of a rollout."""
    loaded = load_tokenizer(tokenizer, template)
    phases = None if memory else Phases()
    routing = Routing(trained=frozenset(), temperature=1.0, max_tokens=1024)
    backend = Backend(Texts(loaded), loaded, calls=template is not None)
    with PolicyEndpoint(backend, Chat(loaded)) as endpoint:
        runs = [
            contextvars.copy_context().run(rollout({"id": str(i)}, strict=False).__enter__) for i in range(2 + LONG)
        ]
        keys = [endpoint.new_key() for _ in runs]
        for run, key in zip(runs, keys, strict=True):
            endpoint.open(key, run.address, routing)
        print(json.dumps({"url": endpoint.url, "keys": keys}), flush=True)
        for line in sys.stdin:
            asked = time.process_time()
            gc.collect()
            if memory and not tracemalloc.is_tracing():
                tracemalloc.start()
            run = runs[int(line)]
            calls = run.trace.calls[-1:] if not memory else ()
            found: dict[str, Any] = {
                "asked": asked,
                "held": held() if memory else {},
                "store": store_bytes(run.spans, run) if memory and run.spans else 0,
                "context": [call.context for call in calls],
                "phases": {} if phases is None else phases.seconds,
            }
            # What measuring itself takes is between the two.
            print(json.dumps(found | {"answered": time.process_time()}), flush=True)


class Agent:
    """A client that sends its whole conversation in each turn."""

    def __init__(self, url: str, key: str, texts: Texts, *, tools: bool) -> None:
        self._url, self._key, self._texts, self._tools = url, key, texts, tools
        self._messages: list[Any] = [{"role": "system", "content": "You maintain this repository."}]
        self.tokens = 0

    def turn(self, asked: int = ASKED, answered: int = ANSWERED) -> None:
        calls = self._messages[-1].get("tool_calls")
        sender = {"role": "tool", "tool_call_id": calls[0]["id"]} if calls else {"role": "user"}
        self._messages.append({**sender, "content": self._texts.take(asked)[0]})
        body: dict[str, Any] = {"model": "policy", "messages": self._messages, "max_tokens": answered}
        if self._tools:
            body["tools"] = [TOOL]
        answer = httpx.post(
            f"{self._url}/chat/completions", json=body, headers={"authorization": f"Bearer {self._key}"}, timeout=600
        )
        answer.raise_for_status()
        self._messages.append(answer.json()["choices"][0]["message"])
        self.tokens = int(answer.json()["usage"]["total_tokens"])


def measure(
    tokenizer: str, template: str | None, turns: Sequence[int], *, memory: bool
) -> Iterator[tuple[int, int, Mapping[str, Any], Mapping[str, Any]]]:
    """The turn, the tokens of the conversation, and two measurements: for memory at the start and now, for CPU of the last five turns.

    The last one is of the long requests: turn 0.
    """
    texts = Texts(load_tokenizer(tokenizer, None))
    command = [sys.executable, "-m", "tests.bench.long_agents", "--tokenizer", tokenizer]
    command += ["--template", template] if template else []
    with process([*command, "--serve", "memory" if memory else "cpu"]) as child:
        ready = json.loads(read_line(child))

        def ask(number: int) -> Mapping[str, Any]:
            print(number, file=child.stdin, flush=True)
            return json.loads(read_line(child))

        ask(0)
        warm, agent, *others = (Agent(ready["url"], key, texts, tools=template is not None) for key in ready["keys"])
        for _ in range(WARM):
            warm.turn()
        before = ask(0)
        for turn in range(1, max(turns) + 1):
            if not memory and turn + MEASURED - 1 in turns:
                before = ask(1)
            agent.turn()
            if turn in turns:
                yield turn, agent.tokens, before, ask(1)
        before = ask(2)
        for other in others:
            other.turn(8192, 512)
        yield 0, others[0].tokens, before, ask(2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, nargs="+", default=[25, 50, 100, 200])
    parser.add_argument("--tokenizer", default="smollm2-135m-instruct", help="a model's folder or name")
    parser.add_argument("--template", help="the chat template, of an agent with tools")
    parser.add_argument("--only", choices=["memory", "cpu"], help="one of the two runs")
    parser.add_argument("--serve", choices=["memory", "cpu"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve is not None:
        return serve(options.tokenizer, options.template, memory=options.serve == "memory")
    print(
        f"Python {platform.python_version()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, {options.tokenizer}"
    )
    if options.only != "cpu":
        print_memory(options)
    if options.only != "memory":
        print_cpu(options)
    return None


def print_memory(options: argparse.Namespace) -> None:
    print(f"{'turns':>6s}{'tokens':>9s}{'RAM':>24s}{'spans':>24s}{'index':>24s}{'store.db':>24s}", flush=True)
    for turn, tokens, before, after in measure(options.tokenizer, options.template, options.turns, memory=True):
        shared = LONG if turn == 0 else 1
        parts = [(after["held"][part] - before["held"][part]) / shared for part in ("total", "spans", "index")]
        cells = "".join(f"{size / 1024:10.1f} KiB{size / tokens:6.1f} B/t" for size in (*parts, after["store"]))
        print(f"{turn or 'one':>6}{tokens:9d}{cells}", flush=True)


def print_cpu(options: argparse.Namespace) -> None:
    for turn, tokens, before, after in measure(options.tokenizer, options.template, options.turns, memory=False):
        if not turn:
            continue
        used = (after["asked"] - before["answered"]) / MEASURED * 1000
        print(f"{turn:6d}{tokens:9d}{used:9.2f} ms of CPU a turn, {', '.join(after['context'])}")
        phases = {name: (after["phases"][name] - before["phases"][name]) / MEASURED * 1000 for name in after["phases"]}
        phases["HTTP and the loop"] = used - sum(phases.values())
        print("".join(f"{time_:24.2f} ms {name}\n" for name, time_ in phases.items()), end="")
        rest = used - phases["tokenizing"] - phases[MODEL]
        print(f"{rest:24.2f} ms without tokenizing and {MODEL}", flush=True)


if __name__ == "__main__":
    main()
