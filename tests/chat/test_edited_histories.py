"""Random edits of histories, compared with a slow model that keeps everything: the tokens are those that were sampled, and the context
and its cause are right."""

from __future__ import annotations

import gc
import json
import random
import re
import tracemalloc
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from lightning_core.capture.address import Address
from lightning_core.chat.chat import Memory, RenderedPrompt
from lightning_core.chat.history.conversations import CHANGES, cause_of
from lightning_core.chat.tool_calls.tool_formats import FORMATS, ToolCall
from lightning_core.dialects import openai_chat
from lightning_core.endpoint.agents.routing import Routing
from lightning_core.endpoint.prompts import render_prompts
from lightning_core.endpoint.sessions import Session
from tests.chat.chat_families import FAMILIES, Family, encode, make_chat, make_tokenizer

Message = dict[str, Any]
BY_FORMAT = {form.name: form for form in FORMATS}
TEMPLATES = ("chatml", "qwen2_5", "qwen3", "smollm3", "llama3_1", "gemma3", "mistral_v7", "phi4")


@dataclass(eq=False)
class Sampled:
    """A call, and what the client sent for it. ``history``: the calls that the responses in its prompt are, and the other messages."""

    history: tuple[Any, ...]
    tools: Any
    sent: list[Message]
    response: Message
    ids: list[int]
    stopped: bool


@dataclass
class Rollout:
    """An agent that edits its histories, and the slow model."""

    family: Family
    chance: random.Random
    calls: list[Sampled] = field(default_factory=list[Sampled])

    def __post_init__(self) -> None:
        self.chat = make_chat(self.family)
        self.session = Session(root=Address(rollout="1" * 32, span="2" * 16), routing=Routing(), seed=None)

    def histories(self, sent: list[Message], tools: Any) -> list[tuple[Any, ...]]:
        """All that ``sent`` can be: a response is a call with its text and after the same history, if there is one."""
        states: list[tuple[Any, ...]] = [()]
        for message in sent:
            if message["role"] != "assistant":
                states = [(*s, (message["role"], message["content"])) for s in states]
                continue
            fit = [c for c in self.calls if c.tools == tools and says(message, c.response) and c.history in states]
            same = [c for c in fit if ids_of(c.response) and ids_of(c.response) == ids_of(message)]
            shown = ("given", spoken(message), message.get("reasoning_content"))
            states = [(*c.history, c) for c in same or fit] or [(*s, shown) for s in states]
        return states

    def ask(self, sent: list[Message], tools: Any) -> tuple[str, str | None, Sampled]:
        """Sample a response to ``sent``, and check its prompt; return the context, its cause, and the call."""
        body = {"model": "m", "messages": sent, **({"tools": tools} if tools else {})}
        request = openai_chat.parse_request(json.loads(json.dumps(body)), conversations={})
        (prompt,) = render_prompts(self.chat, request, self.session, "agent")
        ids, text = list(prompt.ids), prompt.text
        states = self.histories(sent, tools)
        last = [next((m for m in reversed(state) if isinstance(m, Sampled)), None) for state in states]
        cause = cause_of(prompt.reason)
        continued = [s for s, c in zip(states, last, strict=True) if c is None or ids[: len(c.ids)] == c.ids]
        encoded = ids == encode(self.family, text)
        if last[0] is None:
            assert prompt.context == "new"
            assert encoded
            assert cause is not None or not any(m["role"] == "assistant" for m in sent)
            history = states[0]
        elif cause == "template" and prompt.context == "forked":
            assert encoded
            assert self.family.reasons
            history = continued[-1] if continued else states[-1]
        else:
            assert continued, "it starts with the tokens of a call that it may continue"
            history = continued[-1]
            assert squeeze(str(make_tokenizer(self.family).decode(ids))) == squeeze(text)
            self.check_context(prompt.context, prompt.reason, history, sent, ambiguous=len(states) > 1)
        return prompt.context, cause, self.respond(prompt, sent, tools, history)

    def check_context(
        self, context: str, reason: str | None, history: tuple[Any, ...], sent: list[Message], *, ambiguous: bool
    ) -> None:
        at = max(i for i, message in enumerate(history) if isinstance(message, Sampled))
        call, later = history[at], history[at + 1 :]
        cause = cause_of(reason)
        replaced = [c for c in self.calls if c.history[: at + 1] == history[: at + 1]]
        if any(isinstance(m, tuple) and m[0] == "given" for m in later) and replaced:
            assert context == "forked"
            assert cause in CHANGES
        elif call.stopped:
            assert (context, cause) == ("forked", "stopped")
        else:
            back = sent[at]
            same = (back.get("content") or "") == (call.response.get("content") or "")
            assert context in (("realigned",) if ambiguous or not same else ("clean", "realigned")), reason
            assert ambiguous or not same or reason is None or cause == "template"

    def respond(self, prompt: Any, sent: list[Message], tools: Any, history: tuple[Any, ...]) -> Sampled:
        """Sample a response: few texts, so the same one is often sampled again, with other tokens or reasoning."""
        chance = self.chance
        word = chance.choice(["yes", "no"])
        if tools and chance.random() < 0.6:
            answer = BY_FORMAT[self.family.format].write([ToolCall("add", {"a": word})])
        else:
            answer = chance.choice([word, f" {word}\n"])
        thought = chance.choice(["hm", "so"]) if self.family.reasons and chance.random() < 0.5 else None
        if thought is not None:
            answer = f"<think>\n{thought}\n</think>\n\n{answer.strip()}"
        stopped = chance.random() < 0.15
        stop = self.family.stops[-1]
        output = encode(self.family, f"{answer}{'.' if stopped else stop}", letter_by_letter=chance.random() < 0.5)
        text = self.chat.text(output)
        visible = text[:-1] if stopped else text
        response = self.chat.read(visible, tools=bool(tools), thinking=prompt.thinking, declared=tools or ())
        place = self.chat.remember(prompt, output, response, self.session.memory, stopped=visible if stopped else None)
        self.session.prompts.add("agent", prompt, place)
        ids = [*prompt.ids, *output[: len(output) - stopped]]
        made = Sampled(history, tools, sent, response, ids, stopped)
        known = [c for c in self.calls if (c.history, c.ids, c.stopped, c.tools) == (history, ids, stopped, tools)]
        if known:
            return replace(known[0], sent=sent, response=response)
        if place.turn is not None:
            self.calls.append(made)
        return made

    def echo(self, call: Sampled) -> Message:
        """The response as one of many clients sends it back."""
        back: Message = json.loads(json.dumps(call.response))
        if self.chance.random() < 0.5:
            back.pop("reasoning_content", None)
        if self.chance.random() < 0.3:
            back["content"] = (back.get("content") or "").strip()
        if back.get("tool_calls") and self.chance.random() < 0.3:
            for made in back["tool_calls"]:
                made["id"] = f"call_{self.chance.randrange(1000)}"
                made["function"]["arguments"] = json.dumps(json.loads(made["function"]["arguments"]), indent=1)
        return back

    def follow(self, call: Sampled) -> list[Message]:
        """The history of ``call`` with its response and what comes next."""
        back = self.echo(call)
        results = [
            {"role": "tool", "tool_call_id": made["id"], "content": "the sum is forty"}
            for made in back.get("tool_calls") or ()
        ]
        return [*call.sent, back, *(results or [{"role": "user", "content": self.chance.choice(["more", "go on"])}])]

    def edit(self, sent: list[Message]) -> list[Message]:
        """``sent`` with a change of one earlier message, which clients make for many reasons."""
        edited: list[Message] = json.loads(json.dumps(sent))
        at = self.chance.randrange(len(edited) - 1) if len(edited) > 1 else 0
        message = edited[at]
        if message["role"] == "tool":
            message["content"] = "[cleared]"
        elif message["role"] == "assistant" and message.get("reasoning_content"):
            message["reasoning_content"] += " or not"
        elif message["role"] == "assistant" and not message.get("tool_calls"):
            message["content"] = "another answer"
        elif message["role"] != "assistant":
            message["content"] += " at 12:03"
        return edited


def spoken(message: Message) -> tuple[str, str]:
    calls = [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in message.get("tool_calls") or ()]
    return (message.get("content") or "").strip(), json.dumps(calls)


def says(message: Message, response: Message) -> bool:
    thought = message.get("reasoning_content")
    return spoken(message) == spoken(response) and (not thought or thought == response.get("reasoning_content"))


def ids_of(message: Message) -> list[str]:
    return [call["id"] for call in message.get("tool_calls") or ()]


def squeeze(text: str) -> str:
    """Without white space, and without the ids that Mistral's template writes into calls, which were not sampled here."""
    return re.sub(r',"id":"\w+"', "", "".join(text.split()))


TOOLS = [
    {"type": "function", "function": {"name": name, "description": "d", "parameters": {"type": "object"}}}
    for name in ("add", "search")
]


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("seed", range(3))
def test_edited_histories_continue_what_was_sampled(name: str, seed: int) -> None:
    walk(name, seed)


@pytest.mark.long
@pytest.mark.parametrize("name", TEMPLATES)
def test_many_edited_histories_continue_what_was_sampled(name: str) -> None:
    for seed in range(3, 40):
        walk(name, seed)


def walk(name: str, seed: int) -> None:
    chance = random.Random(f"{name} {seed}")
    rollout = Rollout(next(family for family in FAMILIES if family.name == name), chance)
    tools = TOOLS[:1] if chance.random() < 0.6 else None
    asked = [rollout.ask([{"role": "user", "content": "go"}], tools)[2]]
    for _ in range(12):
        call = asked[-1] if chance.random() < 0.6 else chance.choice(asked)
        choice = chance.random()
        if choice < 0.15:  # the same prompt again
            asked.append(rollout.ask(call.sent, call.tools)[2])
        elif choice < 0.35:
            asked.append(rollout.ask(rollout.edit(rollout.follow(call)), call.tools)[2])
        elif choice < 0.4 and call.tools:
            asked.append(rollout.ask(rollout.follow(call), TOOLS)[2])
        else:
            asked.append(rollout.ask(rollout.follow(call), call.tools)[2])


def test_the_reasoning_that_came_back_tells_which_of_two_equal_answers_is_continued() -> None:
    family = next(family for family in FAMILIES if family.name == "smollm3")
    chat, memory = make_chat(family), Memory()
    user = {"role": "user", "content": "go"}
    prompt = chat.render([user], None, memory)
    sampled: dict[str, list[int]] = {}
    for thought in ("hm", "so"):
        output = encode(family, f"<think>\n{thought}\n</think>\n\nyes<|im_end|>")
        chat.remember(prompt, output, chat.parse(output, tools=False), memory)
        sampled[thought] = [*prompt.ids, *output]

    def later(**reasoning: str) -> RenderedPrompt:
        return chat.render([user, {"role": "assistant", "content": "yes", **reasoning}, user], None, memory)

    for thought, ids in sampled.items():
        found = later(reasoning_content=thought)
        assert found.context == "clean"
        assert found.ids[: len(ids)] == ids
    latest = later()
    assert latest.ids[: len(sampled["so"])] == sampled["so"]
    assert (latest.context, latest.reason) == (
        "realigned",
        "ambiguous: message 1 (assistant) was sampled 2 times with the same text and other tokens; the prompt continues the latest",
    )
    edited = later(reasoning_content="hm, no")
    assert (edited.context, list(edited.ids)) == ("new", encode(family, edited.text))
    assert "hm, no" in edited.text


@pytest.mark.parametrize("name", ["mistral_v3", "mistral_v7"])
def test_a_client_that_gives_an_id_in_each_turn_may_edit_a_later_call(name: str) -> None:
    """The first call was sampled and has a recorded id, the second was edited: its result keeps the id of its own call."""
    family = next(family for family in FAMILIES if family.name == name)
    chat, memory = make_chat(family), Memory()

    def sample(prompt: RenderedPrompt, text: str) -> Message:
        output = encode(family, f"{text}</s>", letter_by_letter=True)
        response = chat.parse(output, tools=True)
        chat.remember(prompt, output, response, memory)
        return response

    def turn(arguments: str, result: str) -> list[Message]:
        call = {"id": "call_0", "type": "function", "function": {"name": "add", "arguments": arguments}}
        called = {"role": "assistant", "content": "", "tool_calls": [call]}
        return [called, {"role": "tool", "name": "add", "tool_call_id": "call_0", "content": result}]

    history: list[Message] = [{"role": "user", "content": "go"}]
    prompt = chat.render(history, TOOLS, memory)
    (sampled,) = sample(prompt, '[TOOL_CALLS][{"name": "add", "arguments": {"x": 1}, "id": "abcdefghi"}]')["tool_calls"]
    history += [*turn('{"x": 1}', "first result"), *turn('{"x": 2}', "second result")]
    for _ in range(2):  # the messages are new, then they are known
        prompt = chat.render(history, TOOLS, memory)
        assert prompt.context != "new"
        assert [m["tool_call_id"] for m in prompt.messages if m["role"] == "tool"] == [sampled["id"], "call_0"]
        ids = re.findall(
            r'"id": ?"(\w{9})"|"call_id": ?"(\w{9})"|\[CALL_ID\](\w{9})|\[TOOL_RESULTS\](\w{9})', prompt.text
        )
        called, answered, called_again, answered_again = ("".join(found) for found in ids)
        assert called == answered == sampled["id"]
        assert called_again == answered_again != called
        history.append(sample(prompt, "done"))
        history.append({"role": "user", "content": "more"})


@pytest.mark.parametrize("ids", [("x", "x", "x"), ("ls", "ls", "cat"), ("", "", "")])
def test_results_of_calls_with_one_id_are_in_the_order_of_the_calls(ids: tuple[str, ...]) -> None:
    """Some clients take the name of a function as the id of its calls."""
    family = next(family for family in FAMILIES if family.name == "qwen2_5")
    chat, memory = make_chat(family), Memory()
    history: list[Message] = [{"role": "user", "content": "go"}]
    prompt = chat.render(history, TOOLS, memory)
    written = [f'<tool_call>\n{{"name": "add", "arguments": {{"x": {n}}}}}\n</tool_call>' for n in range(3)]
    output = encode(family, "\n".join(written) + "<|im_end|>", letter_by_letter=True)
    response = chat.parse(output, tools=True)
    chat.remember(prompt, output, response, memory)
    calls = [{**call, "id": sent} for call, sent in zip(response["tool_calls"], ids, strict=True)]
    results = [{"role": "tool", "tool_call_id": sent, "content": f"result {n}"} for n, sent in enumerate(ids)]
    history += [{**response, "tool_calls": calls}, *results]
    for _ in range(2):  # the messages are new, then they are known
        prompt = chat.render(history, TOOLS, memory)
        assert prompt.context != "new"
        answered = [m["tool_call_id"] for m in prompt.messages if m["role"] == "tool"]
        assert answered == [call["id"] for call in response["tool_calls"]]
        assert "[no result]" not in prompt.text
        assert re.findall(r"result (\d)", prompt.text) == ["0", "1", "2"]


def test_each_message_and_token_of_a_long_conversation_is_kept_once() -> None:
    """40 turns of about 750 tokens each; the messages are parsed anew for each request."""
    family = next(family for family in FAMILIES if family.name == "qwen2_5")
    chat, memory, chance = make_chat(family), Memory(), random.Random(1)
    messages: list[Message] = [{"role": "user", "content": "go"}]
    counted: list[int] = []
    tokens: list[int] = []
    tracemalloc.start()
    try:
        for turn in range(40):
            prompt = chat.render(json.loads(json.dumps(messages)), TOOLS, memory)
            response = {"role": "assistant", "content": f"answer {turn}"}
            place = chat.remember(prompt, encode(family, f"answer {turn}<|im_end|>"), response, memory)
            assert prompt.context == ("clean" if turn else "new")
            del prompt
            messages += [response, {"role": "user", "content": "".join(chance.choices("the answer ", k=2000))}]
            tokens.append(place.turn.kept.length if place.turn else 0)
            if turn in (19, 39):
                gc.collect()
                counted.append(tracemalloc.get_traced_memory()[0] - sum(len(m["content"]) for m in messages))
    finally:
        tracemalloc.stop()
    half = tokens[39] - tokens[19]
    assert half > 10_000
    per_token = (counted[1] - counted[0]) / half
    assert per_token < 12, "bytes a token"
