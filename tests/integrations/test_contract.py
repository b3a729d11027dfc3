"""Every announced integration passes the complete, unmodified contract suite."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from lightning_core.capture.integration import Installed, discover
from lightning_core.testing.contract import IntegrationContract

HERE = Path(__file__).parent


def contracts() -> list[type[IntegrationContract]]:
    for file in sorted(HERE.glob("test_*.py")):
        importlib.import_module(f"tests.integrations.{file.stem}")
    # Rejected classes may still be waiting for the garbage collector.
    return [cls for cls in IntegrationContract.__subclasses__() if hasattr(cls, "adapter")]


def test_every_integration_passes_it() -> None:
    with_a_host = [name for name in discover() if Installed().load(name).hosts]
    assert sorted(cls.adapter.integration for cls in contracts()) == sorted(with_a_host)


def test_no_test_of_it_is_skipped_or_expected_to_fail() -> None:
    marks = [
        (cls.__name__, name, mark.name)
        for cls in contracts()
        for name in dir(cls)
        if name.startswith("test_")
        for mark in [*getattr(cls, "pytestmark", ()), *getattr(getattr(cls, name), "pytestmark", ())]
    ]
    assert {mark for _, _, mark in marks} <= {"parametrize"}, marks


@pytest.mark.parametrize("name", ["test_each_call_is_recorded_once", "check_apart"])
@pytest.mark.parametrize("inherited", [True, False])
def test_overriding_is_an_error(name: str, inherited: bool) -> None:
    body: dict[str, Any] = {name: lambda self: None}
    bases = (type("Mixin", (), body), IntegrationContract) if inherited else (IntegrationContract,)
    with pytest.raises(TypeError, match=f"overrides .*{name}"):
        type("TestMine", bases, {} if inherited else body)


def test_the_distribution_must_be_named() -> None:
    with pytest.raises(TypeError, match=r"TestMine does not set \['distribution'\]"):
        type("TestMine", (IntegrationContract,), {"adapter": contracts()[0].adapter})
