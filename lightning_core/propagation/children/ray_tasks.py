"""Propagates a rollout's scope into Ray's tasks and the method calls of actors.

Ray is patched once a program has imported it. Inside a rollout, a task is submitted as a task that enters the scope and calls the
function, and a method call as ``__ray_call__``, with which Ray runs a function on any actor, older ones included. That cannot await,
so the methods of actors that may be asynchronous are not bound. Constructors are not bound either.

Private: ``RemoteFunction._remote``, ``ActorHandle._actor_method_call`` and the attributes used below, seen in Ray 2.60,
https://github.com/ray-project/ray/tree/ray-2.60.0/python/ray (remote_function.py, actor.py).
"""

from __future__ import annotations

import importlib
import inspect
import logging
import weakref
from collections.abc import Callable, Generator
from typing import Any

from lightning_core.capture.context import without_scope
from lightning_core.capture.import_hooks import when_imported
from lightning_core.capture.patching import Patches
from lightning_core.capture.scope import current_rollout
from lightning_core.propagation.children.scope import ChildScope, child_scope

logger = logging.getLogger(__name__)

_CALL = "__ray_call__"

_carriers: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
"""The function that runs each remote function in a scope. Ray exports each function once."""
_warned: set[str] = set()


def _entering(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, with a scope as its first argument, in which it runs."""
    if inspect.isgeneratorfunction(function):

        def generate(scope: ChildScope, /, *args: Any, **kwargs: Any) -> Generator[Any]:
            with scope():
                yield from function(*args, **kwargs)

        entering: Callable[..., Any] = generate
    else:

        def call(scope: ChildScope, /, *args: Any, **kwargs: Any) -> Any:
            with scope():
                return function(*args, **kwargs)

        entering = call
    # Not functools.wraps: Ray reads the signature, which must be this function's.
    for name in ("__module__", "__name__", "__qualname__", "__doc__"):
        setattr(entering, name, getattr(function, name))
    return entering


def _call_method(actor: Any, scope: ChildScope, method: str, /, *args: Any, **kwargs: Any) -> Any:
    """Runs on the actor."""
    with scope():
        return getattr(actor, method)(*args, **kwargs)


def _remote(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
    """``RemoteFunction._remote(args, kwargs, …)``: submits a task."""
    if current_rollout() is None or instance._is_cross_language:
        return wrapped(*args, **kwargs)
    given: dict[str, Any] = {
        **dict(zip(("args", "kwargs", "serialized_runtime_env_info"), args, strict=False)),
        **kwargs,
    }
    inspect.signature(instance._function).bind(*(given.get("args") or ()), **(given.get("kwargs") or {}))
    if (carrier := _carriers.get(instance)) is None:
        carrier = type(instance)(
            instance._language, _entering(instance._function), None, dict(instance._default_options)
        )
        _carriers[instance] = carrier
    given["args"] = [child_scope(), *(given.get("args") or ())]
    with without_scope():
        return carrier._remote(**given)


def _actor_method_call(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
    """``ActorHandle._actor_method_call(method_name, args, kwargs, …)``: submits a method call."""
    if current_rollout() is None or instance._ray_is_cross_language:
        return wrapped(*args, **kwargs)
    given: dict[str, Any] = {**dict(zip(("method_name", "args", "kwargs", "name"), args, strict=False)), **kwargs}
    method, signatures = given["method_name"], instance._ray_method_signatures
    if len(args) > 4 or _CALL not in signatures or (method.startswith("__") and method.endswith("__")):
        return wrapped(*args, **kwargs)
    if instance._ray_allow_out_of_order_execution or instance._ray_method_is_generator.get(method):
        _warn(method)
        return wrapped(*args, **kwargs)
    positional, named = given.get("args") or (), given.get("kwargs") or {}
    # For the error that the method itself would raise here.
    importlib.import_module("ray._common.signature").flatten_args(signatures[method], positional, named)
    given |= {
        "method_name": _CALL,
        "name": given.get("name") or method,
        "args": [_call_method, child_scope(), method, *positional],
    }
    with without_scope():
        return wrapped(**given)


def _warn(method: str) -> None:
    if method not in _warned:
        _warned.add(method)
        logger.warning(
            "the Ray actor method %r is asynchronous, concurrent or a generator: Lightning does not route its model calls. Pass it "
            "a function bound with lightning_core.propagation.bind_for_process, or make the calls in a task",
            method,
        )


def install_ray(patches: Patches) -> None:
    """Make Ray's tasks and actors run in the scope that called them, once Ray is imported."""

    def wrap(module: object) -> None:
        patches.wrap(importlib.import_module("ray.remote_function"), "RemoteFunction._remote", _remote)
        patches.wrap(importlib.import_module("ray.actor"), "ActorHandle._actor_method_call", _actor_method_call)

    when_imported(patches, "ray", wrap)
