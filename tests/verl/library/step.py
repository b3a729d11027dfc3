"""One step for both trainers: its rows, its weights, and the comparison of gradients."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_core import Row
from lightning_core.backends.backend import SamplingParams
from lightning_core.transitions import RowStreams
from tests.trainers.rows import make_row

TEMPERATURE = 0.8
# Rows by rollout. Each row by turn: number of prompt tokens, number of sampled tokens, advantage.
TURNS: list[tuple[str, list[tuple[int, int, float]]]] = [
    ("r0", [(9, 5, 1.0), (3, 4, 1.0)]),
    ("r0", [(11, 3, 1.0)]),
    ("r1", [(8, 4, -0.7), (5, 6, 0.4), (2, 1, -0.7)]),
    ("r2", [(4, 9, -1.2)]),
    ("r2", [(9, 2, 0.8), (4, 7, 0.8)]),
    ("r3", [(6, 5, 0.0)]),
    ("r4", [(17, 8, -0.5)]),
]
VOCABULARY = 250

Weights = Mapping[str, Tensor]


def make_rows(logprobs: Callable[[Row], Any], temperature: float = TEMPERATURE) -> list[Row]:
    """Seven rows of five rollouts, one of them flat. ``logprobs``: the policy's, of a row's sampled tokens.

    The rows were sampled by another policy, some where its probabilities are far from the policy's.
    """
    tokens, noise = random.Random(0), np.random.default_rng(0)
    shared = tokens.choices(range(VOCABULARY), k=4)
    rows: list[Row] = []
    for rollout, turns in TURNS:
        parts: list[tuple[list[int], bool]] = []
        advantages: list[float] = []
        for put, sampled, advantage in turns:
            start = [] if parts else shared
            parts.append((start + tokens.choices(range(VOCABULARY), k=put - len(start)), False))
            parts.append((tokens.choices(range(VOCABULARY), k=sampled), True))
            advantages += [advantage] * sampled
        row = make_row(*parts, rollout=rollout, temperature=temperature)
        # A shift per row makes rows differ, not only tokens.
        off = noise.normal(scale=0.25, size=len(advantages)) + noise.normal(scale=0.15)
        rows.append(
            make_row(
                *parts,
                rollout=rollout,
                temperature=temperature,
                advantage=advantages,
                logprobs=logprobs(row) + off,
            )
        )
    return rows


def with_constraints(rows: Sequence[Row], logprobs: Callable[[Row], Any], tokenizer: Any) -> list[Row]:
    """``rows`` and three whose responses follow a JSON schema: one call, two calls, and one that is cut."""
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    stop = tokenizer.convert_tokens_to_ids("<|im_end|>")
    constraint = SamplingParams(
        max_tokens=20, json_schema=json.dumps(schema), stop_token_ids=frozenset({stop})
    ).constraint
    noise, found = np.random.default_rng(2), list(rows)
    for number, texts in enumerate((['{"n": 12}'], ['{"n": 0}', '{"n": -305}'], ['{"n": 77'])):
        parts: list[tuple[list[int], bool]] = []
        for text in texts:
            parts.append(([5 + number, 6, 7, 8], False))
            parts.append((tokenizer.encode(text) + ([stop] if text.endswith("}") else []), True))
        row = make_row(*parts, temperature=TEMPERATURE, constraint=constraint)
        own = logprobs(row) + noise.normal(scale=0.25, size=int(row.mask.sum()))
        found.append(
            make_row(
                *parts,
                rollout=f"schema-{number}",
                temperature=TEMPERATURE,
                advantage=noise.normal(size=len(own)).tolist(),
                logprobs=own.tolist(),
                constraint=constraint,
            )
        )
    return found


def with_ce(rows: Sequence[Row]) -> list[Row]:
    """``rows`` with a cross-entropy on two tokens: in two later prompts, and in the first prompt of a rollout's second row."""
    found = list(rows)
    for number, places in ((0, (15, 16)), (1, (6, 7)), (2, (13, 14))):
        row = rows[number]
        coefficients = np.zeros(len(row.mask), dtype=np.float32)
        coefficients[list(places)] = 0.5
        assert not coefficients[row.mask].any()
        found[number] = replace(row, streams=RowStreams(cross_entropy=coefficients))
    return found


def with_lessons(rows: Sequence[Row]) -> list[Row]:
    """``rows`` with an advantage of its own for each sampled token, as from a teacher."""
    noise = np.random.default_rng(1)
    return [
        replace(row, advantages=(row.mask * (row.advantages + noise.normal(size=len(row.mask)))).astype(np.float32))
        for row in rows
        if row.advantages is not None
    ]


def moved(weights: Weights, seed: int) -> dict[str, Tensor]:
    """``weights`` plus random changes."""
    generator = torch.Generator().manual_seed(seed)
    return {name: value + 0.02 * torch.randn(value.shape, generator=generator) for name, value in weights.items()}


def absolute(found: Weights, expected: Weights) -> float:
    """The largest difference of two elements."""
    assert found.keys() == expected.keys()
    return max(float((found[name] - expected[name]).abs().max()) for name in expected)


def relative(found: Weights, expected: Weights) -> float:
    """The largest difference of two tensors, relative to the expected tensor's norm."""
    return max(float((found[name] - expected[name]).norm() / expected[name].norm()) for name in expected)


def assert_same(found: Weights, expected: Weights) -> None:
    """In float32, by elements and by tensors; not all gradients may be zero."""
    assert min(float(value.norm()) for value in expected.values()) > 1e-3
    assert absolute(found, expected) < 1e-5
    assert relative(found, expected) < 1e-5
