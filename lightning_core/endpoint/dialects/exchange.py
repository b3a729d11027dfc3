"""A request and its answer as the endpoint sees them, whatever the wire format: messages and tools are those of chat completions."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning_core.endpoint.dialects.response_format import Demands
from lightning_core.errors import PolicyRequestError

Message = Mapping[str, Any]
PlainPrompt = str | Sequence[int]
"""Text, or its token ids."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """A checked request; None where the client left the choice to us."""

    model: str
    messages: Sequence[Any]
    tools: Sequence[Any] | None = None
    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None
    n: int = 1
    stop: tuple[str, ...] = ()
    seed: int | None = None
    stream: bool = False
    demands: Demands = field(default_factory=Demands)
    carried: Sequence[Message] | None = None
    """What a later request that names this answer begins with, the answer itself aside; None if there can be none."""
    prompts: Sequence[PlainPrompt] = ()
    """Prompts without a chat, each answered ``n`` times; ``messages`` are empty then."""
    prompt_field: str = "messages"
    """The field of the body that holds what is asked."""
    body: Mapping[str, Any] = field(repr=False)
    """As the client sent it, for what concerns only the wire format."""

    @property
    def choices(self) -> int:
        """How many responses are asked for."""
        return self.n * (len(self.prompts) or 1)

    def asked(self, choice: int) -> Sequence[Any]:
        """The messages that response number ``choice`` answers; a plain prompt counts as the user's."""
        if not self.prompts:
            return self.messages
        prompt = self.prompts[choice // self.n]
        return [{"role": "user", "content": prompt if isinstance(prompt, str) else json.dumps(list(prompt))}]


@dataclass(slots=True, kw_only=True)
class Choice:
    """One sampled response, as far as it has come."""

    message: Message
    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str
    """stop, length or tool_calls."""
    stop: str | None = None
    """The stop string that ended it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What is known of an answer before it is sampled."""

    request: ChatRequest
    call: str
    """Id of the first response's span; the answer's id on the wire has it at its end."""
    model: str
    prompts: Sequence[Sequence[int]]
    """Token ids of each prompt; a chat has one."""
    decode: Callable[[Sequence[int]], str]

    @property
    def prompt_tokens(self) -> int:
        """How many tokens the prompts have together."""
        return sum(len(ids) for ids in self.prompts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One response of somebody else's model server."""

    message: Message
    finish_reason: str | None = None
    model: str | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None


def model_name(body: Any) -> str:
    """The model that a request names, perhaps none. Raises `PolicyRequestError` if the body is no object."""
    if not isinstance(body, Mapping):
        raise PolicyRequestError(f"the request body is a JSON {type(body).__name__}; expected an object")
    model = body.get("model")
    if not isinstance(model, (str, type(None))):
        raise PolicyRequestError(f"model is {model!r}; expected a name", param="model")
    return model or ""
