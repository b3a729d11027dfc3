"""Trains with TRL's GRPOTrainer; runs in an environment of its own, started by `trl_arm`.

    python -m tests.bench.learning.trl_run < work.json

``work.json``: ``model`` (folder), ``out`` (folder for the weights), ``tasks`` (``question``, ``answer``), ``seed``, ``budget`` (sampled
tokens), and ``settings``: tasks_per_step, group_size, max_tokens, temperature, learning_rate, betas, layers. Prints the tokens, the mean
reward and the seconds of each step as one line of JSON.
"""

import json
import sys
import time

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from tests.bench.learning.expression import messages, reward


class Steps(TrainerCallback):
    """Records the steps, and ends the training after the budget."""

    def __init__(self, budget):
        self.budget = budget
        self.tokens, self.rewards, self.seconds = [], [], []
        self.batch = []

    def on_step_begin(self, *_, **__):
        self._began = time.monotonic()

    def on_step_end(self, args, state, control, **_):
        self.tokens.append(sum(tokens for tokens, _ in self.batch))
        self.rewards.append(sum(value for _, value in self.batch) / len(self.batch))
        self.seconds.append(time.monotonic() - self._began)
        self.batch.clear()
        print(f"step {len(self.tokens)}: reward {self.rewards[-1]:.3f}", file=sys.stderr, flush=True)
        control.should_training_stop = sum(self.tokens) >= self.budget


def main():
    work = json.load(sys.stdin)
    own = work["settings"]
    model = AutoModelForCausalLM.from_pretrained(work["model"], dtype=torch.float32)
    model.requires_grad_(False)
    for layer in model.model.layers[-own["layers"] :]:
        layer.requires_grad_(True)
    steps = Steps(work["budget"])

    def rewards(completions, completion_ids, answer, **_):
        found = [reward(c[0]["content"], float(a)) for c, a in zip(completions, answer, strict=True)]
        steps.batch += [(len(ids), value) for ids, value in zip(completion_ids, found, strict=True)]
        return found

    rollouts = own["tasks_per_step"] * own["group_size"]
    settings = GRPOConfig(
        output_dir=work["out"],
        seed=work["seed"],
        per_device_train_batch_size=8,
        gradient_accumulation_steps=rollouts // 8,
        num_generations=own["group_size"],
        max_completion_length=own["max_tokens"],
        temperature=own["temperature"],
        max_steps=1000,
        learning_rate=own["learning_rate"],
        lr_scheduler_type="constant",
        adam_beta1=own["betas"][0],
        adam_beta2=own["betas"][1],
        weight_decay=0.0,
        max_grad_norm=1.0,
        beta=0.0,
        epsilon=0.2,
        epsilon_high=0.28,
        loss_type="dapo",
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    data = [{"prompt": messages(task["question"]), "answer": str(task["answer"])} for task in work["tasks"]]
    trainer = GRPOTrainer(
        model=model,
        args=settings,
        reward_funcs=rewards,
        train_dataset=Dataset.from_list(data),
        processing_class=AutoTokenizer.from_pretrained(work["model"]),
        callbacks=[steps],
    )
    trainer.train()
    trainer.save_model(work["out"])
    print(json.dumps({"tokens": steps.tokens, "rewards": steps.rewards, "seconds": steps.seconds}))


if __name__ == "__main__":
    main()
