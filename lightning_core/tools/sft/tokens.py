"""Recorded calls → transitions: the tokens to learn, for each call of a trained agent.

Responses that the policy's own model sampled have their recorded tokens. A teacher's responses have messages only: the prompt and
the response are rendered by the policy's chat template, as if the policy had given that response, with tool calls in its own
format. The next turn of the conversation then continues these tokens, so a conversation is one row.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from lightning_core.backends.backend import sampling_digest
from lightning_core.chat.chat import Chat, Memory, RenderedPrompt
from lightning_core.chat.messages import functions_of, text_of
from lightning_core.dialects.openai_chat_shape import function_tool
from lightning_core.errors import PolicyRequestError
from lightning_core.trace import Call, Trace
from lightning_core.transitions import Row, Transition, transitions_to_rows


@dataclass(slots=True)
class TokenCounts:
    """The sources of the tokens of calls."""

    recorded: int = 0
    """Calls with recorded tokens of the policy's own model."""
    rendered: int = 0
    """Calls whose messages were rendered by the policy's chat template."""
    without_reasoning: int = 0
    """Rendered calls whose response had reasoning that the policy's template does not write."""


class Tokens:
    """Finds the tokens of the calls of ``agents``."""

    def __init__(
        self,
        agents: Mapping[str | None, str],
        chats: Mapping[str, Chat],
        *,
        max_context: int,
        left_out: Counter[str],
    ) -> None:
        """``agents``: the policy of each agent that learns; None: of calls without an agent. ``chats``: of each policy.

        ``left_out`` gets the number of calls that are not used, by reason.
        """
        self._agents = agents
        self._chats = chats
        self._max_context = max_context
        self._left_out = left_out
        self.counts = TokenCounts()

    def rows(self, trace: Trace) -> list[Row]:
        """The rows of a rollout, with an advantage of 1 for each token of a response."""
        transitions = self.transitions(trace)
        return transitions_to_rows(transitions, {t.call: 1.0 for t in transitions})

    def transitions(self, trace: Trace) -> list[Transition]:
        """The calls that are learned, in order, as if they were sampled at temperature 1. Their logprobs are 0: not known."""
        memory = Memory()
        transitions: list[Transition] = []
        for call in trace.calls:
            if call.agent not in self._agents:
                continue
            policy = self._agents[call.agent]
            reason = _refusal(call)
            if reason is None:
                try:
                    prompt_ids, output_ids = self._tokens(call, self._chats[policy], memory)
                    if len(prompt_ids) + len(output_ids) <= self._max_context:
                        transitions.append(_transition(trace, call, policy, prompt_ids, output_ids))
                        continue
                    reason = f"calls with more than policy.max_context = {self._max_context} tokens"
                except PolicyRequestError as error:
                    reason = f"calls: {error}"
            self._left_out[reason] += 1
        return transitions

    def _tokens(self, call: Call, chat: Chat, memory: Memory) -> tuple[Sequence[int], Sequence[int]]:
        """The prompt and the response of ``call``, which is remembered for the next turn."""
        # Calls that were forwarded have tools as the client sent them, with fields that the policy is not shown.
        call = replace(call, tools=[function_tool(tool, i) for i, tool in enumerate(call.tools or ())] or None)
        response = dict(call.response or {})
        prompt = chat.render(call.messages, call.tools, memory)
        recorded = _recorded(call, chat, prompt)
        if recorded is not None:
            prompt = replace(prompt, ids=tuple(recorded[0]))
            output_ids = recorded[1]
            self.counts.recorded += 1
        else:
            if call.finish_reason == "length":
                raise PolicyRequestError("the response was cut at its token limit, so it has no end to learn")
            output_ids = chat.encode_response(prompt, response, call.tools)
            self._check(call, chat, prompt, output_ids)
            self.counts.rendered += 1
        chat.remember(prompt, output_ids, response, memory)
        return prompt.ids, output_ids

    def _check(self, call: Call, chat: Chat, prompt: RenderedPrompt, output_ids: Sequence[int]) -> None:
        """Raise `PolicyRequestError` unless the endpoint would read ``output_ids`` as the response of ``call``."""
        response: Mapping[str, Any] = call.response or {}
        read = chat.parse(output_ids, tools=bool(call.tools), thinking=prompt.thinking, declared=call.tools or ())
        if not _same(read, response):
            raise PolicyRequestError("the chat template changes the response: it is not read back from its tokens")
        thought = str(response.get("reasoning_content") or "").strip()
        if thought != str(read.get("reasoning_content") or "").strip():
            if chat.template.reasons:
                raise PolicyRequestError("the chat template changes the reasoning of the response")
            self.counts.without_reasoning += 1


def _refusal(call: Call) -> str | None:
    """The reason a call cannot be learned, with any tokens, or None."""
    if call.error is not None:
        return "calls that failed"
    if call.replays is not None:
        return "calls that were answered from a record"
    if call.response is None or not call.messages:
        return "calls without recorded messages"
    if not text_of(call.response) and not call.response.get("tool_calls"):
        return "calls with an empty response"
    return None


def _recorded(call: Call, chat: Chat, prompt: RenderedPrompt) -> tuple[list[int], list[int]] | None:
    """The recorded tokens of prompt and response; None if there are none, or they are of another tokenizer."""
    if call.prompt_ids is None or call.output_ids is None or not len(call.prompt_ids) or not len(call.output_ids):
        return None
    prompt_ids, output_ids = call.prompt_ids.tolist(), call.output_ids.tolist()
    try:
        chat.plain([*prompt_ids, *output_ids])
    except PolicyRequestError:
        return None  # ids beyond the vocabulary
    read = chat.parse(output_ids, tools=bool(call.tools), thinking=prompt.thinking, declared=call.tools or ())
    return (prompt_ids, output_ids) if _same(read, call.response or {}) else None


def _same(read: Mapping[str, Any], response: Mapping[str, Any]) -> bool:
    return text_of(read).strip() == text_of(response).strip() and functions_of(read) == functions_of(response)


def _transition(
    trace: Trace, call: Call, policy: str, prompt_ids: Sequence[int], output_ids: Sequence[int]
) -> Transition:
    logprobs = np.zeros(len(output_ids), dtype=np.float32)
    digest = sampling_digest(
        prompt_ids=prompt_ids, output_ids=output_ids, logprobs=logprobs, temperature=1.0, version=0, constraint=None
    )
    return Transition(
        call=call.id,
        rollout=trace.rollout,
        task_id=trace.task_id,
        agent=call.agent or "",
        policy=policy,
        version=0,
        sequence=call.sequence,
        prompt_ids=np.array(prompt_ids, dtype="<u4"),
        output_ids=np.array(output_ids, dtype="<u4"),
        logprobs=logprobs,
        temperature=1.0,
        constraint=None,
        digest=digest,
        finish_reason=call.finish_reason,
    )
