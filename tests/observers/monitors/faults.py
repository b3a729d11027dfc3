"""Small agents and settings with one fault each, and healthy ones, for training runs of a few seconds."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from openai import BadRequestError, OpenAI

from lightning_core import trainable
from lightning_core.credit import Episode
from lightning_core.observers.progress import SilentProgress
from lightning_core.trace import Call
from tests.bandit import client, talk

Task = dict[str, Any]
Sections = dict[str, dict[str, Any]]
NamedBy = Literal["monitor", "configuration", "error", "warning"]

VOWELS = frozenset("aeiou")
SHORT, LONG, SINGLE = "[a-h]{1,6}", "[a-d]{1,80}", "[a-h]"


def answer(messages: Sequence[Any], pattern: str = SHORT) -> str:
    """The model's answer, which matches ``pattern``: a random model would not end its responses."""
    schema = {"type": "string", "pattern": f"^{pattern}$"}
    made: Any = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
    reply = client.chat.completions.create(model="gpt", messages=list(messages), response_format=made)
    return reply.choices[0].message.content or ""


@trainable("talker")
def say(task: Task, pattern: str = SHORT) -> str:
    return answer([{"role": "user", "content": task["prompt"]}], pattern).strip('"')


def vowels(text: str) -> float:
    """The share of vowels in an answer."""
    return sum(c in VOWELS for c in text) / len(text) if text else 0.0


def wanted(task: Task, text: str) -> float:
    """The share of vowels, or of other letters for every second task: no answer is good for all."""
    return vowels(text) if int(task["id"][1:]) % 2 else 1 - vowels(text)


def healthy(task: Task) -> float:
    return wanted(task, say(task))


@trainable("talker")
def converse(task: Task, *, rewrite: bool = False) -> float:
    """Three turns of one conversation. ``rewrite``: the agent changes what it keeps of each response."""
    messages: list[Any] = [{"role": "user", "content": task["prompt"]}]
    values: list[float] = []
    for _ in range(3):
        text = answer(messages)
        values.append(wanted(task, text.strip('"')))
        kept = f"I said {text}" if rewrite else text
        messages += [{"role": "assistant", "content": kept}, {"role": "user", "content": "again"}]
    return sum(values) / 3


def healthy_with_failures(task: Task) -> float:
    """A conversation. One task fails, and one has equal rewards."""
    value = converse(task)
    if task["id"] == "t1":
        raise RuntimeError("this task never works")
    return 0.5 if task["id"] == "t2" else value


def constant(task: Task) -> float:
    say(task)
    return 0.5


def impossible(task: Task) -> float:
    return float(say(task) == "the answer")


def pays_for_length(task: Task) -> float:
    return len(say(task, LONG)) / 80


def pays_for_vowels(task: Task) -> float:
    return vowels(say(task))


def proxy(task: Task) -> float:
    """Training pays for vowels; what is wanted, and measured on held-out tasks, are the other letters."""
    share = vowels(say(task))
    return 1 - share if task.get("held_out") else share


def one_letter(task: Task) -> float:
    """Half of the reward can be earned, with a single letter."""
    return 0.5 * (say(task, SINGLE) == "e")


def characters(task: Task) -> float:
    """Free text: each of its tokens can change."""
    text = talk(task["prompt"])
    return sum(c.islower() for c in text) / 8


def always_raises(task: Task) -> float:
    raise RuntimeError("broken")


def mostly_raises() -> Callable[[Task], float]:
    """An agent whose tool fails in two of three rollouts."""
    rollouts = itertools.count()

    def solve(task: Task) -> float:
        value = healthy(task)
        if next(rollouts) % 3:
            raise RuntimeError("the tool returned nothing")
        return value

    return solve


def rewrites_history(task: Task) -> float:
    return converse(task, rewrite=True)


def provider_gone(task: Task) -> float:
    """A quarter of the tasks need another model, whose server is gone."""
    if int(task["id"][1:]) % 4 == 1:
        helper = OpenAI(api_key="any", base_url="http://127.0.0.1:9/v1", max_retries=0)
        helper.chat.completions.create(model="helper", messages=[{"role": "user", "content": task["prompt"]}])
    return healthy(task)


def catches_refusals(task: Task) -> float:
    """For every second task the agent sends a schema that is not supported, and takes the error for an empty answer."""
    if int(task["id"][1:]) % 2:
        return healthy(task)
    try:
        return wanted(task, say(task, "(?=a)[a-h]"))
    except BadRequestError:
        return 0.0


def caches() -> Callable[[Task], float]:
    """An agent that answers three of four rollouts from a cache."""
    rollouts = itertools.count()
    known: dict[str, float] = {}

    def solve(task: Task) -> float:
        if task["prompt"] in known and next(rollouts) % 4:
            return known[task["prompt"]]
        known[task["prompt"]] = healthy(task)
        return known[task["prompt"]]

    return solve


def returns_nan(task: Task) -> float:
    say(task)
    return float("nan")


def own_group(episode: Episode) -> list[str]:
    """A group key that no two attempts share."""
    return [episode.rollout for _ in episode.transitions]


def other_characters(call: Call, tools: object) -> float:
    """An intermediate reward for what the task does not want."""
    return 1 - vowels(str((call.response or {}).get("content") or "").strip('"'))


class Perturbing(SilentProgress):
    """Changes the trainer's weights after the rollouts and before the update.

    No setting produces this fault: samplers of other engines do, if their weights are not those of the trainer.
    """

    def phase(self, name: str, total: int | None = None) -> None:
        if name == "update":
            import torch

            with torch.no_grad():
                for found in gc.get_objects():
                    if type(found).__name__ == "LlamaForCausalLM":
                        found.lm_head.weight.mul_(1.2)


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault, and what must name it."""

    fault: str
    expected: frozenset[str]
    """Monitors, one of which must be raised; or a part of the error or warning."""
    by: NamedBy = "monitor"
    solve: Callable[[], Callable[[Task], float]] = lambda: healthy
    sections: Sections = field(default_factory=dict[str, dict[str, Any]])
    overlap: bool = False
    """Whether the held-out tasks are training tasks."""
    progress: type[SilentProgress] = SilentProgress


FEW: Mapping[str, Any] = {"group_size": 4}
"""The rollouts of a fault that shows in any of them."""


def _fault(fault: str, expected: str, solve: Callable[[Task], float] = healthy, **sections: Mapping[str, Any]) -> Fault:
    names = frozenset(expected.split(" | "))
    return Fault(fault=fault, expected=names, solve=lambda: solve, sections={k: dict(v) for k, v in sections.items()})


FAULTS: Sequence[Fault] = [
    _fault("the reward is the same for every response", "no_gradient", constant, rollouts=FEW),
    _fault("the tasks are too hard: no attempt earns anything", "no_gradient", impossible, rollouts=FEW),
    _fault("temperature 0.01: all attempts at a task are equal", "no_gradient", rollouts={**FEW, "temperature": 0.01}),
    _fault("the reward pays for length", "length_explosion", pays_for_length, rollouts={"max_tokens": 90},
           trainer={"learning_rate": 5e-3}),
    _fault("the training reward is not what is wanted", "reward_hacking", proxy, eval={"every": 5, "temperature": 1.0},
           trainer={"learning_rate": 5e-3}),
    _fault("a learning rate 100 times too high", "entropy_collapse | no_gradient | clipping", trainer={"learning_rate": 0.2}),
    _fault("an over-long run of a reward with a poor optimum", "entropy_collapse", one_letter,
           trainer={"learning_rate": 1e-2}, rollouts={"group_size": 16}),
    _fault("max_tokens cuts every response", "truncation", rollouts={**FEW, "max_tokens": 3}),
    Fault(fault="the agent raises in two of three rollouts", expected=frozenset({"failed_rollouts"}), solve=mostly_raises,
          sections={"rollouts": {**FEW}}),
    _fault("the provider of another agent is gone for a quarter of the tasks", "left_out", provider_gone,
           rollouts={**FEW, "retries": 0}),
    _fault("the agent takes a refused request for an empty answer", "caught_refusals", catches_refusals, rollouts=FEW),
    _fault("the agent rewrites its history in each turn", "forked_contexts", rewrites_history, rollouts=FEW),
    Fault(fault="the agent caches its answers", expected=frozenset({"no_calls"}), solve=caches, sections={"rollouts": {**FEW}}),
    _fault("a group key that no two attempts share", "single_attempt", rollouts=FEW,
           credit={"group_by": ["tests.observers.monitors.faults:own_group"]}),
    _fault("too many updates on the same rollouts", "clipping", characters, algorithm={"updates_per_step": 8},
           trainer={"learning_rate": 2e-2}, rollouts={"max_tokens": 8}),
    _fault("intermediate rewards outweigh the task's", "intermediate_rewards", pays_for_vowels,
           credit={"rewards": "discounted", "gamma": 1.0,
                   "air": {"rules": [{"function": "tests.observers.monitors.faults:other_characters", "weight": 5.0}]}},
           trainer={"learning_rate": 2e-4}),
    Fault(fault="the sampler's weights are not the trainer's", expected=frozenset({"sampler_mismatch"}),
          progress=Perturbing, sections={"trainer": {"max_logprob_difference": None}}),
    Fault(fault="temperature 0", by="configuration", expected=frozenset({"at 0 all attempts are equal"}),
          sections={"rollouts": {"temperature": 0.0}}),
    Fault(fault="one attempt per task", by="configuration", expected=frozenset({"compares attempts at one task"}),
          sections={"rollouts": {"group_size": 1}}),
    Fault(fault="the agent always raises", by="error", expected=frozenset({"the first error: RuntimeError: broken"}),
          solve=lambda: always_raises),
    Fault(fault="the reward is NaN", by="error", expected=frozenset({"returned nan"}), solve=lambda: returns_nan),
    Fault(fault="held-out tasks are training tasks", by="warning", expected=frozenset({"are also training tasks"}),
          overlap=True, sections={"trainer": {"steps": 1}}),
]  # fmt: skip

HEALTHY: Mapping[str, tuple[Callable[[Task], float], Mapping[str, Any]]] = {
    "one call": (healthy, {}),
    "a conversation, some failures and equal groups": (healthy_with_failures, FEW),
}
"""Agents, with the section of their rollouts."""


def numbered(start: int, count: int, **fields: Any) -> list[Task]:
    """Tasks whose prompts end with what `wanted` pays for."""
    kinds = ("other", "vowel")
    return [{"id": f"t{i}", "prompt": f"say {i} {kinds[i % 2]}", **fields} for i in range(start, start + count)]
