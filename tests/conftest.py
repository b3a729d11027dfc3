"""Fixtures for all tests: a policy endpoint over real HTTP, and a check for patches that are not removed."""

from __future__ import annotations

import functools
import gc
import ssl
import sys
from collections.abc import Generator, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import wrapt

from lightning_core.capture import marks
from lightning_core.capture.patching import Patches
from lightning_core.credit import ADVANTAGE_RULES, GROUP_KEYS, LOSSES, REWARD_RULES
from lightning_core.rollouts.local_agents import patched
from lightning_core.testing import Playground
from lightning_core.testing.contract import answer_prompt
from lightning_core.testing.recording_server import RecordingServer, recording_server
from tests.budget import Budget
from tests.program_runs import Program

_MISSING = object()


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Budget(config))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What imports allocate stays, so looking for garbage meanwhile finds none."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """Every later collection of garbage would go through all modules and tests again.

    Python looks for cycles after 700 new objects, which is a large part of the time of tests that create many."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000)


if find_spec("hypothesis") is not None:  # not installed in the cluster's environment
    from hypothesis import HealthCheck, settings

    # The same examples in every run, without a time limit.
    settings.register_profile(
        "lightning", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile("lightning")


@pytest.fixture(scope="session", autouse=True)
def one_ssl_context() -> Iterator[None]:
    """Reading the certificates is nearly all that it takes to create a client, and clients may share what was read."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ssl, "create_default_context", functools.cache(ssl.create_default_context))
        yield


@pytest.fixture(autouse=True)
def own_connections() -> None:
    """ChatOpenAI shares connections within the process, and they belong to an event loop: each test gets new ones."""
    if clients := sys.modules.get("langchain_openai.chat_models._client_utils"):
        clients._cached_async_httpx_client.cache_clear()


@pytest.fixture(autouse=True)
def no_rule_leaks() -> Iterator[None]:
    """Removes the rules that a test declares, and the modules that it imported for them, so that a later import declares them again.

    During the test the example of CONTRIBUTING.md is not declared."""
    contributed = ADVANTAGE_RULES.get("max-scaled")
    if contributed is not None:
        ADVANTAGE_RULES.forget("max-scaled")
    registries = (REWARD_RULES, ADVANTAGE_RULES, GROUP_KEYS, LOSSES)
    before, modules = [set(registry) for registry in registries], set(sys.modules)
    yield
    for registry, names in zip(registries, before, strict=True):
        for name in set(registry) - names:
            module = registry[name].function.__module__
            if module not in modules:
                sys.modules.pop(module, None)
            registry.forget(name)
    if contributed is not None:
        ADVANTAGE_RULES.declare("max-scaled", contributed.function)


@pytest.fixture(autouse=True)
def no_patch_leaks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Checks that everything a test patches is restored."""
    before: dict[tuple[int, str], tuple[Any, Any]] = {}
    wrap = Patches.wrap

    def recording_wrap(self: Patches, target: Any, attribute: str, wrapper: Any, **options: Any) -> None:
        owner, name, _ = wrapt.resolve_path(target, attribute)
        before.setdefault((id(owner), name), (owner, vars(owner).get(name, _MISSING)))
        wrap(self, target, attribute, wrapper, **options)

    monkeypatch.setattr(Patches, "wrap", recording_wrap)
    yield
    left = [f"{o.__name__}.{name}" for (_, name), (o, was) in before.items() if vars(o).get(name, _MISSING) is not was]
    assert not left, f"patches left behind: {left}"


@pytest.fixture(scope="session")
def _served() -> Iterator[Playground]:
    with Playground(answer_prompt) as served:
        yield served


@pytest.fixture
def playground(_served: Playground) -> Iterator[Playground]:
    """A scripted endpoint, with patches on HTTP clients and threads but without integrations."""
    with patched(()):
        yield _served


@pytest.fixture
def server() -> Iterator[RecordingServer]:
    """A server that records the requests it receives."""
    with recording_server() as server:
        yield server


@pytest.fixture
def no_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests mark agents in this process."""
    monkeypatch.setattr(marks, "_marked", {})


@pytest.fixture
def program(server: RecordingServer, no_marks: None, tmp_path: Path) -> Program:
    """A program whose model is at ``server``."""
    return Program(server, tmp_path)
