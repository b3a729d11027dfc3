"""CPU time of `VllmBackend` alone, without an endpoint, for the endpoint benchmark.

    python -m tests.bench.vllm_client URL PROMPT OUTPUT REQUESTS

URL is a null model's, with its sizes. Prints a JSON line: milliseconds of CPU per request, unstreamed and streamed, with 64 streams.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time

from lightning_core.backends.backend import SamplingParams
from lightning_core.backends.vllm.backend import VllmBackend
from lightning_core.endpoint.transport.event_loop import new_event_loop
from tests.bench.null_model import tokens

STREAMS = 64


async def send(backend: VllmBackend, prompt: list[int], params: SamplingParams, requests: int, *, stream: bool) -> None:
    numbers = iter(range(requests))

    async def one_after_the_other() -> None:
        for _ in numbers:
            sampled = 0
            async for delta in backend.generate(prompt, params, model="policy", stream=stream):
                sampled += len(delta.token_ids)
            assert sampled == params.max_tokens

    await asyncio.gather(*(one_after_the_other() for _ in range(STREAMS)))


def main() -> None:
    url, *numbers = sys.argv[1:]
    prompt_size, output_size, requests = map(int, numbers)
    backend = VllmBackend(url, model="policy")
    prompt = tokens(prompt_size, 1)
    params = SamplingParams(max_tokens=output_size, stop_token_ids=frozenset({2}))
    cpu = list[float]()
    with asyncio.Runner(loop_factory=lambda: new_event_loop(STREAMS)) as runner:
        for stream in (False, True):
            runner.run(send(backend, prompt, params, STREAMS, stream=stream))
            start = time.process_time()
            runner.run(send(backend, prompt, params, requests, stream=stream))
            cpu.append(1000 * (time.process_time() - start) / requests)
    print(json.dumps(cpu), flush=True)


if __name__ == "__main__":
    main()
