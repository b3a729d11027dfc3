"""Where agents run: everything that must be open around them, from patches to the endpoint that answers them."""

from __future__ import annotations

from collections.abc import Generator, Mapping
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
from lightning_core.rollouts.runner import RewardFunction, Runner, Solve


@contextmanager
def capturing(config: Config) -> Generator[None]:
    """Patches and integrations on, spans exported where the configuration wants them; and all of it off in reverse."""
    with ExitStack() as stack:
        stack.enter_context(exporting(config.otlp.endpoint, headers_env=config.otlp.headers_env))
        patches = Patches(lambda: current_run() is not None)
        stack.callback(patches.undo)
        install_client(patches)
        install_threads(patches)
        stack.enter_context(installed(auto=True))
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
    settings = config.rollouts.model_copy(update={"concurrency": concurrency or config.rollouts.concurrency})
    agents = frozenset(config.agents.train or ()) | frozenset(config.agents.frozen)
    limits = Limits()
    # Every rollout must be able to send requests, and some agents send several at a time.
    limits = replace(limits, requests=max(limits.requests, 4 * settings.concurrency))
    with (
        PolicyEndpoint(backend, chats, upstream=target, limits=limits) as endpoint,
        Runner(solve, endpoint=endpoint, settings=settings, agents=agents, reward_function=reward_function) as runner,
    ):
        yield endpoint, runner
