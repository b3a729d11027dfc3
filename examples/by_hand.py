"""The training loop without `fit`: one call for each part of Lightning, in a few seconds on a CPU.

The agent is a function that calls a model through the OpenAI client. The model is tiny, with random weights and bytes as tokens.
The reward is the share of small letters in an answer, and after a few steps nearly all of them are::

    python -m examples.by_hand
"""

from __future__ import annotations

import tempfile
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
    Trace,
    assign_credit,
    reward,
    trace_to_transitions,
    trainable,
    transitions_to_rows,
)
from lightning_core.testing import Playground, open_playground
from lightning_core.trainers import Learner, make_trainer

STEPS, TASKS, ATTEMPTS = 8, 4, 8

# --- 1. An ordinary agent. The mark names it, so that its calls can be trained.

client = OpenAI(api_key="any")


@trainable("writer")
def write(prompt: str) -> str:
    """Call the model. Inside a rollout the policy endpoint answers instead of the one that the client names."""
    answer = client.chat.completions.create(model="gpt-4o-mini", messages=[{"role": "user", "content": prompt}])
    return answer.choices[0].message.content or ""


def solve(task: dict[str, str]) -> str:
    """The agent entry: run the agent, and reward the share of small letters in six bytes."""
    text = write(task["prompt"])
    reward(sum("a" <= letter <= "z" for letter in text) / 6)
    return text


# --- 2. A rollout: one attempt in its own scope. The endpoint answers the model requests made inside and records their tokens.


def attempt(task: dict[str, str], playground: Playground) -> tuple[str, Trace]:
    """Run the agent on a task; return its answer and the trace."""
    with playground.rollout(task, train=["writer"], temperature=1.0, max_tokens=6) as run:
        text = solve(task)
    return text, run.trace


# --- 3. From traces to new weights.


def learn(traces: list[Trace], learner: Learner) -> None:
    """One step: the calls of the trained agent, their advantages over the other attempts at the same task, and an update."""
    episodes = [
        Episode(trace=trace, transitions=trace_to_transitions(trace, agents={"writer"}), rewards=trace.rewards)
        for trace in traces
    ]
    credit = assign_credit(episodes, CreditRules(rewards="broadcast", advantage="grpo"))
    rows = [row for e in episodes for row in transitions_to_rows(e.transitions, credit.advantages)]
    learner.step(rows)


# --- 4. The loop.


def main() -> None:
    """Repeat: make attempts, update the weights."""
    torch.manual_seed(0)
    tasks = [{"id": str(number), "prompt": f"say {number}"} for number in range(TASKS)]
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder))
        config = Config.model_validate(
            {"policy": {"model": folder, "dtype": "float32"}, "trainer": {"learning_rate": 5e-3}}
        )
        trainer = make_trainer(config)

    with open_playground(trainer.backend, chats=trainer.chats) as playground:
        for step in range(STEPS + 1):
            attempts = [attempt(task, playground) for task in tasks for _ in range(ATTEMPTS)]
            text, trace = attempts[0]
            call = trace.calls[0]
            assert call.agent == "writer" and call.output_ids is not None
            mean = fmean(trace.reward or 0.0 for _, trace in attempts)
            print(
                f"version {call.policy_version}: reward {mean:.2f}, first answer {text!r} in {len(call.output_ids)} tokens"
            )
            if step < STEPS:
                learn([trace for _, trace in attempts], trainer.learner)
    trainer.learner.close()


# --- The model: two layers, random weights, one token for each byte.


def make_model(folder: Path) -> None:
    """Write the model as a Hugging Face folder."""
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
    main()
