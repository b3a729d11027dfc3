"""One step of TRL's GRPOTrainer on the work of `tests.bench.engine`; runs in an environment of its own.

    python tests/bench/trl_step.py MODEL < work.json

``work.json``: ``prompts`` (text), ``samples`` of each, ``new`` tokens, ``layers`` to train, ``temperature``. Prints wall and
process seconds of the second step as JSON: the first one loads and compiles.
"""

import json
import sys
import tempfile
import time

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class Clock(TrainerCallback):
    def __init__(self):
        self.steps = []

    def on_step_begin(self, *_, **__):
        self._began = time.perf_counter(), time.process_time()

    def on_step_end(self, *_, **__):
        self.steps.append((time.perf_counter() - self._began[0], time.process_time() - self._began[1]))


def main():
    folder, work = sys.argv[1], json.load(sys.stdin)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if work["layers"]:
        model.requires_grad_(False)
        for layer in model.model.layers[-work["layers"] :]:
            layer.requires_grad_(True)
    clock = Clock()
    with tempfile.TemporaryDirectory() as out:
        settings = GRPOConfig(
            output_dir=out,
            per_device_train_batch_size=8,
            gradient_accumulation_steps=len(work["prompts"]) * work["samples"] // 8,
            num_generations=work["samples"],
            max_completion_length=work["new"],
            generation_kwargs={"min_new_tokens": work["new"]},
            temperature=work["temperature"],
            max_steps=2,
            learning_rate=1e-5,
            beta=0.0,
            gradient_checkpointing=False,
            bf16=False,
            use_cpu=True,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        GRPOTrainer(
            model=model,
            args=settings,
            reward_funcs=lambda completions, **_: [float(len(text) % 2) for text in completions],
            train_dataset=Dataset.from_list([{"prompt": text} for text in work["prompts"]] * 4),
            processing_class=AutoTokenizer.from_pretrained(folder),
            callbacks=[clock],
        ).train()
    print(json.dumps({"wall": clock.steps[1][0], "cpu": clock.steps[1][1]}))


if __name__ == "__main__":
    main()
