"""Fixtures for tests of every part: a policy endpoint over real HTTP, and a guard against patches that stay behind."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest
import wrapt

from lightning_core.capture.patching import Patches
from lightning_core.rollouts.environment import patched
from lightning_core.testing.contract import answer_prompt
from lightning_core.testing.playground import Playground
from lightning_core.testing.recording_server import RecordingServer, recording_server

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
