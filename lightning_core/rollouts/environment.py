"""Where agents run: everything that must be open around them, from patches to the endpoint that answers them."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace

from lightning_core.backends.backend import Backend
from lightning_core.capture import current_run
from lightning_core.capture.http_clients import install_client
from lightning_core.capture.integration import installed
from lightning_core.capture.patching import Patches
from lightning_core.capture.threads import install_threads
from lightning_core.chat.chat import Chat
from lightning_core.config import Config
from lightning_core.endpoint.limits import Limits
from lightning_core.endpoint.server import PolicyEndpoint
from lightning_core.endpoint.upstream import upstream_target
from lightning_core.otel import exporting
from lightning_core.rollouts.runner import RewardFunction, Runner, RunnerSettings, Solve


@contextmanager
def patched(integrations: Iterable[str] | None = None) -> Generator[None]:
    """Patches on HTTP clients, threads and frameworks on; all of them off in reverse. They are inert outside a rollout.

    ``integrations``: names of those to install; None: all that fit the installed frameworks.
    """
    names = None if integrations is None else tuple(integrations)
    patches = Patches(lambda: current_run() is not None)
    with ExitStack() as stack:
        stack.callback(patches.undo)
        install_client(patches)
        install_threads(patches)
        if names is None:
            stack.enter_context(installed(auto=True))
        elif names:
            stack.enter_context(installed(*names))
        yield


@contextmanager
def capturing(config: Config) -> Generator[None]:
    """`patched`, and spans exported where the configuration wants them."""
    with exporting(config.otlp.endpoint, headers_env=config.otlp.headers_env), patched():
        yield


@contextmanager
def open_runner(
    config: Config,
    solve: Solve,
    backend: Backend,
    chats: Mapping[str, Chat],
    *,
    reward_function: RewardFunction | None = None,
    concurrency: int | None = None,
) -> Generator[tuple[PolicyEndpoint, Runner]]:
    """An endpoint that samples from ``backend``, and a runner of ``solve`` whose agents it answers; inside `capturing`.

    ``concurrency``: rollouts at the same time; None: as configured.
    """
    upstream = config.policy.upstream
    target = None if upstream is None else upstream_target(upstream.base_url, upstream.api_key_env)
    settings = RunnerSettings(
        concurrency=concurrency or config.rollouts.concurrency,
        timeout_seconds=config.rollouts.timeout_seconds,
        retries=config.rollouts.retries,
        redirect_hosts=config.rollouts.redirect_hosts,
        agents=frozenset(config.agents.train or ()) | frozenset(config.agents.frozen),
    )
    limits = Limits()
    # As many as there are rollouts must get through, and some of them ask several at a time.
    limits = replace(limits, requests=max(limits.requests, 4 * settings.concurrency))
    with (
        PolicyEndpoint(backend, chats, upstream=target, limits=limits) as endpoint,
        Runner(solve, endpoint=endpoint, settings=settings, reward_function=reward_function) as runner,
    ):
        yield endpoint, runner
