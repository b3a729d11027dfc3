"""The whole algorithm in one file: tasks → rollouts → transitions → credit → rows → new weights.

Run ``python -m examples.minimal.loop``. The agent calls a model twice through the OpenAI client. The model has two layers, random weights
and bytes as tokens. The reward is the share of small letters in what the agent wrote, and after a few steps nearly all of it is.

`lightning_core.fit` is the same loop with worker processes, failures of agents and servers, a store, checkpoints, evaluations and signals.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from statistics import fmean

import torch
from openai import OpenAI
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from lightning_core import (
    Config,
    CreditRules,
    Episode,
    Row,
    Trace,
    assign_credit,
    reward,
    trace_to_transitions,
    trainable,
    transitions_to_rows,
)
from lightning_core.testing import Playground, open_playground
from lightning_core.trainers import make_trainer

TASKS_PER_STEP, GROUP_SIZE, MAX_TOKENS = 4, 4, 6
RULES = CreditRules(rewards="broadcast", advantage="grpo")

# --- The agent: ordinary code. The mark names it, so its calls can be trained.

client = OpenAI(api_key="any")


@trainable("writer")
def write(messages: list[dict[str, str]]) -> str:
    """Call the model. Inside a rollout the policy endpoint answers, whichever server and model the client names."""
    response = client.chat.completions.create(model="gpt-4o-mini", messages=messages)
    return response.choices[0].message.content or ""


def solve(task: dict[str, str]) -> str:
    """The agent entry: write a draft, then a second version in the same conversation."""
    messages = [{"role": "user", "content": task["prompt"]}]
    draft = write(messages)
    messages += [{"role": "assistant", "content": draft}, {"role": "user", "content": "again"}]
    return draft + write(messages)


def score(text: str) -> float:
    """The share of small letters in ``text``, of 12 bytes at most."""
    return sum("a" <= letter <= "z" for letter in text) / (2 * MAX_TOKENS)


# --- The algorithm. Each function is one arrow.


def pick_tasks(tasks: Sequence[dict[str, str]], seed: int) -> Iterator[list[dict[str, str]]]:
    """The tasks of each step: passes over all of them, each in another order."""
    numbers = random.Random(seed)
    while True:
        order = numbers.sample(tasks, len(tasks))
        for start in range(0, len(order), TASKS_PER_STEP):
            yield order[start : start + TASKS_PER_STEP]


def roll_out(task: dict[str, str], playground: Playground) -> list[Trace]:
    """task → rollouts: a group of attempts under the current policy.

    The endpoint samples the responses, and records the tokens and logprobs of each call in the trace of its rollout.
    """
    traces: list[Trace] = []
    for _ in range(GROUP_SIZE):
        with playground.rollout(task, train=["writer"], temperature=1.0, max_tokens=MAX_TOKENS) as run:
            reward(score(solve(task)))
        traces.append(run.trace)
    return traces


def to_episode(trace: Trace) -> Episode:
    """rollout → transitions: one for each call of the trained agent, with the token ids that were sampled."""
    transitions = trace_to_transitions(trace, agents={"writer"})
    for t in transitions:
        assert t.output_ids.shape == t.logprobs.shape  # uint32 [T], float32 [T]
    return Episode(trace=trace, transitions=transitions, rewards=trace.rewards)


def to_rows(episodes: Sequence[Episode]) -> list[Row]:
    """transitions → credit → rows.

    Each call gets the reward of its episode (`broadcast`) as its value. Its advantage is the value relative to the other
    attempts at the task (`grpo`). A row joins calls whose prompts continue each other, and gives each sampled token the advantage of
    its call.
    """
    credit = assign_credit(episodes, RULES)
    rows = [row for e in episodes for row in transitions_to_rows(e.transitions, credit.advantages)]
    sampled = sum(len(t.output_ids) for e in episodes for t in e.transitions)
    assert sum(int(row.mask.sum()) for row in rows) == sampled  # bool [L]: each sampled token is in one row
    return rows


def train(config: Config, tasks: Sequence[dict[str, str]], *, steps: int) -> list[float]:
    """Train, and return the mean reward of each step's rollouts, which the weights before that step sampled."""
    trainer = make_trainer(config)
    rewards: list[float] = []
    with closing(trainer.learner), open_playground(trainer.backend, chats=trainer.chats) as playground:
        picked = pick_tasks(tasks, config.run.seed)
        for step in range(steps):
            traces = [trace for task in next(picked) for trace in roll_out(task, playground)]  # tasks → rollouts
            episodes = [to_episode(trace) for trace in traces]  # → transitions
            rows = to_rows(episodes)  # → credit → rows
            trainer.learner.step(rows)  # → new weights
            rewards.append(fmean(trace.reward or 0.0 for trace in traces))
            draft = (traces[0].calls[0].response or {}).get("content")
            print(f"step {step}: reward {rewards[-1]:.2f}, {len(rows)} rows, first draft {draft!r}")
    return rewards


# --- The toy: eight tasks, and a model that is made in a moment.


def run(*, steps: int, seed: int) -> list[float]:
    """Train a new model on the toy; return the mean reward by step."""
    torch.manual_seed(seed)
    tasks = [{"id": str(number), "prompt": f"say {number}"} for number in range(8)]
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder))
        sections = {
            "policy": {"model": folder, "dtype": "float32"},
            "trainer": {"learning_rate": 1e-2},
            "run": {"seed": seed},
        }
        return train(Config.model_validate(sections), tasks, steps=steps)


def make_model(folder: Path) -> None:
    """Write a language model with random weights and one token for each byte, as a Hugging Face folder."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    plain = Tokenizer(models.BPE(vocab={byte: index for index, byte in enumerate(alphabet)}, merges=[]))
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    plain.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="<|end|>")
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}<|end|>{% endfor %}assistant: "
    tokenizer.save_pretrained(folder)
    shape = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=256,
        initializer_range=0.1,
        eos_token_id=tokenizer.eos_token_id,
    )
    LlamaForCausalLM(shape).save_pretrained(folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train a tiny model without lightning_core.fit.")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    run(steps=arguments.steps, seed=arguments.seed)
