"""One family through the embedded trainer: load, sample, train a step, export; compared with transformers alone."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_core.backends.backend import Delta, SamplingParams
from lightning_core.config import dump_config, load_config
from lightning_core.model.source import load_model
from lightning_core.tools.export.export import export
from lightning_core.tools.export.trained_model import find_trained
from lightning_core.trainers.torch.factory import open_trainer
from lightning_core.trainers.torch.trainer import TorchTrainer
from lightning_core.transitions import Row
from tests.model.families import Family, make_family
from tests.trainers.rows import make_row
from tests.trainers.sections import parts

_TEMPERATURE = 0.8


class Examined(NamedTuple):
    """How far Lightning is from transformers' own forward pass, in float32."""

    path: str
    sample: float
    """Largest difference of a sampled token's logprob, in nats."""
    gradient: float
    """Largest difference of a gradient, relative to the largest gradient."""
    export: float
    """`sample` after a training step, with the model that ``lightning-rl export`` writes, in transformers."""
    moved: float
    """Largest change of a logprob by the step, in nats."""


def examine(family: Family, folder: Path) -> Examined:
    """Train one step of ``family`` in ``folder``."""
    source = make_family(family, folder / "model")
    trainer = open_trainer(
        **parts(
            model=str(source),
            dtype="float32",
            learning_rate=1e-3,
            betas=(0.5, 0.999),
            grad_clip=1e9,
            max_logprob_difference=1e-3,
        )
    )
    try:
        rows = _rollouts(trainer)
        expected, gradient = _own_logprobs(source, rows)
        trainer.step(rows)
        moments = trainer.state().moments
        # After its first step AdamW's first moment is the gradient, times 1 - beta.
        found = {name: moments[f"{name}/exp_avg"] / 0.5 for name in gradient if f"{name}/exp_avg" in moments}
        later = _rollouts(trainer)
        exported, _ = _own_logprobs(_export(trainer, source, folder), later)
        before, _ = _own_logprobs(source, later)
        return Examined(
            path=str(trainer.model.path),
            sample=_apart(rows, expected),
            gradient=_gradient_error(found, gradient),
            export=_apart(later, exported),
            moved=_apart(later, before),
        )
    finally:
        trainer.close()


def _export(trainer: TorchTrainer, source: Path, folder: Path) -> Path:
    """What ``lightning-rl export`` writes of a run's checkpoint."""
    run, out = folder / "run", folder / "export"
    trainer.save(run / "checkpoints" / "step-000001")
    config = load_config({"policy": {"model": str(source)}, "tasks": {"train": "tests.bandit:tasks"}})
    (run / "config.yaml").write_text(dump_config(config), encoding="utf-8")
    export(find_trained(run), out, format="hf", dtype="float32")
    return out


def _rollouts(trainer: TorchTrainer) -> list[Row]:
    """Three tasks, three attempts each, two turns, with made-up advantages."""
    rng = random.Random(0)
    shared = rng.choices(range(256), k=20)
    prompts = [shared + rng.choices(range(256), k=3 + 2 * task) for task in range(3) for _ in range(3)]
    params = SamplingParams(max_tokens=7, temperature=_TEMPERATURE)

    async def one(prompt: Sequence[int]) -> Delta:
        return [delta async for delta in trainer.backend.generate(prompt, params, model="policy")][-1]

    async def rollout(prompt: list[int], result: list[int]) -> tuple[Delta, Delta]:
        first = await one(prompt)
        return first, await one([*prompt, *first.token_ids, *result])

    async def run() -> list[tuple[Delta, Delta]]:
        return await asyncio.gather(*(rollout(prompt, result) for prompt, result in zip(prompts, results, strict=True)))

    results = [rng.choices(range(256), k=1 + number % 4) for number in range(len(prompts))]
    turns = zip(prompts, results, asyncio.run(run()), strict=True)
    return [
        make_row(
            (prompt, False),
            (first.token_ids, True),
            (result, False),
            (second.token_ids, True),
            rollout=f"r{number}",
            advantage=rng.uniform(-1, 1),
            logprobs=[*first.logprobs, *second.logprobs],
            temperature=_TEMPERATURE,
        )
        for number, (prompt, result, (first, second)) in enumerate(turns)
    ]


def _own_logprobs(folder: Path, rows: Sequence[Row]) -> tuple[list[Tensor], dict[str, Tensor]]:
    """The logprobs of each row's tokens by transformers alone, row by row, and the gradient of the loss."""
    model = load_model(folder, torch.float32)
    found: list[Tensor] = []
    for row in rows:
        ids = torch.from_numpy(row.token_ids.astype(np.int64))
        logits_SV = model(input_ids=ids[None], use_cache=False).logits[0, :-1] / _TEMPERATURE
        logprobs_S = logits_SV.log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        assert row.advantages is not None
        ratio_S = (logprobs_S - torch.from_numpy(row.logprobs)[1:]).exp()
        (
            -(ratio_S * torch.from_numpy(row.advantages * row.mask)[1:]).sum() / int(row.mask.sum()) / len(rows)
        ).backward()
        found.append(logprobs_S.detach())
    return found, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def _apart(rows: Sequence[Row], logprobs: Sequence[Tensor]) -> float:
    return max(
        float(np.abs(own.numpy() - row.logprobs[1:])[row.mask[1:]].max())
        for row, own in zip(rows, logprobs, strict=True)
    )


def _gradient_error(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert found.keys() >= {name for name, gradient in expected.items() if bool(gradient.any())}
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    return max(float((found[name] - expected[name]).abs().max()) for name in found) / largest
