"""Everything that can be called can be marked; a mark belongs to one object, and is copied and pickled with it."""

from __future__ import annotations

import asyncio
import copy
import functools
import inspect
import multiprocessing
import pickle
import sys
from collections.abc import Callable
from typing import Any

import pytest
import wrapt

from lightning_core import rollout, trainable
from lightning_core.capture.mark import get_mark, marked_agents
from lightning_core.errors import ConfigError
from tests.capture.marked_programs import MARKED, Speaker, builtin, run_pickled, speak


class AsyncSpeaker:
    async def __call__(self) -> Any:
        return speak()


@wrapt.decorator
def passing(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    return wrapped(*args, **kwargs)


@functools.singledispatch
def dispatched(word: object) -> Any:
    return speak("object")


@dispatched.register
def _(word: str) -> Any:
    return speak("str")


def plain(*words: str) -> Any:
    return speak(*words)


async def coroutine() -> Any:
    return speak()


@functools.wraps(plain)
def wrapper(*words: str) -> Any:
    return plain(*words)


CALLED: dict[str, tuple[Any, tuple[Any, ...], Any]] = {
    "function": (plain, ("a",), ("a", "it")),
    "lambda": (lambda: speak(), (), ("it",)),
    "partial": (functools.partial(plain, "a"), ("b",), ("a", "b", "it")),
    "bound method": (Speaker().say, ("a",), ("object", "a", "it")),
    "object": (Speaker("x"), ("a",), ("x", "a", "it")),
    "object with an asynchronous call": (AsyncSpeaker(), (), ("it",)),
    "partial of an asynchronous function": (functools.partial(coroutine), (), ("it",)),
    "lru_cache": (functools.lru_cache(plain), ("a",), ("a", "it")),
    "singledispatch": (dispatched, ("a",), ("str", "it")),
    "wrapt": (passing(plain), ("a",), ("a", "it")),
    "wrapt, bound": (passing(Speaker("y").say), (), ("y", "it")),
    "functools.wraps": (wrapper, ("a",), ("a", "it")),
    "type's method": (Speaker.say, (Speaker("z"),), ("z", "it")),
}


@pytest.mark.parametrize("kind", list(CALLED))
def test_what_can_be_called_can_be_marked(kind: str) -> None:
    obj, arguments, expected = CALLED[kind]
    marked = trainable(obj, name="it")
    assert inspect.iscoroutinefunction(marked) == inspect.iscoroutinefunction(obj)
    assert isinstance(marked, obj.__class__)
    with rollout():
        result = marked(*arguments)
        assert (asyncio.run(result) if inspect.iscoroutine(result) else result) == expected
    mark = get_mark(marked)
    assert mark is not None
    assert mark.name == "it"
    assert get_mark(obj) is None
    assert trainable(marked, name="it") is marked
    with pytest.raises(ConfigError, match="already marked as 'it' and cannot be marked as 'other'"):
        trainable(marked, name="other")


def test_decorators_keep_their_own_methods() -> None:
    cached = trainable(functools.lru_cache(plain), name="it")
    cached("a")
    cached("a")
    assert cached.cache_info().hits == 1
    cached.cache_clear()

    several = trainable(dispatched, name="several")
    several.register(int, lambda word: speak("int"))
    with rollout():
        assert several(1) == ("int", "several")


class Agents:
    """Marks on what classes can hold."""

    name = "agents"

    def run(self, *words: str) -> Any:
        return speak(self.name, *words)

    plan = trainable(functools.partialmethod(run, "plan"), name="plan")

    @trainable("static")
    @staticmethod
    def static() -> Any:
        return speak()

    @classmethod
    @trainable("class")
    def make(cls) -> Any:
        return speak(cls.name)

    @property
    @trainable("prop")
    def prop(self) -> Any:
        return speak(self.name)

    @trainable("wrapt")
    @passing
    def decorated(self) -> Any:
        return speak(self.name)

    @trainable("cached")
    @functools.lru_cache  # noqa: B019
    def cached(self) -> Any:
        return speak(self.name)


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda it: it.plan("x"), ("agents", "plan", "x", "plan")),
        (lambda it: it.static(), ("static",)),
        (lambda it: it.make(), ("agents", "class")),
        (lambda it: it.prop, ("agents", "prop")),
        (lambda it: it.decorated(), ("agents", "wrapt")),
        (lambda it: it.cached(), ("agents", "cached")),
        (lambda it: type(it).cached(it), ("agents", "cached")),
        (lambda it: functools.partial(it.plan)(), ("agents", "plan", "plan")),
    ],
)
def test_members_of_classes(call: Callable[[Any], Any], expected: Any) -> None:
    with rollout():
        assert call(Agents()) == expected


@pytest.mark.parametrize(
    "descriptor", [property(plain), functools.cached_property(plain), functools.singledispatchmethod(plain)]
)
def test_a_mark_goes_below_a_property(descriptor: Any) -> None:
    kind = type(descriptor).__name__
    with pytest.raises(ConfigError, match=f"found a {kind}, expected the function in it: put @trainable below @{kind}"):
        trainable(descriptor)


def test_a_wrapper_of_a_marked_function_is_not_marked() -> None:
    inner = trainable(plain, name="inner")

    @functools.wraps(inner)
    def wrapper() -> Any:
        return (*speak(), *inner())

    assert get_mark(wrapper) is None
    outer = trainable(wrapper, name="outer")
    assert [mark.name for mark in map(get_mark, (inner, outer)) if mark] == ["inner", "outer"]
    with rollout():
        assert outer() == ("outer", "inner")


@pytest.mark.parametrize("name", list(MARKED))
def test_marked_objects_copy_and_pickle(name: str) -> None:
    marked = MARKED[name]
    for copied in (copy.copy(marked), copy.deepcopy(marked), pickle.loads(pickle.dumps(marked))):
        mark = get_mark(copied)
        assert mark is not None
        assert mark.name == name
        with rollout():
            assert copied("hello")[-2:] == ("hello", name)


def test_marked_objects_run_in_a_spawned_process() -> None:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        found = pool.map(run_pickled, [pickle.dumps(marked) for marked in MARKED.values()])
    assert [(said[-2:], mark) for said, mark in found] == [(("hello", name), name) for name in MARKED]


def test_a_builtin_stays_what_it_is() -> None:
    assert builtin([1]) == 1
    assert pickle.loads(pickle.dumps(builtin))([1]) == 1
    assert inspect.isbuiltin(builtin)


def test_lambdas_pickle_with_cloudpickle(monkeypatch: pytest.MonkeyPatch) -> None:
    cloudpickle = pytest.importorskip("cloudpickle")
    data = cloudpickle.dumps(trainable(lambda: speak("lambda"), name="cloudpickled"))
    monkeypatch.setattr(sys.modules["lightning_core.capture.marks"], "_marked", {})
    loaded = pickle.loads(data)
    assert list(marked_agents()) == ["cloudpickled"]
    assert get_mark(loaded) == marked_agents()["cloudpickled"]
    with rollout():
        assert loaded() == ("lambda", "cloudpickled")
