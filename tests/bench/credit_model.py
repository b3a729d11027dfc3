"""A tiny model, pretrained briefly: it has seen answers to every question of `credit_tasks`, few of them right."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.bench.credit_tasks import LETTERS, prompts, right_answer
from tests.tiny_model import make_tiny_model

RIGHT = {"w": 0.05, "r": 0.05, "s": 0.25, "a": 0.25, "t": 0.05}
"""Share of right answers in the pretraining data by the prompts' first letter; the other answers are random letters."""


def make_reader(folder: Path, *, steps: int = 600, batch: int = 64, seed: int = 0) -> Path:
    """Write the model to ``folder`` and return the folder."""
    make_tiny_model(folder, layers=3, seed=seed)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    chance = random.Random(seed)
    asked = [[prompt for prompt in prompts() if prompt[0] == kind] for kind in RIGHT]
    for _ in range(steps):
        examples = [example(tokenizer, prompt, chance) for prompt in map(chance.choice, chance.choices(asked, k=batch))]
        length = max(len(prompt) + len(answer) for prompt, answer in examples)
        ids = torch.zeros(batch, length, dtype=torch.int64)
        labels = torch.full((batch, length), -100)
        for row, (prompt, answer) in enumerate(examples):
            ids[row, : len(prompt) + len(answer)] = torch.tensor(prompt + answer)
            labels[row, len(prompt) : len(prompt) + len(answer)] = torch.tensor(answer)
        model(input_ids=ids, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    return folder


def example(tokenizer: Any, prompt: str, chance: random.Random) -> tuple[list[int], list[int]]:
    """Prompt and answer as tokens."""
    text: str = tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
    )
    right = right_answer(prompt[0], prompt[1])
    said = right if chance.random() < RIGHT[prompt[0]] and right in LETTERS else chance.choice(LETTERS)
    return tokenizer.encode(text), [*tokenizer.encode(said), tokenizer.convert_tokens_to_ids("<|im_end|>")]
