"""A tiny model, pretrained briefly on windows of `horizon_task`: it answers well, and its summaries omit what the window did not repeat."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.bench.horizon_task import COMPACT, DIGITS, REGISTERS, window_turns
from tests.tiny_model import make_tiny_model

RIGHT = 0.95
"""Share of right answers, and of right values in summaries, in the pretraining data; the others are random digits."""
KEPT_NEW = 0.95
KEPT_OLD = 0.3
"""Share of summaries that have the value of a register which the window set, and of one that only the last summary had."""


def make_forgetful(folder: Path, *, steps: int = 1200, batch: int = 32, seed: int = 0) -> Path:
    """Write the model to ``folder`` and return the folder."""
    make_tiny_model(folder, layers=3, seed=seed)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
    chance = random.Random(seed)
    pieces: Callable[[str], list[int]] = cache(tokenizer.encode)
    for _ in range(steps):
        examples = [encode(pieces, conversation(chance)) for _ in range(batch)]
        length = max(len(ids) for ids, _ in examples)
        ids = torch.zeros(batch, length, dtype=torch.int64)
        labels = torch.full((batch, length), -100)
        for row, (tokens, learnt) in enumerate(examples):
            ids[row, : len(tokens)] = torch.tensor(tokens)
            labels[row, : len(tokens)] = torch.tensor(
                [t if own else -100 for t, own in zip(tokens, learnt, strict=True)]
            )
        model(input_ids=ids, labels=labels).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    return folder


def conversation(chance: random.Random) -> list[tuple[str, str]]:
    """The messages of one window and its summary, as role and content."""
    known = {r: chance.choice(DIGITS) for r in REGISTERS if chance.random() < 0.7}
    first = chance.random() < 0.2
    messages = [] if first else [("system", written(known))]
    known = {} if first else known
    new: set[str] = set()
    unread: list[str] = []
    changing = chance.sample(REGISTERS, 2)
    for turn in window_turns(chance, changing, first=first, questions=chance.randint(1, 3)):
        unread.append(turn)
        register, value = turn
        if value == "?":
            right = known.get(register) if chance.random() < RIGHT else None
            messages += [("user", " ".join(unread)), ("assistant", right or chance.choice(DIGITS))]
            unread = []
        else:
            known[register] = value
            new.add(register)
    kept = {r: v for r, v in known.items() if chance.random() < (KEPT_NEW if r in new else KEPT_OLD)}
    shown = {r: v if chance.random() < RIGHT else chance.choice(DIGITS) for r, v in kept.items()}
    return [*messages, ("user", " ".join([*unread, COMPACT])), ("assistant", written(shown))]


def written(known: dict[str, str]) -> str:
    return "".join(f"{r}{known[r]}" for r in REGISTERS if r in known)


def encode(pieces: Callable[[str], list[int]], messages: list[tuple[str, str]]) -> tuple[list[int], list[bool]]:
    """The tokens of ``messages`` in the chat template, and which of them the assistant wrote."""
    tokens: list[int] = []
    learnt: list[bool] = []
    for role, content in messages:
        for text, own in (
            (f"<|im_start|>{role}\n", False),
            (f"{content}<|im_end|>", role == "assistant"),
            ("\n", False),
        ):
            piece = pieces(text)
            tokens += piece
            learnt += [own] * len(piece)
    return tokens, learnt
