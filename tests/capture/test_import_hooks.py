"""Functions that wait for a module: called once each, and one import hook for each module."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lightning_core.capture.import_hooks import when_imported
from lightning_core.capture.patching import Patches
from lightning_core.rollouts.local_agents import patched


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of a module that was not imported."""
    name = f"waited_for_in_{tmp_path.name}"
    (tmp_path / f"{name}.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    yield name
    sys.modules.pop(name, None)


def _registered() -> dict[str, list[Any]]:
    return importlib.import_module("wrapt.importer")._post_import_hooks


def hooks() -> int:
    return sum(map(len, _registered().values()))


def test_every_installation_is_called_unless_it_was_undone(module: str, caplog: pytest.LogCaptureFixture) -> None:
    called: list[tuple[str, Any]] = []
    sets = {name: Patches(lambda: True) for name in ("undone", "failing", "live")}
    before = hooks()
    for name, patches in sets.items():

        def note(found: Any, name: str = name) -> None:
            called.append((name, found))
            if name == "failing":
                raise AttributeError

        when_imported(patches, module, note)
    assert hooks() == before + 1
    sets["undone"].undo()
    found = importlib.import_module(module)
    assert called == [("failing", found), ("live", found)]
    assert f"{module} could not be patched" in caplog.text
    when_imported(sets["live"], module, lambda found: called.append(("now", found)))
    assert called[2:] == [("now", found)]
    assert hooks() == before


def test_an_undone_installation_leaves_the_hook_for_the_next_one(module: str) -> None:
    called: list[int] = []
    before = hooks()
    for number in range(5):
        patches = Patches(lambda: True)
        when_imported(patches, module, lambda found, number=number: called.append(number))
        if number < 4:
            patches.undo()
    assert hooks() == before + 1
    importlib.import_module(module)
    assert called == [4]


def test_patching_again_adds_no_hooks() -> None:
    with patched():
        pass
    before = hooks()
    for _ in range(3):
        with patched():
            pass
    assert hooks() == before
