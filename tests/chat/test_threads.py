"""The state of a rollout is read and written by several threads at once: the event loop's, and those of large work."""

from __future__ import annotations

import gc
import random
import sys
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from lightning_core.capture.address import Address
from lightning_core.chat.chat import Chat, Memory, RenderedPrompt
from lightning_core.chat.history.conversations import Conversations
from lightning_core.chat.history.turns import TextPrint, Turn
from lightning_core.endpoint.agents.routing import Routing
from lightning_core.endpoint.sample import _seed  # pyright: ignore[reportPrivateUsage]
from lightning_core.endpoint.sessions import Session
from tests.chat.chat_families import encode, make_tokenizer
from tests.chat.native_templates import family
from tests.chat.test_new_text import Conversation, parts

THREADS = 3


@pytest.fixture(autouse=True)
def _switching() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def at_once(work: Callable[[int], Any]) -> list[Any]:
    """The results of ``work`` in threads that begin together, by the number of the thread."""
    ready = Barrier(THREADS)

    def run(number: int) -> Any:
        ready.wait()
        return work(number)

    with ThreadPoolExecutor(THREADS) as threads:
        return list(threads.map(run, range(THREADS)))


def unquoted(value: Any) -> Any:
    return value


def turn(memory: Memory, text: str, ids: list[int]) -> Turn:
    kept = memory.content.keep_ids(np.array(ids, "<u4"))
    return Turn(kept=kept, text=TextPrint(text), unmarked=frozenset(), thinking=False, ended=True, stopped=False)


def test_conversations_are_found_while_others_are_added():
    prompts, memory = Conversations(rollout="1" * 32), Memory()

    def converse(thread: int) -> None:
        for number in range(50):
            sent = [{"role": "user", "content": f"{thread} {number}"}]
            for length in range(2):
                place = memory.find(memory.root(""), sent, unquoted).place
                answer = {"role": "assistant", "content": f"{thread} {number} {length}"}
                prompt = RenderedPrompt(
                    ids=[1], write=str, messages=tuple(p.message for p in place.path()), place=place
                )
                added = memory.add(place, answer, turn(memory, "x", [thread, number, length]), unquoted)
                agent = f"agent {thread} {number % 40}"
                prompts.add(agent, prompt, added)
                if length:
                    assert prompts.explain("another", prompt).startswith("handoff")
                sent = [*sent, answer, {"role": "user", "content": "go on"}]
                assert memory.find(memory.root(""), sent[:-1], unquoted).place is added

    at_once(converse)


def test_the_only_message_is_looked_for_while_another_is_added():
    memory = Memory()
    roots = [memory.root(str(number)) for number in range(400)]

    def add_or_look(thread: int) -> None:
        for root in roots:
            if thread:
                place = memory.find(root, [{"role": "user", "content": str(thread)}], unquoted).place
                memory.add(place, {"role": "assistant"}, None, unquoted)
            else:
                for _ in range(1000):
                    if root.only() is None and root.below:
                        break

    at_once(add_or_look)
    assert {root.only() for root in roots} == {None}


def test_an_agent_keeps_the_conversations_of_all_threads():
    prompts, memory = Conversations(rollout="1" * 32), Memory()

    def add(thread: int) -> None:
        for number in range(300):
            for turn in range(2):
                place = memory.find(memory.root(""), [{"role": "user", "content": f"{thread} {turn}"}], unquoted).place
                prompt = RenderedPrompt(ids=[1], write=str, place=place)
                prompts.add(str(number), prompt, memory.add(place, {"role": "assistant"}, None, unquoted))

    at_once(add)
    kept = prompts._latest.values()  # pyright: ignore[reportPrivateUsage]
    assert {len(conversations) for conversations in kept} == {2 * THREADS}


def test_each_repeat_of_a_prompt_has_a_seed_of_its_own():
    session = Session(root=Address(rollout="1" * 32, span="2" * 16), routing=Routing(), seed=7)
    prompt: Any = SimpleNamespace(ids=[1])
    seeds = at_once(lambda _: {_seed(session, prompt) for _ in range(5000)})
    assert len(set[int | None]().union(*seeds)) == 5000 * THREADS


def test_branches_of_one_turn_are_rendered_and_recorded_at_once():
    own = family("similar to qwen2_5")
    tokenizer: Any = make_tokenizer(own)
    chat = Chat(tokenizer)
    conversation = Conversation(own, chat, random.Random(0), tools=False, compare=False)
    output = encode(own, f"x{own.stops[-1]}")
    for _ in range(12):
        conversation.turn(wild=0, texts=("x",))
        latest = conversation.messages[:-1]

        def branch(thread: int, latest: list[Any] = latest) -> tuple[list[Any], RenderedPrompt]:
            sent = [*latest, {"role": "user", "content": f"branch {thread}"}]
            prompt = chat.render(sent, None, conversation.memory)
            chat.remember(prompt, output, {"role": "assistant", "content": "x"}, conversation.memory)
            return sent, prompt

        for sent, prompt in at_once(branch):
            assert parts(prompt) == parts(chat.render(sent, None, conversation.memory))


def test_clients_that_choose_many_names_do_not_fill_the_memory():
    prompts = Conversations(rollout="1" * 32)
    contents: list[weakref.ref[Any]] = []
    for number in range(600):
        memory = Memory()
        contents.append(weakref.ref(memory.content))
        place = memory.find(memory.root(""), [{"role": "user", "content": "x"}], unquoted).place
        prompt = RenderedPrompt(ids=[1], write=str, messages=tuple(p.message for p in place.path()), place=place)
        answer = {"role": "assistant", "content": str(number)}
        prompts.add(f"agent {number}", prompt, memory.add(place, answer, turn(memory, "x", [number]), unquoted))
    del memory, place, prompt
    gc.collect()
    assert sum(content() is not None for content in contents) == 512
