"""Wraps are removed exactly from every kind of owner."""

from __future__ import annotations

import asyncio
import sys
import threading
import types
from typing import Any

import pytest
import wrapt

from lightning_core.capture.patching import Patches


class Base:
    def inherited(self) -> str:
        return "inherited"


class Owner(Base):
    def method(self, x: int = 1) -> int:
        return x

    @staticmethod
    def static(x: int) -> int:
        return x

    @classmethod
    def make(cls) -> str:
        return cls.__name__

    async def coroutine(self) -> str:
        return "awaited"


NAMES = ("method", "inherited", "static", "make", "coroutine")


def mark(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    return ("wrapped", wrapped(*args, **kwargs))


def snapshot(owner: Any) -> list[tuple[str, int]]:
    # By identity: a wrapper compares equal to the function that it wraps.
    return [(name, id(value)) for name, value in vars(owner).items()]


def test_wrap_and_undo_of_every_kind_of_attribute() -> None:
    before = snapshot(Owner)
    patches = Patches(lambda: True)
    for name in NAMES:
        patches.wrap(Owner, name, mark)
    owner = Owner()
    assert owner.method(x=5) == ("wrapped", 5)
    assert owner.inherited() == ("wrapped", "inherited")
    assert Owner.static(3) == owner.static(3) == ("wrapped", 3)
    assert Owner.make() == ("wrapped", "Owner")
    kind, coroutine = owner.coroutine()  # type: ignore[misc]
    assert (kind, asyncio.run(coroutine)) == ("wrapped", "awaited")
    assert Base().inherited() == "inherited"
    assert {name for name, _ in set(snapshot(Owner)) - set(before)} == set(NAMES)
    patches.undo()
    assert snapshot(Owner) == before
    assert owner.method() == 1
    assert owner.static(3) == 3


def test_a_function_of_a_module_by_name_and_by_path() -> None:
    module = types.ModuleType("patched_module")
    module.function = lambda: 1  # type: ignore[attr-defined]
    module.Owner = Owner  # type: ignore[attr-defined]
    sys.modules["patched_module"] = module
    try:
        before = snapshot(module)
        patches = Patches(lambda: True)
        patches.wrap("patched_module", "function", mark)
        patches.wrap("patched_module", "Owner.method", mark)
        assert module.function() == ("wrapped", 1)
        assert Owner().method() == ("wrapped", 1)
        patches.undo()
        assert snapshot(module) == before
        assert Owner().method() == 1
    finally:
        del sys.modules["patched_module"]


def test_the_gate() -> None:
    on = False
    patches = Patches(lambda: on)
    patches.wrap(Owner, "method", mark)
    assert Owner().method() == 1
    on = True
    assert Owner().method() == ("wrapped", 1)
    patches.undo()


def test_wrapping_twice_with_the_same_wrapper_is_once() -> None:
    patches = Patches(lambda: True)
    patches.wrap(Owner, "method", mark)
    patches.wrap(Owner, "method", mark)
    assert Owner().method() == ("wrapped", 1)
    patches.undo()
    patches.undo()
    assert Owner().method() == 1


def test_two_sets_come_off_in_any_order() -> None:
    before = snapshot(Owner)
    first, second = Patches(lambda: True), Patches(lambda: True)
    first.wrap(Owner, "method", mark)
    second.wrap(Owner, "method", mark)
    assert Owner().method() == ("wrapped", ("wrapped", 1))
    first.undo()
    assert Owner().method() == ("wrapped", 1)
    second.undo()
    assert Owner().method() == 1
    assert snapshot(Owner) == before
    first.wrap(Owner, "inherited", mark)
    second.wrap(Owner, "inherited", mark)
    first.undo()
    second.undo()
    assert snapshot(Owner) == before


def test_a_third_partys_wrapper_on_top_stays_and_ours_goes_inert() -> None:
    original = vars(Owner)["method"]
    patches = Patches(lambda: True)
    patches.wrap(Owner, "method", mark)
    theirs = wrapt.FunctionWrapper(vars(Owner)["method"], lambda w, i, a, k: ("theirs", w(*a, **k)))
    Owner.method = theirs  # type: ignore[method-assign, assignment]
    assert Owner().method() == ("theirs", ("wrapped", 1))
    patches.undo()
    assert vars(Owner)["method"] is theirs
    assert Owner().method() == ("theirs", 1)
    Owner.method = original  # type: ignore[method-assign]


def test_unknown_places_are_errors() -> None:
    patches = Patches(lambda: True)
    with pytest.raises(AttributeError):
        patches.wrap(Owner, "missing", mark)
    with pytest.raises(ImportError):
        patches.wrap("no_such_module", "missing", mark)
    patches.undo()


def test_threads_may_wrap_and_undo_at_once() -> None:
    before = snapshot(Owner)

    def work() -> None:
        for _ in range(200):
            patches.wrap(Owner, "method", mark)
            Owner().method()
            patches.undo()

    patches = Patches(lambda: True)
    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    patches.undo()
    assert snapshot(Owner) == before
