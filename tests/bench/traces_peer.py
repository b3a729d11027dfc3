"""The adapter of agentlightning 0.3.0, for the traces benchmark. Runs in that package's environment and imports nothing of ours.

    python tests/bench/traces_peer.py

The first line of stdin is a JSON object of rollouts: ``{calls: [[turn, …], …]}``. Each further line is a measurement to make:
``{"calls": …, "logprobs": …}``. The response is one line with the microseconds of CPU per rollout.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

SECONDS = 0.15


def microseconds(work: Callable[[Any], object], inputs: Sequence[Any]) -> float:
    """CPU time of this thread per input, measured over at least SECONDS of CPU time."""
    work(inputs[0])
    done = 0
    start = time.thread_time()
    while (spent := time.thread_time() - start) < SECONDS:
        for one in inputs:
            work(one)
        done += len(inputs)
    return spent / done * 1e6


class Peer:
    """The adapter, and spans as its tracer records them."""

    def __init__(self) -> None:
        os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # no download at import
        self.span: Any = importlib.import_module("agentlightning.types").Span
        self.adapter: Any = importlib.import_module("agentlightning.adapter").TracerTraceToTriplet()
        self._completion: Any = importlib.import_module("openai.types.chat").ChatCompletion
        importlib.import_module("agentlightning.instrumentation.agentops").instrument_agentops()
        self._chat: Any = importlib.import_module("agentops.instrumentation.providers.openai.wrappers.chat")
        self._reward: Any = importlib.import_module("agentlightning.emitter.reward").emit_reward

    def spans(self, turns: list[Any], logprobs: bool) -> list[Any]:
        """A root, one child per call, and a reward."""
        times = iter(range(1, 2 * len(turns) + 3))
        trace = f"{1:032x}"

        def make(name: str, attributes: Any, parent: str | None, start: float, end: float) -> Any:
            return self.span.from_attributes(
                rollout_id="rollout", attempt_id="attempt", sequence_id=int(start), trace_id=trace, span_id=f"{int(start) + 1:016x}",
                parent_id=parent, name=name, attributes=attributes, start_time=float(start), end_time=float(end),
            )  # fmt: skip

        root = make("rollout.session", {}, None, 0, 2 * len(turns) + 3)
        calls = [
            make("openai.chat.completion", self._attributes(i, turn, logprobs), root.span_id, next(times), next(times))
            for i, turn in enumerate(turns)
        ]
        reward = self._reward(1.0, propagate=False)
        return [root, *calls, make(reward.name, reward.attributes, root.span_id, next(times), next(times))]

    def _attributes(self, index: int, turn: Any, logprobs: bool) -> Any:
        ids = turn["output_ids"]
        tokens = [{"token": f"word{i}", "logprob": v, "bytes": list(f"word{i}".encode()), "top_logprobs": []}
                  for i, v in zip(ids, turn["logprobs"], strict=True)]  # fmt: skip
        choice: dict[str, Any] = {"index": 0, "finish_reason": "stop", "message": turn["response"], "token_ids": ids}
        if logprobs:
            choice["logprobs"] = {"content": tokens, "refusal": None}
        usage = {"prompt_tokens": len(turn["prompt_ids"]), "completion_tokens": len(ids), "total_tokens": 0}
        response = self._completion.model_validate({
            "id": f"chatcmpl-{index}", "object": "chat.completion", "created": 0, "model": "policy", "usage": usage,
            "choices": [choice], "prompt_token_ids": turn["prompt_ids"],
        })  # fmt: skip
        request = {"model": "policy", "messages": turn["messages"], "temperature": 1.0}
        return self._chat.handle_chat_attributes(kwargs=request, return_value=response)

    def check(self, spans: list[Any], turns: list[Any]) -> None:
        """Raise AssertionError unless the adapter finds each call's tokens, and the reward."""
        triplets = self.adapter.adapt(spans)
        found = [(t.prompt["token_ids"], t.response["token_ids"]) for t in triplets]
        assert found == [(t["prompt_ids"], t["output_ids"]) for t in turns], "other tokens"
        assert [t.reward for t in triplets] == [None] * (len(turns) - 1) + [1.0], "other rewards"


def main() -> None:
    peer = Peer()
    rollouts: dict[str, list[Any]] = json.loads(sys.stdin.readline())
    inputs: dict[tuple[str, bool], list[Any]] = {}
    for calls, some in rollouts.items():
        for logprobs in (False, True):
            inputs[calls, logprobs] = [peer.spans(turns, logprobs) for turns in some]
            for spans, turns in zip(inputs[calls, logprobs], some, strict=True):
                peer.check(spans, turns)
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        order = json.loads(line)
        print(microseconds(peer.adapter.adapt, inputs[str(order["calls"]), order["logprobs"]]), flush=True)


if __name__ == "__main__":
    main()
