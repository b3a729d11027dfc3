"""Finding, checking, installing and uninstalling integrations."""

from __future__ import annotations

import logging
import sys
import threading
import types
from collections.abc import Iterator, Sequence
from importlib.metadata import Distribution, EntryPoint
from pathlib import Path
from typing import Any

import pytest

from docs._generate.compatibility import compatibility
from lightning_core.capture.integration import (
    GROUP,
    Conflict,
    Installed,
    TrainSpec,
    discover,
    find_conflicts,
    find_framework_conflicts,
)
from lightning_core.capture.patching import Patches
from lightning_core.errors import IntegrationUnavailable


class Host:
    @staticmethod
    def call() -> list[str]:
        return []


class Fake:
    """An integration that announces itself in the result of `Host.call`."""

    def __init__(self, name: str, *, deactivates: Sequence[str] = (), attribute: str = "call") -> None:
        self.name = name
        self.hosts = frozenset({"json"})
        self.deactivates = frozenset(deactivates)
        self._attribute = attribute

    def install(self, patches: Patches) -> None:
        patches.wrap(Host, self._attribute, self._wrap)

    def _wrap(self, wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        return [*wrapped(*args, **kwargs), self.name]

    def mark(self, obj: Any, spec: TrainSpec) -> Any:
        return obj

    def mark_members(self, obj: Any, specs: Sequence[TrainSpec]) -> Any:
        return obj


@pytest.fixture
def announce() -> Iterator[Any]:
    module = types.ModuleType("fake_integrations")
    sys.modules["fake_integrations"] = module

    def build(*fakes: Fake) -> Installed:
        for fake in fakes:
            setattr(module, fake.name, fake)
        entries = {f.name: EntryPoint(f.name, f"fake_integrations:{f.name}", GROUP) for f in fakes}
        return Installed(entries, enabled=lambda: True)

    yield build
    del sys.modules["fake_integrations"]


def test_ours_are_announced_and_fit() -> None:
    installed = Installed()
    assert {"langchain", "langgraph"} <= set(discover())
    for name in ("langchain", "langgraph"):
        assert installed.load(name).name == name


def test_counted_nested_and_idempotent(announce: Any) -> None:
    installed = announce(Fake("one"), Fake("two"))
    assert installed.install("one") == {"one"}
    installed.install("one")
    assert Host.call() == ["one"]
    with installed.installed():
        assert Host.call() == ["one", "two"]
        assert installed.active == {"one", "two"}
    assert Host.call() == ["one"]
    installed.uninstall("one")
    assert Host.call() == ["one"]
    installed.uninstall("one")
    assert Host.call() == []
    installed.uninstall("one")
    installed.uninstall()
    installed.install("one", auto=True)
    assert Host.call() == ["one", "two"]
    installed.uninstall()
    assert Host.call() == []


def test_precedence(announce: Any) -> None:
    installed = announce(Fake("inner"), Fake("outer", deactivates=["inner"]))
    installed.install("inner")
    with installed.installed("outer"):
        assert Host.call() == ["outer"]
        assert installed.active == {"outer"}
    assert Host.call() == ["inner"]
    with installed.installed():
        assert Host.call() == ["outer"]
    assert Host.call() == ["inner"]
    installed.uninstall("inner")
    assert Host.call() == []


def test_unknown_and_unfit(announce: Any, caplog: pytest.LogCaptureFixture) -> None:
    moved = Fake("moved", attribute="no_longer_there")
    missing = Fake("missing")
    missing.hosts = frozenset({"no_such_package"})
    installed = announce(Fake("good"), moved, missing)
    with pytest.raises(
        IntegrationUnavailable, match=r"no integration 'bad'; available are \['good', 'missing', 'moved'\]"
    ):
        installed.install("bad")
    with pytest.raises(
        IntegrationUnavailable,
        match="'moved' could not be installed, although the version of its framework is supported",
    ):
        installed.install("good", "moved")
    with pytest.raises(IntegrationUnavailable, match="requires 'the package no_such_package', found nothing"):
        installed.install("missing")
    assert installed.active == frozenset()
    assert Host.call() == []
    with caplog.at_level(logging.INFO), installed.installed():
        assert installed.active == {"good"}
    assert "no_longer_there" in caplog.text
    assert "no_such_package" in caplog.text
    assert Host.call() == []


def test_conflicts_name_what_is_required_and_what_was_found() -> None:
    class Distribution:
        requires = (
            "pytest>=1; extra == 'good'",
            "pytest>=1000,<2000; extra == 'bad'",
            "no-such-distribution>=2; extra == 'bad'",
            "no-such-distribution>=2",
            "wrapt>=1000; extra == 'other'",
        )

    distribution: Any = Distribution()
    assert find_conflicts(distribution, "good") == []
    assert find_conflicts(None, "good") == []
    assert find_conflicts(distribution, "bad") == [
        Conflict("pytest<2000,>=1000", pytest.__version__),
        Conflict("no-such-distribution>=2", None),
    ]
    assert str(Conflict("a>=2", "1.0")) == "requires 'a>=2', found '1.0'"


def test_a_missing_client_does_not_stop_an_integration_but_a_wrong_version_does(tmp_path: Path) -> None:
    (tmp_path / "METADATA").write_text(
        "Name: fits\nVersion: 1\nProvides-Extra: fits\n"
        "Requires-Dist: pytest>=1; extra == 'fits'\n"
        "Requires-Dist: no-such-client>=2; extra == 'fits'\n"
        "Requires-Dist: wrapt>=1000; extra == 'old'\n"
    )
    distribution = Distribution.at(tmp_path)

    def conflicts(name: str, *hosts: str) -> list[str]:
        entry = EntryPoint(name, "fake_integrations:fits", GROUP)._for(distribution)
        return [conflict.required for conflict in find_framework_conflicts(entry, frozenset(hosts))]

    assert conflicts("fits", "pytest") == []
    assert conflicts("fits", "pytest", "no_such_host") == ["no-such-client>=2", "the package no_such_host"]
    assert conflicts("old", "pytest") == ["wrapt>=1000"]


def test_the_class_closest_to_the_object_decides(announce: Any) -> None:
    import json

    class Encoder(json.JSONEncoder):
        pass

    installed = announce(Fake("one"))
    assert installed.find(Encoder()).name == "one"
    assert installed.find(3) is None


def test_threads(announce: Any) -> None:
    installed = announce(Fake("one"), Fake("two"))

    def work() -> None:
        for _ in range(100):
            with installed.installed("one"):
                assert "one" in Host.call()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert Host.call() == []


def test_the_compatibility_page_is_what_the_extras_say() -> None:
    written = Path(__file__).parents[2] / "docs" / "compatibility.md"
    assert written.read_text(encoding="utf-8") == compatibility(), (
        "run: python -m docs._generate.compatibility > docs/compatibility.md"
    )
