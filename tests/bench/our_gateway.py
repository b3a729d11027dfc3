"""Our endpoint in a separate process, for the endpoint benchmark.

    python -m tests.bench.our_gateway ROLLOUTS TOKENIZER [--upstream URL] --tokens PROMPT OUTPUT

Prints a JSON line, ``{"port": …, "keys": […]}``, with a key for each open rollout. Serves until stdin is closed.
"""

from __future__ import annotations

import argparse
import contextvars
import json
import sys
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from lightning_core import rollout
from lightning_core.backends.backend import Delta, SamplingParams
from lightning_core.backends.scripted import ByteTokenizer
from lightning_core.backends.vllm.backend import VllmBackend
from lightning_core.chat.chat import Chat
from lightning_core.endpoint.server import PolicyEndpoint, Routing
from tests.bench.null_model import logprobs_of, tokens
from tests.bench.processes import raise_file_limit


class ReadyBackend:
    """The same tokens without a server, to measure the endpoint alone."""

    models = ("policy",)
    max_context = 1 << 20

    def __init__(self, size: int) -> None:
        self._ids = tokens(size, 2)
        self._logprobs = logprobs_of(self._ids)

    def check(self, params: SamplingParams) -> None:
        pass

    async def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, *, model: str, stream: bool = False
    ) -> AsyncGenerator[Delta]:
        del prompt_ids, model
        ids = [*self._ids[:-1], min(params.stop_token_ids)]
        if not stream:
            yield Delta(token_ids=ids, logprobs=self._logprobs, version=0, finish_reason="stop")
            return
        last = len(ids) - 1
        for i, (token, logprob) in enumerate(zip(ids, self._logprobs, strict=True)):
            reason = "stop" if i == last else None
            yield Delta(token_ids=[token], logprobs=[logprob], version=0, finish_reason=reason)


class FreeTokenizer(ByteTokenizer):
    """Costs nothing: every long text has the same ``size`` tokens. For the anchor, the model server tokenises."""

    def __init__(self, size: int) -> None:
        self._ids = tokens(size, 1)

    def encode(self, text: str, **options: Any) -> list[int]:
        return list(self._ids) if len(text) > len(self._ids) else super().encode(text, **options)

    def decode(self, token_ids: list[int], **options: Any) -> str:
        return "word " * len(token_ids) if len(token_ids) > 1 else super().decode(token_ids, **options)


def load_tokenizer(name: str, size: int) -> Any:
    if name == "free":
        return FreeTokenizer(size)
    from lightning_core.model import source as model

    return model.load_tokenizer(model.resolve_model(name))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("rollouts", type=int)
    parser.add_argument("tokenizer")
    parser.add_argument("--upstream")
    parser.add_argument("--tokens", nargs=2, type=int, required=True)
    options = parser.parse_args()
    raise_file_limit()
    prompt_size, output_size = options.tokens
    backend = VllmBackend(options.upstream, model="policy") if options.upstream else ReadyBackend(output_size)
    routing = Routing(trained=frozenset(), temperature=1.0, max_tokens=output_size)
    with PolicyEndpoint(backend, Chat(load_tokenizer(options.tokenizer, prompt_size))) as endpoint:
        runs = [
            # Each in its own context: scopes that are open at the same time must not be nested.
            contextvars.copy_context().run(rollout({"id": str(i)}).__enter__)
            for i in range(options.rollouts)
        ]
        keys = [endpoint.new_key() for _ in runs]
        for run, key in zip(runs, keys, strict=True):
            endpoint.open(key, run.address, routing)
        port = int(endpoint.url.removesuffix("/v1").rpartition(":")[2])
        print(json.dumps({"port": port, "keys": keys}), flush=True)
        sys.stdin.readline()


if __name__ == "__main__":
    main()
