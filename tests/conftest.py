"""Fixtures for tests of every part: a policy endpoint over real HTTP, and a guard against patches that stay behind."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import pytest
import wrapt

from lightning_core.backends.scripted import ScriptedBackend
from lightning_core.capture import Run, current_run, rollout
from lightning_core.capture.http_clients import install_client
from lightning_core.capture.patching import Patches
from lightning_core.capture.threads import install_threads
from lightning_core.chat.chat import Chat
from lightning_core.credit import ADVANTAGE_RULES, GROUP_KEYS, LOSSES, REWARD_RULES
from lightning_core.endpoint.server import PolicyEndpoint, Routing
from tests.recording_server import RecordingServer, recording_server

_MISSING = object()

if find_spec("hypothesis") is not None:  # the cluster's environment has none
    from hypothesis import HealthCheck, settings

    # The same examples in every run, on machines of any speed.
    settings.register_profile(
        "lightning", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile("lightning")


@pytest.fixture(autouse=True)
def own_connections() -> None:
    """ChatOpenAI's models share connections while the process lives; those of a test's event loop would meet the next test's."""
    if clients := sys.modules.get("langchain_openai.chat_models._client_utils"):
        clients._cached_async_httpx_client.cache_clear()


@pytest.fixture
def no_rule_leaks() -> Iterator[None]:
    """Rules that the test declares are removed after it."""
    registries = (REWARD_RULES, ADVANTAGE_RULES, GROUP_KEYS, LOSSES)
    before = [set(registry) for registry in registries]
    yield
    for registry, names in zip(registries, before, strict=True):
        for name in set(registry) - names:
            registry.forget(name)


@pytest.fixture(autouse=True)
def no_patch_leaks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every place that a test patches looks afterwards as it did before."""
    before: dict[tuple[int, str], tuple[Any, Any]] = {}
    wrap = Patches.wrap

    def noting_wrap(self: Patches, target: Any, attribute: str, wrapper: Any) -> None:
        owner, name, _ = wrapt.resolve_path(target, attribute)
        before.setdefault((id(owner), name), (owner, vars(owner).get(name, _MISSING)))
        wrap(self, target, attribute, wrapper)

    monkeypatch.setattr(Patches, "wrap", noting_wrap)
    yield
    left = [f"{o.__name__}.{name}" for (_, name), (o, was) in before.items() if vars(o).get(name, _MISSING) is not was]
    assert not left, f"patches left behind: {left}"


class Endpoint:
    """A scripted policy endpoint, and rollouts against it."""

    def __init__(self, served: PolicyEndpoint, backend: ScriptedBackend) -> None:
        self._served = served
        self.backend = backend
        self.url = served.url

    @contextmanager
    def rollout(self, *, agents: Iterable[str] = (), strict: bool = True) -> Generator[Run]:
        """A rollout whose model requests go to this endpoint; ``agents`` are selected by name, as a configuration would."""
        key = self._served.new_key()
        with rollout("task", agents=agents, endpoint=self.url, api_key=key, strict=strict) as run:
            self._served.open(key, run.address, Routing())
            try:
                yield run
            finally:
                self._served.close(key)


def play(prompt: str) -> str:
    """The script: asks for the tool that the last user message names with ``use:``, until its result is there."""
    last = prompt.rpartition("<|im_start|>user\n")[2]
    if "use:" in last and "<|im_start|>tool\n" not in last:
        name, _, arguments = last.partition("use:")[2].partition("<|im_end|>")[0].partition(" ")
        return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
    return f"answer to {last.partition('<|im_end|>')[0].strip()}"


@contextmanager
def serve_script(script: Callable[[str], str] = play, *, delay: float = 0.0) -> Generator[Endpoint]:
    """An endpoint that answers a prompt's text by ``script``, ``delay`` seconds later."""
    backend = ScriptedBackend(script, delay=delay)
    with PolicyEndpoint(backend, Chat(backend.tokenizer)) as served:
        yield Endpoint(served, backend)


@contextmanager
def redirected() -> Generator[None]:
    """Model requests of rollouts are led to their endpoint, and threads keep their scope."""
    patches = Patches(lambda: current_run() is not None)
    install_client(patches)
    install_threads(patches)
    try:
        yield
    finally:
        patches.undo()


@pytest.fixture(scope="session")
def _served() -> Iterator[Endpoint]:
    with serve_script() as served:
        yield served


@pytest.fixture
def endpoint(_served: Endpoint) -> Iterator[Endpoint]:
    """The scripted endpoint, with model requests of rollouts led there."""
    with redirected():
        yield _served


@pytest.fixture
def server() -> Iterator[RecordingServer]:
    """A server that notes what it is sent."""
    with recording_server() as server:
        yield server
