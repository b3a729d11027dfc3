"""Constraints of `SamplingParams` as a vLLM server understands them.

The server masks logits before it computes the processed logprobs, so these are normalized over the allowed tokens. Its backend
``guidance`` is the automaton of the trainer (llguidance), but allows only the tokenizer's end token after a response. So the stop
tokens are a part of the grammar here. tests/vllm compares the logprobs with those that the trainer computes.
"""

from __future__ import annotations

import json
from typing import Any

from lightning_core.backends.backend import SamplingParams
from lightning_core.chat.output_grammar import COMPACT

SERVER_ARGUMENTS = {"--structured-outputs-config": json.dumps({"backend": "guidance"})}
"""The arguments of a server that can follow constraints."""


def structured_outputs(params: SamplingParams) -> dict[str, Any] | None:
    """The field of a request that constrains the response as ``params`` do; None if they do not."""
    if params.grammar is not None:
        rules = params.grammar.split("\n")
    elif params.json_schema is not None:
        rules = [f"start: %json {json.dumps({**json.loads(params.json_schema), 'x-guidance': COMPACT})}"]
    else:
        return None
    stops = " | ".join(f"<[{token}]>" for token in sorted(params.stop_token_ids))
    named = [f"response{rule.removeprefix('start')}" if rule.startswith("start: ") else rule for rule in rules]
    return {"grammar": "\n".join([f"start: response ({stops})", *named])}


def follows_constraints(config: Any) -> bool:
    """Whether a server with the configuration ``config`` follows them from the first token on, with the trainer's automaton."""
    settings = config.get("structured_outputs_config") or {}
    from_start = not settings.get("reasoning_parser") or settings.get("enable_in_reasoning") is True
    return settings.get("backend") == "guidance" and from_start
