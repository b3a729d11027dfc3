"""Compares traces → transitions with the adapter of agentlightning 0.3.0, `TracerTraceToTriplet`.

    python -m tests.bench.traces [--calls 1 8 32] [--repeats 15] [--anchor-python PATH | --no-anchor]

Both read the same rollouts of one agent. The first prompt has 1,500 characters and 400 tokens, and each further prompt 1,260 characters
and 228 tokens more. A response has 128 tokens. Each side reads finished spans from its own recorder: ours from the endpoint's,
agentlightning from its AgentOps instrumentation. Variants of ours:

- *transitions*: spans → trace → transitions, as in training, which does not read the messages;
- *rows*: the same, then transitions → rows. The adapter has no counterpart of this step;
- *messages read*: spans → trace → transitions, and the messages and the response of each call are read.

agentlightning records logprobs only if the agent requests them, as JSON text. Ours always records them. Both variants of agentlightning
are measured. The output is CPU time of the measuring thread in microseconds per rollout, minimum / median over the repeats, and the
ratios of both. The two processes alternate. agentlightning is installed into the cache folder on first use. It takes 800 MB: the adapter
imports the package's store and proxy, and LiteLLM.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import random
import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from lightning_core import Row, Transition, reward, rollout, trace_to_transitions, transitions_to_rows
from lightning_core.backends.backend import SamplingParams, sampling_digest
from lightning_core.capture.address import Address
from lightning_core.chat.chat import RenderedPrompt
from lightning_core.dialects.exchange import ChatRequest, Choice
from lightning_core.endpoint.record import CallSpan
from lightning_core.trace import SpanRecord, spans_to_trace
from tests.bench import environment
from tests.bench.processes import process, read_line
from tests.bench.traces_peer import microseconds

PACKAGE = "agentlightning==0.3.0"
ROLLOUTS = 4
AGENT = "writer"
FIRST_CHARACTERS, FIRST_TOKENS = 1500, 400
MORE_CHARACTERS, MORE_TOKENS = 1260, 228
SAMPLED_CHARACTERS, SAMPLED_TOKENS = 660, 128


def make_rollout(calls: int, seed: int) -> list[dict[str, Any]]:
    """Messages, response, token ids and logprobs of each call, as JSON values."""
    rng = random.Random(seed)

    def message(role: str, characters: int) -> dict[str, str]:
        words = (
            f"{rng.choice(('river', 'stone', 'letter', 'window'))}{rng.choice((' ', ', ', '. '))}"
            for _ in range(characters)
        )
        return {"role": role, "content": "".join(words)[:characters]}

    def ids(count: int) -> list[int]:
        return [rng.randrange(49152) for _ in range(count)]

    messages = [message("system", 500), message("user", FIRST_CHARACTERS - 500)]
    prompt = ids(FIRST_TOKENS)
    turns: list[dict[str, Any]] = []
    for _ in range(calls):
        output, response = ids(SAMPLED_TOKENS), message("assistant", SAMPLED_CHARACTERS)
        logprobs = [-rng.expovariate(1.0) for _ in output]
        turns.append(
            {
                "messages": messages,
                "response": response,
                "prompt_ids": prompt,
                "output_ids": output,
                "logprobs": logprobs,
            }
        )
        messages = [*messages, response, message("user", MORE_CHARACTERS - SAMPLED_CHARACTERS)]
        prompt = [*prompt, *output, *ids(MORE_TOKENS - SAMPLED_TOKENS)]
    return turns


def record(turns: Sequence[dict[str, Any]]) -> tuple[SpanRecord, ...]:
    """The rollout's spans, as the endpoint records them."""
    with rollout({"id": "0"}) as run:
        for turn in turns:
            address = Address(rollout=run.rollout, span=run.address.span, agent=AGENT)
            span = CallSpan(address, ChatRequest(model="policy", messages=turn["messages"], body={}), "policy")
            prompt, output, logprobs = turn["prompt_ids"], turn["output_ids"], turn["logprobs"]
            span.sampled(
                RenderedPrompt(ids=tuple(prompt), write=str, context="clean"),
                Choice(message=turn["response"], token_ids=output, logprobs=logprobs, finish_reason="stop"),
                SamplingParams(max_tokens=SAMPLED_TOKENS),
            )
            digest = sampling_digest(
                prompt_ids=prompt, output_ids=output, logprobs=logprobs, temperature=1.0, version=0, constraint=None
            )
            span.trainable(version=0, first_version=None, digest=digest)
            span.end()
        reward(1.0)
    return run.spans


def to_transitions(spans: Sequence[SpanRecord]) -> list[Transition]:
    return trace_to_transitions(spans_to_trace(spans), agents={AGENT})


def to_rows(spans: Sequence[SpanRecord]) -> list[Row]:
    return transitions_to_rows(to_transitions(spans))


def read_messages(spans: Sequence[SpanRecord]) -> tuple[list[Transition], list[Any]]:
    trace = spans_to_trace(spans)
    return trace_to_transitions(trace, agents={AGENT}), [(call.messages, call.response) for call in trace.calls]


OURS: dict[str, Callable[[Sequence[SpanRecord]], object]] = {
    "ours, transitions": to_transitions,
    "ours, rows": to_rows,
    "ours, messages read": read_messages,
}
PEER = {"agentlightning": False, "agentlightning, logprobs": True}


def check(spans: Sequence[SpanRecord], turns: Sequence[dict[str, Any]]) -> None:
    """Raise AssertionError unless the transitions and the messages are those of ``turns``."""
    transitions, texts = read_messages(spans)
    found = [(t.prompt_ids.tolist(), t.output_ids.tolist()) for t in transitions]
    assert found == [(t["prompt_ids"], t["output_ids"]) for t in turns], "other tokens"
    assert texts == [(tuple(t["messages"]), t["response"]) for t in turns], "other messages"
    assert len(to_rows(spans)) == 1, "more than one row"


def report(calls: int, found: dict[str, list[float]]) -> None:
    print(f"\nCalls per rollout: {calls}. Microseconds of CPU per rollout, minimum / median; ratios to agentlightning")
    for name, values in found.items():
        ratios = [
            f"{min(found[peer]) / min(values):5.1f}x /{statistics.median(found[peer]) / statistics.median(values):5.1f}x"
            for peer in PEER
            if name in OURS and peer in found
        ]
        print(
            f"{name:26s}{min(values):10.1f} /{statistics.median(values):10.1f}   {',  with logprobs '.join(ratios)}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--anchor-python", metavar="PATH", help="an interpreter, 3.10 or later, to install it with")
    parser.add_argument("--no-anchor", action="store_true")
    options = parser.parse_args()
    rollouts = {calls: [make_rollout(calls, seed) for seed in range(ROLLOUTS)] for calls in options.calls}
    inputs = {calls: [record(turns) for turns in some] for calls, some in rollouts.items()}
    for calls, some in rollouts.items():
        for spans, turns in zip(inputs[calls], some, strict=True):
            check(spans, turns)
    print(f"Python {platform.python_version()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    with ExitStack() as stack:
        peer: Any = None
        if not options.no_anchor:
            agl = environment.install(PACKAGE, "agl", oldest=(3, 10), interpreter=options.anchor_python)
            script = Path(__file__).with_name("traces_peer.py")
            peer = stack.enter_context(process([str(agl.with_name("python")), str(script)]))
            print(json.dumps(rollouts), file=peer.stdin, flush=True)
        del rollouts
        gc.collect()
        gc.freeze()
        for calls in options.calls:
            found: dict[str, list[float]] = {name: [] for name in [*(PEER if peer else ()), *OURS]}
            for _ in range(options.repeats):
                for name in found:
                    if name in OURS:
                        found[name].append(microseconds(OURS[name], inputs[calls]))
                        continue
                    print(json.dumps({"calls": calls, "logprobs": PEER[name]}), file=peer.stdin, flush=True)
                    found[name].append(float(read_line(peer)))
            report(calls, found)


if __name__ == "__main__":
    main()
