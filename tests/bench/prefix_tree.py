"""Compares training a group's prefix tree once with training each call separately.

    python -m tests.bench.prefix_tree [--model smollm2-135m-instruct | tiny] [--turns 10] [--branches 8]

A group of attempts at one task: all share the task's prompt, and the prompt of each call contains the attempt so far. Three ways to the
same gradient, with the same model, threads and precision, in one run:

- plain: Hugging Face's own model and attention, one call at a time, logits only at the trained positions;
- flat: this engine, each call as a separate sequence, packed into micro-batches without padding;
- tree: this engine, with each shared prefix once.

The baseline is the faster of the first two. Each is run --repeat times after a warm-up; its fastest run counts. Gradients are compared.
"""

from __future__ import annotations

import lightning_core.trainers.plan  # noqa: F401 - before torch: sets how its threads wait

# isort: split
import argparse
import os
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lightning_core import Row
from lightning_core.model.source import load_model, resolve_model
from lightning_core.trainers.torch import packing
from lightning_core.trainers.torch.factory import open_trainer
from lightning_core.trainers.torch.trainer import TorchTrainer
from tests.tiny_model import make_tiny_model
from tests.trainers.rows import make_row
from tests.trainers.sections import parts

FEWER_TOKENS, LESS_TIME = 5, 3
Gradients = dict[str, torch.Tensor]


def calls_of_a_group(
    turns: int, branches: int, *, prompt: int, observation: int, response: int, vocabulary: int
) -> list[Row]:
    """A row for each call of ``branches`` attempts of ``turns`` turns, with random advantages and logprobs."""
    rng = random.Random(0)

    def tokens(count: int) -> list[int]:
        return rng.choices(range(vocabulary), k=count)

    task, rows = tokens(prompt), list[Row]()
    for branch in range(branches):
        context, advantage = task, rng.uniform(-1, 1)
        for _ in range(turns):
            seen, said = [*context, *tokens(observation)], tokens(response)
            row = make_row(
                (seen, False), (said, True), rollout=str(branch), advantage=advantage, logprobs=[-9.0] * response
            )
            rows.append(row)
            context = seen + said
    return rows


def pack_apart(rows: Sequence[Row], chosen: Sequence[int], *, budget: int) -> list[packing.PackedBatch]:
    """Like `pack_rows`, without sharing: each row is its own tree."""
    batches: list[packing.PackedBatch] = []
    group: list[tuple[int, int]] = []
    inputs = {index: packing._input_tokens(rows[index]) for index in chosen}
    size = 0
    for index in chosen:
        if group and size + len(inputs[index]) > budget:
            batches.append(packing._pack(rows, inputs, group))
            group, size = [], 0
        group.append((index, 0))
        size += len(inputs[index])
    return [*batches, packing._pack(rows, inputs, group)]


def step_gradients(trainer: TorchTrainer, rows: Sequence[Row], pack: Callable[..., Any]) -> tuple[Gradients, int]:
    """The gradients of a step that leaves the weights unchanged, and the number of processed tokens."""
    found: Gradients = {}

    def keep() -> None:
        found.update({name: t.grad for name, t in trainer.model.tuning.masters.items() if t.grad is not None})

    trainer._updater.optimizer.adamw.step = keep  # type: ignore[method-assign,assignment]
    own, packing.pack_rows = packing.pack_rows, pack
    try:
        metrics = trainer.step(rows)
    finally:
        packing.pack_rows = own
    return found, int(metrics["packed_tokens"])


def plain_gradients(model: Any, rows: Sequence[Row]) -> tuple[Gradients, int]:
    """The same loss (rollout-mean, ratio times advantage, clipped) row by row."""
    model.zero_grad()
    sampled = {row.rollout: sum(int(r.mask.sum()) for r in rows if r.rollout == row.rollout) for row in rows}
    total = 0
    for row in rows:
        ids = torch.from_numpy(row.token_ids.astype(np.int64))
        columns = torch.from_numpy(np.flatnonzero(row.mask))
        count = int(columns[-1])
        total += count
        logits = model(ids[None, :count], use_cache=False, logits_to_keep=columns - 1).logits[0]
        logprobs = torch.log_softmax(logits.float(), -1).gather(1, ids[columns, None])[:, 0]
        assert row.advantages is not None
        advantages = torch.from_numpy(row.advantages)[columns]
        ratio = (logprobs - torch.from_numpy(row.logprobs)[columns]).exp()
        worth = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.28) * advantages)
        (-worth.sum() / sampled[row.rollout] / len(sampled)).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, total


def difference(found: Gradients, expected: Gradients) -> float:
    """Norm of the difference divided by the norm, over all weights."""
    assert found.keys() == expected.keys()
    apart = sum(float((found[name] - grad).double().square().sum()) for name, grad in expected.items())
    return (apart / sum(float(grad.double().square().sum()) for grad in expected.values())) ** 0.5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16"])
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--branches", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=200, help="tokens of the task's prompt")
    parser.add_argument("--observation", type=int, default=30, help="tokens that each turn's prompt adds")
    parser.add_argument("--response", type=int, default=40, help="tokens sampled in each turn")
    parser.add_argument("--micro-batch-tokens", type=int, default=4096)
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--only", nargs="+", default=["plain", "flat", "tree"])
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        tiny = arguments.model == "tiny"
        folder = make_tiny_model(Path(scratch)) if tiny else resolve_model(arguments.model)
        trainer = open_trainer(
            **parts(
                model=str(folder), dtype=arguments.dtype, grad_clip=1e30,
                micro_batch_tokens=arguments.micro_batch_tokens,
            )
        )  # fmt: skip
        model = load_model(folder, trainer.model.network.dtype) if "plain" in arguments.only else None
    rows = calls_of_a_group(
        arguments.turns, arguments.branches, prompt=arguments.prompt, observation=arguments.observation,
        response=arguments.response, vocabulary=256 if tiny else 20000,
    )  # fmt: skip
    ways: dict[str, Callable[[Sequence[Row]], tuple[Gradients, int]]] = {
        "plain": lambda rows: plain_gradients(model, rows),
        "flat": lambda rows: step_gradients(trainer, rows, pack_apart),
        "tree": lambda rows: step_gradients(trainer, rows, packing.pack_rows),
    }
    print(
        f"{arguments.model}, {trainer.model.network.dtype}, products {torch.get_float32_matmul_precision()}, "
        f"{torch.get_num_threads()} threads, load {os.getloadavg()[0]:.1f}: "
        f"{arguments.turns} turns x {arguments.branches} branches, {len(rows)} calls"
    )
    tokens: dict[str, int] = {}
    walls: dict[str, float] = {}
    cpus: dict[str, float] = {}
    gradients: dict[str, Gradients] = {}
    for name in arguments.only:
        ways[name](rows[:2])
        walls[name] = cpus[name] = float("inf")
        for _ in range(arguments.repeat):
            wall, cpu = time.perf_counter(), time.process_time()
            gradients[name], tokens[name] = ways[name](rows)
            walls[name] = min(walls[name], time.perf_counter() - wall)
            cpus[name] = min(cpus[name], time.process_time() - cpu)
        # One after the other, so that they need not fit into memory together.
        gradients[name] = {key: grad.clone() for key, grad in gradients[name].items()}
        print(f"  {name:5s} {tokens[name]:7d} tokens  {walls[name]:7.2f} s  {cpus[name]:7.2f} s of cpu", flush=True)
    trainer.close()
    flat = min((name for name in walls if name != "tree"), key=lambda name: walls[name], default=None)
    if flat is None or "tree" not in walls:
        return
    fewer, faster = tokens[flat] / tokens["tree"], walls[flat] / walls["tree"]
    print(f"  gradients differ by {difference(gradients['tree'], gradients[flat]):.1e} of their norm")
    print(
        f"  tree against {flat}: {fewer:.1f} x fewer tokens, {faster:.1f} x less time, {cpus[flat] / cpus['tree']:.1f} x less cpu"
    )
    for name, found, wanted in (("tokens", fewer, FEWER_TOKENS), ("time", faster, LESS_TIME)):
        print(f"  {name}: {'met' if found >= wanted else 'MISSED'} (target {wanted} x)")


if __name__ == "__main__":
    main()
