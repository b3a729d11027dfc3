"""Marked objects of a module, which pickle by reference or with what they wrap, for `test_trainable_objects`."""

from __future__ import annotations

import functools
import pickle
from typing import Any

from lightning_core import rollout, trainable
from lightning_core.capture import current_address
from lightning_core.capture.mark import get_mark


def speak(*words: str) -> Any:
    address = current_address()
    return (*words, None if address is None else address.agent)


class Speaker:
    def __init__(self, word: str = "object") -> None:
        self.word = word

    def __call__(self, *words: str) -> Any:
        return speak(self.word, *words)

    def say(self, *words: str) -> Any:
        return speak(self.word, *words)


@trainable("decorated")
def decorated(*words: str) -> Any:
    return speak(*words)


@trainable("cached")
@functools.lru_cache
def cached(*words: str) -> Any:
    return speak(*words)


partial = trainable(functools.partial(speak, "partial"), name="partial")
instance = trainable(Speaker(), name="instance")
method = trainable(Speaker().say, name="method")
builtin = trainable(len, name="builtin")

MARKED = {"decorated": decorated, "cached": cached, "partial": partial, "instance": instance, "method": method}


def run_pickled(data: bytes) -> tuple[Any, str]:
    """What the pickled agent says in a rollout of this process, and the name of its mark."""
    agent = pickle.loads(data)
    with rollout():
        said = agent("hello")
    mark = get_mark(agent)
    assert mark is not None
    return said, mark.name
