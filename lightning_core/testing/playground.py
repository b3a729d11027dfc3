"""Rollouts of an agent in this process, with responses from a script or a backend.

Only the model is scripted. HTTP, the chat template, tokens, spans and the patches of the installed integrations are real. The tokens
of a scripted model are bytes, so nothing is downloaded. `Playground` is the endpoint with its rollouts, `open_playground` adds the
patches, `playground` also opens one rollout.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from typing import Any, Self, cast

from lightning_core.backends.backend import Backend
from lightning_core.backends.scripted import EveryModel, ScriptedBackend
from lightning_core.capture import ActiveRollout, rollout
from lightning_core.chat.chat import Chat
from lightning_core.chat.tool_calls.tool_formats import HERMES, ToolCall
from lightning_core.endpoint.agents.routing import Routing
from lightning_core.endpoint.server import PolicyEndpoint
from lightning_core.rollouts.local_agents import patched

Script = Callable[[str], str] | Iterable[str]
"""The model's responses: texts in order, or a function of the prompt's text (in ChatML)."""


def tool_call(name: str, **arguments: Any) -> str:
    """The text of a response that calls the tool ``name`` with ``arguments``."""
    return HERMES.write([ToolCall(name, arguments)])


class Playground:
    """A policy endpoint and its rollouts, as a context manager.

    `open_playground` adds the patches. With a script, every model name is served. A backend needs ``chats``: one chat format for all
    its models, or a mapping by model name. ``delay``: seconds before a scripted response and between its streamed parts.
    """

    def __init__(
        self, model: Script | Backend, *, chats: Chat | Mapping[str, Chat] | None = None, delay: float = 0.0
    ) -> None:
        if chats is not None:
            self._endpoint = PolicyEndpoint(cast("Backend", model), chats)
        elif hasattr(model, "generate"):
            raise TypeError("a backend requires the chat format of its models: pass chats=Chat(tokenizer)")
        elif isinstance(model, str):
            raise TypeError(
                "expected a list of responses or a function of the prompt, found a string: put it into a list"
            )
        else:
            backend = ScriptedBackend(cast("Script", model), delay=delay)
            backend.models = EveryModel(backend.models)
            self._endpoint = PolicyEndpoint(backend, Chat(backend.tokenizer))

    @property
    def url(self) -> str:
        """Base URL of the endpoint, such as ``http://127.0.0.1:8000/v1``."""
        return self._endpoint.url

    def __enter__(self) -> Self:
        self._endpoint.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._endpoint.__exit__(*error)

    @contextmanager
    def rollout(
        self,
        task: Any = None,
        *,
        train: Iterable[str] = (),
        temperature: float | None = None,
        max_tokens: int = 1024,
        strict: bool = True,
    ) -> Generator[ActiveRollout]:
        """One rollout. Its model requests go to this endpoint; the trace is ``run.trace``.

        ``train``: names of the trained agents, as ``agents.train`` in a configuration; agents that their framework names need no mark.
        ``temperature`` and ``max_tokens`` apply to trained agents. At its end a ``strict`` rollout raises `CaptureError` if recording
        failed, `RewardError` if a reward names no call or several agents, and `InfrastructureError` if a request failed and the agent
        swallowed the error.
        """
        if isinstance(train, str):
            raise TypeError(f"train must be a list of names, found {train!r}: pass train=[{train!r}]")
        trained = frozenset(train)
        routing = Routing(trained=trained, temperature=temperature, max_tokens=max_tokens)
        key = self._endpoint.new_key()
        with rollout(task, agents=trained, endpoint=self.url, api_key=key, strict=strict) as run:
            self._endpoint.open(key, run.address, routing)
            try:
                yield run
            finally:
                self._endpoint.close(key)
        if strict:
            run.check_requests()


@contextmanager
def open_playground(
    model: Script | Backend,
    *,
    chats: Chat | Mapping[str, Chat] | None = None,
    integrations: Iterable[str] | None = None,
    delay: float = 0.0,
) -> Generator[Playground]:
    """A playground for several rollouts, with patches on clients, threads and frameworks.

    All patches are removed at the end. ``integrations``: names of the integrations to install; None: all that the installed frameworks
    support, as in a training run.
    See `Playground` for the other arguments.
    """
    with patched(integrations), Playground(model, chats=chats, delay=delay) as opened:
        yield opened


@contextmanager
def playground(
    model: Script | Backend,
    *,
    train: Iterable[str],
    task: Any = None,
    chats: Chat | Mapping[str, Chat] | None = None,
    integrations: Iterable[str] | None = None,
    temperature: float | None = None,
    max_tokens: int = 1024,
    strict: bool = True,
    delay: float = 0.0,
) -> Generator[ActiveRollout]:
    """One rollout in its own playground.

    Use: ``with playground(["Four."], train=["solver"]) as run: solve(task)``.

    The trace is ``run.trace``, in the body and after it. See `open_playground` and `Playground.rollout` for the arguments.
    """
    with (
        open_playground(model, chats=chats, integrations=integrations, delay=delay) as opened,
        opened.rollout(task, train=train, temperature=temperature, max_tokens=max_tokens, strict=strict) as run,
    ):
        yield run
