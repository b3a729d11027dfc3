"""Fields of OpenAI's chat completions and completions that set up a sampler or constrain it."""

from __future__ import annotations

from lightning_core.dialects.fields import INTEGER, NUMBER, OBJECT, OFF_POLICY, PENALTY, DroppedField, UnsupportedField

SAMPLER = {
    "frequency_penalty": PENALTY,
    "presence_penalty": PENALTY,
    "repetition_penalty": DroppedField(OFF_POLICY, unless=(1,), kind=NUMBER),
    "logit_bias": DroppedField(OFF_POLICY, unless=({},), kind=OBJECT),
    "top_k": DroppedField(OFF_POLICY, unless=(0, -1), kind=INTEGER),
    "min_p": DroppedField(OFF_POLICY, unless=(0,), kind=NUMBER),
}
"""Settings of samplers. vLLM and other servers define ``repetition_penalty``, ``top_k`` and ``min_p``."""
GUIDED = {
    name: UnsupportedField("only response_format with a JSON schema constrains a response")
    for name in ("guided_choice", "guided_grammar", "guided_json", "guided_regex", "structured_outputs")
}
"""vLLM's constraints. Without them, the agent could not read the response."""
