"""Runs agents in this process: patches, integrations, endpoint and runner."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

from lightning_core.backends.backend import Backend
from lightning_core.backends.gate import SharedBackend
from lightning_core.capture.integration import installed
from lightning_core.chat.chat import Chat
from lightning_core.config import Config
from lightning_core.config.sections import Rollouts
from lightning_core.endpoint.agents.routing import Routing
from lightning_core.endpoint.forwarding.upstream import upstream_target
from lightning_core.endpoint.interface import Endpoint
from lightning_core.endpoint.server import PolicyEndpoint
from lightning_core.endpoint.transport.limits import Limits
from lightning_core.endpoint.workers.messages import ChatSettings
from lightning_core.endpoint.workers.sharded import ShardedEndpoint
from lightning_core.otel import exporting
from lightning_core.propagation.process_patches import process_patches
from lightning_core.rollouts.attempt import Attempt, Job, Rollout
from lightning_core.rollouts.executors.choose import choose_executor
from lightning_core.rollouts.executors.executor import Executor
from lightning_core.rollouts.runner import RewardFunction, Runner, Solve

_CALLS_AT_ONCE = 8


@contextmanager
def patched(integrations: Iterable[str] | None = None) -> Generator[None]:
    """Patch HTTP clients, threads, processes and frameworks; undo it in reverse order at the end.

    The patches do nothing while no rollout runs in this process.

    ``integrations``: names of those to install; None: all that fit the installed frameworks.
    """
    names = None if integrations is None else tuple(integrations)
    with ExitStack() as stack:
        stack.enter_context(process_patches())
        if names is None:
            stack.enter_context(installed(auto=True))
        elif names:
            stack.enter_context(installed(*names))
        yield


@contextmanager
def capturing(config: Config) -> Generator[None]:
    """`patched`, with spans exported as configured."""
    otlp = config.otlp
    with exporting(otlp.endpoint, headers_env=otlp.headers_env, timeout_seconds=otlp.timeout_seconds), patched():
        yield


class LocalAgents:
    """Runs agents in this process."""

    def __init__(self, runner: Runner, endpoint: Endpoint, threads: ThreadPoolExecutor) -> None:
        self._runner = runner
        self._endpoint = endpoint
        self._threads = threads

    async def roll_out(
        self, jobs: Sequence[Job], routing: Routing, record: Callable[[Sequence[Attempt]], None]
    ) -> Sequence[Rollout]:
        """The last attempt at each job; see `AgentPool.roll_out`."""
        work = self._runner.submit(jobs, routing=routing, on_attempt=lambda attempt: record([attempt]))
        return await asyncio.wrap_future(work)

    async def call_endpoint(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """See `AgentPool.call_endpoint`."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, function, self._endpoint, *arguments)


def open_endpoint(
    config: Config, backend: Backend, chats: Mapping[str, Chat], *, concurrency: int
) -> PolicyEndpoint | ShardedEndpoint:
    """The endpoint of ``config``, to be entered: one server in this process, or several workers."""
    section, upstream, limits = config.endpoint, config.policy.upstream, Limits()
    target = None if upstream is None else upstream_target(**upstream.model_dump())
    # Every rollout must be able to send requests, and some agents send several at a time.
    limits = replace(limits, requests=max(limits.requests, 4 * concurrency))
    # What is sampled in this process, or not at all, such as with eval.model, has no use for other processes.
    if section.workers == 1 or not isinstance(backend, SharedBackend):
        return PolicyEndpoint(
            backend,
            chats,
            upstream=target,
            host=section.host,
            port=section.port,
            public_url=section.public_url,
            limits=limits,
        )
    variables = config.policy.chat_template_kwargs
    return ShardedEndpoint(
        backend,
        {name: ChatSettings.of(chat, variables) for name, chat in chats.items()},
        workers=section.workers,
        upstream=target,
        host=section.host,
        limits=limits,
    )


@contextmanager
def importing_agents(
    config: Config, solve: Solve, reward_function: RewardFunction | None = None
) -> Generator[Executor]:
    """The executor of ``config``, for `open_agents`. Its process imports the agent at once, so the caller can load a model meanwhile.

    Inside `capturing`. A plan for the free memory that is made meanwhile counts what is imported so far. Raises `ConfigError` if the
    configured executor cannot run them.
    """
    executor = _choose_executor(config, solve, reward_function, config.rollouts)
    try:
        executor.open()
        yield executor
    finally:
        executor.discard()


def _choose_executor(
    config: Config, solve: Solve, reward_function: RewardFunction | None, settings: Rollouts
) -> Executor:
    name = config.agent if isinstance(config.agent, str) else None
    return choose_executor(solve, reward_function, settings, agent_name=name, reward_name=config.reward)


@contextmanager
def open_agents(
    config: Config,
    solve: Solve,
    backend: Backend,
    chats: Mapping[str, Chat],
    *,
    reward_function: RewardFunction | None = None,
    concurrency: int | None = None,
    executor: Executor | None = None,
) -> Generator[LocalAgents]:
    """Agents that ``backend`` answers through a separate endpoint; inside `capturing`.

    ``concurrency``: rollouts at the same time; None: as configured. ``executor``: from `importing_agents`, for the configured concurrency.
    """
    settings = config.rollouts.model_copy(update={"concurrency": concurrency or config.rollouts.concurrency})
    agents = frozenset(config.agents.trained_names) | frozenset(config.agents.frozen)
    with (
        open_endpoint(config, backend, chats, concurrency=settings.concurrency) as endpoint,
        Runner(
            solve,
            endpoint=endpoint,
            settings=settings,
            agents=agents,
            reward_function=reward_function,
            executor=_choose_executor(config, solve, reward_function, settings) if executor is None else executor,
        ) as runner,
        ThreadPoolExecutor(_CALLS_AT_ONCE, thread_name_prefix="lightning-endpoint-call") as threads,
    ):
        yield LocalAgents(runner, endpoint, threads)
