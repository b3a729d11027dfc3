"""The stateful tools of one rollout, and the wheel's verdict on the calls that were made.

The wheel keeps the instances of its classes in the globals of a module, under names made of the model and the task. Two rollouts of a
task would share them. Here each `World` keeps its own instances, and puts them there for the duration of one call, under a lock.

The wheel evaluates calls as Python source. That source is made here, from a known name, checked argument names and the ``repr`` of JSON
values, so a model cannot have other code evaluated.
"""

from __future__ import annotations

import ast
import json
import keyword
import threading
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

from examples.bfcl.wheel import entries, gold, multi_turn_checker, multi_turn_utils

MAX_MAGNITUDE = 1000
"""Limit of the arguments in `_COSTLY`: with 10⁹, one call would take all time and memory."""

_COSTLY = {"power": "exponent", "logarithm": "precision", "square_root": "precision", "round_number": "decimal_places"}
SHARED_LISTS = {"post_tweet": ("content", "tags", "mentions")}
"""Functions with lists as defaults, and their parameters. ``mention`` appends to such a list, which all rollouts would share."""
_MODEL = "rollout"
_LOCK = threading.Lock()


class World:
    """The instances of a task's classes, and the calls made, by turn."""

    def __init__(self, task_id: str, functions: tuple[str, ...]) -> None:
        self._entry, self._gold = entries()[task_id], gold()[task_id]
        self._functions = frozenset(functions)
        self._instances: dict[str, Any] = {}
        self.calls: list[list[str]] = []

    def begin_turn(self) -> None:
        """Start a turn; the following calls belong to it."""
        self.calls.append([])

    def call(self, name: str, arguments: str) -> str:
        """Call a function with a JSON object of arguments; return its result, or the error, as the model gets it."""
        if name not in self._functions:
            return json.dumps({"error": f"there is no function {name!r}"})
        try:
            source = _source(name, _checked(name, json.loads(arguments or "{}")))
        except ValueError as error:
            return json.dumps({"error": f"invalid arguments: {error}"})
        with _only(self._instances):
            (result,), _ = multi_turn_utils.execute_multi_turn_func_call(
                func_call_list=[source],
                initial_config=self._entry["initial_config"],
                involved_classes=self._entry["involved_classes"],
                model_name=_MODEL,
                test_entry_id=self._entry["id"],
                is_evaL_run=True,  # the checker's names of instances
            )
        self.calls[-1].append(source)
        return result

    def verdict(self) -> dict[str, Any]:
        """The wheel's verdict on all turns so far: ``valid``, and without it ``error_type`` and ``error_message``.

        A turn with a wrong end is wrong for good: later calls cannot make it valid.
        """
        with _only({}):
            return multi_turn_checker.multi_turn_checker(
                [[[call] for call in turn] for turn in self.calls],
                [[_without_shared_lists(call) for call in turn] for turn in self._gold[: len(self.calls)]],
                self._entry,
                "multi_turn_base",
                _MODEL,
            )


@contextmanager
def _only(instances: dict[str, Any]) -> Generator[None]:
    """Make ``instances`` those that the wheel knows, and add to them what it creates meanwhile."""
    module: dict[str, Any] = multi_turn_utils.__dict__
    with _LOCK:
        before = set(module)
        module.update(instances)
        try:
            yield
        finally:
            for name in module.keys() - before:
                instances[name] = module.pop(name)


def _checked(name: str, arguments: object) -> dict[str, Any]:
    """``arguments`` if they are named arguments of bounded size; raises ValueError otherwise."""
    if not isinstance(arguments, dict):
        raise ValueError("expected an object")
    for key in arguments:
        if not key.isidentifier() or keyword.iskeyword(key):
            raise ValueError(f"{key!r} is not the name of an argument")
    value = arguments.get(_COSTLY.get(name, ""), 0)
    # Not a text either, which `mpmath` would convert.
    if not isinstance(value, int | float) or not abs(value) <= MAX_MAGNITUDE:
        raise ValueError(f"{_COSTLY[name]} must be a number between {-MAX_MAGNITUDE} and {MAX_MAGNITUDE}")
    return arguments


def _source(name: str, arguments: Mapping[str, Any]) -> str:
    written = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
    return _without_shared_lists(f"{name}({written})")


def _without_shared_lists(source: str) -> str:
    """The call with new lists in place of those that are defaults of its function."""
    name = source.partition("(")[0].strip()
    if name not in SHARED_LISTS:
        return source
    call = ast.parse(source, mode="eval").body
    assert isinstance(call, ast.Call)
    given = {*SHARED_LISTS[name][: len(call.args)], *(item.arg for item in call.keywords)}
    for parameter in SHARED_LISTS[name][1:]:
        if parameter not in given:
            call.keywords.append(ast.keyword(arg=parameter, value=ast.List(elts=[], ctx=ast.Load())))
    return ast.unparse(call)
