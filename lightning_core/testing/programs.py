"""The contract suite's programs: their specification, builder and scripted model."""

from __future__ import annotations

import asyncio
import atexit
import contextvars
import sys
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

ADD_PROMPT = 'use:add {"a": 2, "b": 3}'
"""A prompt that gets a call of the tool ``add``, and text after the tool's result."""


def answer_prompt(prompt: str) -> str:
    """The suite's script: a tool call if the last user message has ``use:``, else text.

    After the tool's result the answer is text.
    """
    last = prompt.rpartition("<|im_start|>user\n")[2]
    if "use:" in last and "<|im_start|>tool\n" not in last:
        name, _, arguments = last.partition("use:")[2].partition("<|im_end|>")[0].partition(" ")
        return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
    return f"answer to {last.partition('<|im_end|>')[0].strip()}"


# All tests share one event loop, as in a program: clients that a framework shares within the process, such as ChatOpenAI's,
# belong to the loop that first used them.
_loop = asyncio.Runner()
atexit.register(_loop.close)
_SLOW_SECONDS = 60.0


def run_async(work: Coroutine[Any, Any, Any]) -> Any:
    """Run ``work`` on the suite's event loop, in the current context.

    If it takes more than a minute, the stacks of all tasks are written to standard error.
    """
    watch = _loop.get_loop().call_later(_SLOW_SECONDS, _print_tasks)
    try:
        # A Runner otherwise keeps the context of its first run.
        return _loop.run(work, context=contextvars.copy_context())
    finally:
        watch.cancel()


def _print_tasks() -> None:
    for task in asyncio.all_tasks():
        task.print_stack(file=sys.stderr)


@dataclass(frozen=True)
class AgentSpec:
    """One agent of a program.

    It sends ``prompt`` to the model ``"policy"``, then runs ``inner``, then raises ``error``.
    """

    name: str
    marked: bool = False
    """Whether it is marked with ``trainable`` under ``name``."""
    prompt: str | None = None
    tool: bool = False
    """Whether it may call the tool ``add(a, b)``, which fails with a message that contains "negative" if ``b`` is negative."""
    inner: AgentSpec | None = None
    """An agent that this one runs after its own model call."""
    error: Exception | None = None
    """The exception that it raises after its model call."""

    @property
    def text(self) -> str:
        """The prompt that it sends."""
        return self.prompt or f"I am {self.name}"


class HostAdapter(ABC):
    """Builds and runs programs of one framework, the host."""

    integration: ClassVar[str]
    """Name of the integration's entry point."""
    host: ClassVar[str]
    """The package that the integration requires."""

    @abstractmethod
    def build(self, parts: Sequence[AgentSpec], *, parallel: bool = False, base_url: str | None = None) -> Any:
        """Return a program that runs ``parts`` in order, or all at once if ``parallel``.

        Models are at their provider's default URL unless ``base_url`` is given, and clients do not retry.
        """

    @abstractmethod
    def run(self, program: Any) -> None:
        """Run the program without streaming."""

    @abstractmethod
    async def arun(self, program: Any) -> None:
        """Run it in an event loop."""

    @abstractmethod
    def stream(self, program: Any) -> None:
        """Run it so that model responses stream, and consume the stream."""

    @abstractmethod
    async def astream(self, program: Any) -> None:
        """Do the same in an event loop."""

    @abstractmethod
    def patched_call(self) -> tuple[Any, str]:
        """Return owner and attribute of a patched function that `run` calls. A test wraps it."""
