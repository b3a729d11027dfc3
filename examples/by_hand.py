"""The whole circle without a framework and without `fit`: one call for each part of Lightning, in a few seconds on a CPU.

The agent is a plain function that asks a model through the OpenAI client. The model is a tiny one with random weights, whose tokens
are bytes. It is rewarded for small letters, and after a few steps it writes little else::

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
    rollout,
    trace_to_transitions,
    trainable,
    transitions_to_rows,
)
from lightning_core.capture import current_run
from lightning_core.capture.http_clients import install_client
from lightning_core.capture.patching import Patches
from lightning_core.chat.chat import Chat
from lightning_core.endpoint.server import PolicyEndpoint, Routing
from lightning_core.trainers import Trainer, make_trainer

STEPS, TASKS, ATTEMPTS = 8, 4, 8

# --- 1. An agent as anybody writes it. The mark says that its calls are to be trained.

client = OpenAI(api_key="any")


@trainable("writer")
def write(prompt: str) -> str:
    """Ask the model; where it lives and what it is called is decided by whoever opens the rollout."""
    answer = client.chat.completions.create(model="gpt-4o-mini", messages=[{"role": "user", "content": prompt}])
    return answer.choices[0].message.content or ""


def solve(task: dict[str, str]) -> str:
    """One attempt: run the agent, and reward the share of small letters in six bytes."""
    text = write(task["prompt"])
    reward(sum("a" <= letter <= "z" for letter in text) / 6)
    return text


# --- 2. A rollout: one attempt in a scope of its own. Requests made inside go to the endpoint, which knows the tokens.


def attempt(task: dict[str, str], endpoint: PolicyEndpoint) -> tuple[str, Trace]:
    """Run the agent on a task; what it wrote, and the trace of how."""
    key = endpoint.new_key()
    with rollout(task=task, endpoint=endpoint.url, api_key=key, strict=True) as run:
        endpoint.open(key, run.address, Routing(trained=frozenset({"writer"}), temperature=1.0, max_tokens=6))
        text = solve(task)
        endpoint.close(key)
    return text, run.trace


# --- 3. From traces to new weights.


def learn(traces: list[Trace], trainer: Trainer) -> None:
    """One step: the trained agents' calls, each call's advantage over the other attempts at its task, and an update."""
    episodes = [
        Episode(trace=trace, transitions=trace_to_transitions(trace, agents={"writer"}), rewards=trace.rewards)
        for trace in traces
    ]
    credit = assign_credit(episodes, CreditRules(rewards="broadcast", advantage="grpo"))
    rows = [row for e in episodes for row in transitions_to_rows(e.transitions, credit.advantages)]
    trainer.step(rows)


# --- 4. The circle.


def main() -> None:
    """Attempts, one update of the weights, the same attempts again."""
    torch.manual_seed(0)
    tasks = [{"id": str(number), "prompt": f"say {number}"} for number in range(TASKS)]
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder))
        config = Config.model_validate(
            {"policy": {"model": folder, "dtype": "float32"}, "trainer": {"learning_rate": 5e-3}}
        )
        trainer = make_trainer(config)

    patches = Patches(lambda: current_run() is not None)
    install_client(patches)  # from here on, model requests made inside a rollout carry who asks
    with PolicyEndpoint(trainer.backend, Chat(trainer.tokenizer)) as endpoint:
        for _ in range(STEPS + 1):
            attempts = [attempt(task, endpoint) for task in tasks for _ in range(ATTEMPTS)]
            text, trace = attempts[0]
            call = trace.calls[0]
            assert call.agent == "writer" and call.output_ids is not None
            mean = fmean(trace.reward or 0.0 for _, trace in attempts)
            print(
                f"version {call.policy_version}: reward {mean:.2f}, first answer {text!r} in {len(call.output_ids)} tokens"
            )
            if trainer.version < STEPS:
                learn([trace for _, trace in attempts], trainer)
    patches.undo()
    trainer.close()


# --- A model to play with: two layers, random weights, one token for each byte.


def make_model(folder: Path) -> None:
    """Write it as an ordinary Hugging Face folder."""
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
