"""Compares the embedded engine with plain Hugging Face: same model, prompts and machine, in one run.

    python -m tests.bench.engine [--model smollm2-135m-instruct] [--dtype auto float32] [--trl] [--vllm bfloat16 float32]
    python -m tests.bench.engine --paths
    python -m tests.bench.engine --decode
    python -m tests.bench.engine --conversations

``--trl`` also measures a step of TRL's GRPOTrainer, in an environment of its own, which is made on first use.
``--vllm`` also measures vLLM's build for CPUs. Its command must be on the PATH (``make test-vllm`` installs one in .venv-cluster).

64 rows: 8 prompts of a 200-token shared prefix and a 40-token question, 8 samples each, 24 new tokens. Prints wall and
process time of both and their ratio. Requests arrive 10 ms apart, as from agents that run at the same time.

``--paths`` compares the plain path with the tree path on a small model instead (`tests.bench.paths`), and ``--decode`` a decoding step with
its products alone (`tests.bench.decode`). ``--conversations`` prints what is computed for conversations that do not fit the cache
(`tests.bench.conversations`).
"""

from __future__ import annotations

import lightning_core.trainers.plan  # noqa: F401 - before torch: sets how its threads wait

# isort: split
import argparse
import asyncio
import json
import os
import random
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from lightning_core.backends.backend import Backend, Delta, SamplingParams
from lightning_core.backends.vllm.api import CPU_ARGS
from lightning_core.backends.vllm.backend import VllmBackend
from lightning_core.backends.vllm.server import serve_vllm
from lightning_core.model.source import load_model, load_tokenizer, resolve_model
from lightning_core.trace import POLICY
from lightning_core.trainers.torch.factory import open_trainer
from tests.bench.conversations import compare_orders
from tests.bench.decode import compare_decode
from tests.bench.environment import install
from tests.bench.paths import compare_paths
from tests.engine_stats import stats_of
from tests.trainers.rows import make_row
from tests.trainers.sections import parts

TRL = "trl==1.16.0"
PREFIX, QUESTION, NEW, PROMPTS, SAMPLES = 200, 40, 24, 8, 8
TEMPERATURE = 0.7


def timed(work: Callable[[], Any]) -> tuple[float, float, Any]:
    wall, cpu = time.perf_counter(), time.process_time()
    result = work()
    return time.perf_counter() - wall, time.process_time() - cpu, result


def report(what: str, tokens: int, plain: tuple[float, float], ours: tuple[float, float]) -> None:
    for name, (wall, cpu) in (("plain", plain), ("lightning", ours)):
        print(f"  {what:9s} {name:9s} {tokens / wall:7.0f} tok/s   wall {wall:6.2f} s   cpu {cpu:6.2f} s")
    print(f"  {what:9s} speed-up  {plain[0] / ours[0]:7.1f} x wall    {plain[1] / ours[1]:6.1f} x cpu", flush=True)


def plain_generate(model: Any, prompts: list[list[int]]) -> Any:
    with torch.no_grad():
        return model.generate(
            torch.tensor(prompts), attention_mask=torch.ones(len(prompts), len(prompts[0]), dtype=torch.int64),
            max_new_tokens=NEW, min_new_tokens=NEW, do_sample=True, temperature=TEMPERATURE, top_k=0,
        )  # fmt: skip


def plain_step(model: Any, ids: torch.Tensor, advantages: list[float], micro_batch: int = 8) -> None:
    model.zero_grad()
    for start in range(0, len(ids), micro_batch):
        part = ids[start : start + micro_batch]
        logits = model(part[:, :-1], use_cache=False, logits_to_keep=NEW).logits / TEMPERATURE
        logprobs = torch.log_softmax(logits, -1).gather(-1, part[:, -NEW:, None])[..., 0]
        weight = torch.tensor(advantages[start : start + micro_batch])[:, None]
        (-(logprobs * weight).mean() * len(part) / len(ids)).backward()


def make_texts(tokenizer: Any, rng: random.Random) -> list[tuple[str, list[int]]]:
    """Prompts as text, which is what TRL takes, and as tokens; all have the same number of tokens."""
    prefix = rng.choices(range(1000, 20000), k=PREFIX)
    found: dict[int, list[tuple[str, list[int]]]] = {}
    while True:  # the text of random tokens has other tokens, and often another number of them
        text = tokenizer.decode(prefix + rng.choices(range(1000, 20000), k=QUESTION))
        ids = tokenizer.encode(text)
        equal = found.setdefault(len(ids), [])
        equal.append((text, ids))
        if len(equal) == PROMPTS:
            return equal


def trl_step(folder: str, work: dict[str, Any]) -> tuple[float, float]:
    """Wall and process seconds of a step of TRL's GRPOTrainer."""
    python = install(
        TRL, "python", oldest=(3, 11), interpreter=None, beside=(f"torch=={torch.__version__.split('+')[0]}",)
    )
    script = Path(__file__).with_name("trl_step.py")
    done = subprocess.run(
        [str(python), str(script), folder], input=json.dumps(work), stdout=subprocess.PIPE, text=True, check=True
    )
    found = json.loads(done.stdout.splitlines()[-1])
    return found["wall"], found["cpu"]


async def sample_all(backend: Backend, prompts: list[list[int]], params: SamplingParams) -> list[Delta]:
    async def one(index: int, prompt: list[int]) -> Delta:
        await asyncio.sleep(0.01 * index)
        return [delta async for delta in backend.generate(prompt, params, model="policy")][-1]

    return await asyncio.gather(*(one(index, prompt) for index, prompt in enumerate(prompts)))


def vllm_sampling(model: str, prompts: list[list[int]], params: SamplingParams, dtype: str) -> float:
    """Wall seconds for the same prompts on a warm vLLM server. Its CPU time is not measured."""
    # By default vLLM requires nearly all memory to be free.
    args = (*CPU_ARGS, "--max-num-seqs", str(len(prompts)), "--gpu-memory-utilization", "0.4")
    with serve_vllm(model, dtype=dtype, max_context=1024, args=args) as url:
        backend = VllmBackend(url, model=POLICY)
        others = [[token + 1 for token in prompt] for prompt in prompts]
        asyncio.run(sample_all(backend, others, params))
        wall, _, _ = timed(lambda: asyncio.run(sample_all(backend, prompts, params)))
    return wall


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--dtype", nargs="+", default=["auto", "float32"])
    parser.add_argument("--layers", type=int, default=15, help="train only the top so many layers; 0: all")
    parser.add_argument("--no-plain", action="store_true")
    parser.add_argument("--trl", action="store_true", help="also a step of TRL's GRPOTrainer")
    parser.add_argument("--vllm", nargs="*", metavar="DTYPE", default=[], help="also a vLLM server, with these dtypes")
    parser.add_argument("--paths", action="store_true", help="only the plain path against the tree path")
    parser.add_argument("--decode", action="store_true", help="only a decoding step against its products")
    parser.add_argument("--conversations", action="store_true", help="only conversations that do not fit the cache")
    arguments = parser.parse_args()
    if arguments.paths or arguments.conversations:
        compare_paths() if arguments.paths else compare_orders()
        return
    folder = resolve_model(arguments.model)
    if arguments.decode:
        compare_decode(folder, arguments.model)
        return
    rng = random.Random(0)
    texts = make_texts(load_tokenizer(folder), rng)
    prompts = [ids for _, ids in texts for _ in range(SAMPLES)]
    advantages = [rng.choice([-1.0, 1.0]) for _ in prompts]
    tokens = len(prompts) * NEW

    torch.set_float32_matmul_precision("highest")
    plain_gen = plain_train = (float("nan"), float("nan"))
    if not arguments.no_plain:
        model: Any = load_model(folder, torch.float32)
        *plain_gen, output = timed(lambda: plain_generate(model, prompts))
        if arguments.layers:
            model.requires_grad_(False)
            for layer in model.model.layers[-arguments.layers :]:
                layer.requires_grad_(True)
        *plain_train, _ = timed(lambda: plain_step(model, output, advantages))
        del model
    fastest, steps = float("inf"), dict[str, tuple[float, float]]()
    for dtype in arguments.dtype:
        torch.set_float32_matmul_precision("highest")
        trainer = open_trainer(**parts(model=str(folder), train_layers=arguments.layers or None, dtype=dtype))
        print(f"{arguments.model}, dtype {dtype}, {torch.get_num_threads()} threads, load {os.getloadavg()[0]:.1f}")
        params = SamplingParams(max_tokens=NEW, temperature=TEMPERATURE)
        *sampling, deltas = timed(lambda t=trainer, p=params: asyncio.run(sample_all(t.backend, prompts, p)))
        report("sampling", tokens, tuple(plain_gen), tuple(sampling))
        fastest = min(fastest, sampling[0])
        rows = [
            make_row(
                (prompt, False), (delta.token_ids, True), rollout=str(index), advantage=advantages[index],
                logprobs=delta.logprobs, temperature=TEMPERATURE,
            )
            for index, (prompt, delta) in enumerate(zip(prompts, deltas, strict=True))
        ]  # fmt: skip
        *training, metrics = timed(lambda t=trainer, r=rows: t.step(r))
        report("training", tokens, tuple(plain_train), tuple(training))
        steps[dtype] = (sampling[0] + training[0], sampling[1] + training[1])
        print(f"  {stats_of(trainer.backend)}")
        print("  " + ", ".join(f"{name} {value:.4g}" for name, value in metrics.items()), flush=True)
        trainer.close()
    if arguments.trl:
        work = {
            "prompts": [text for text, _ in texts],
            "samples": SAMPLES,
            "new": NEW,
            "layers": arguments.layers,
            "temperature": TEMPERATURE,
        }
        wall, cpu = trl_step(str(folder), work)
        print(f"{TRL}, float32: a step of {len(prompts)} responses   wall {wall:6.2f} s   cpu {cpu:6.2f} s")
        for dtype, (own_wall, own_cpu) in steps.items():
            print(
                f"  lightning {dtype:9s} speed-up {wall / own_wall:7.1f} x wall {cpu / own_cpu:7.1f} x cpu", flush=True
            )
    params = SamplingParams(max_tokens=NEW, temperature=TEMPERATURE)
    for dtype in arguments.vllm:
        wall = vllm_sampling(str(folder), prompts, params, dtype)
        print(f"  sampling  vLLM {dtype:9s} {tokens / wall:7.0f} tok/s   wall {wall:6.2f} s")
        print(f"  sampling  speed-up  {wall / fastest:7.1f} x wall over it", flush=True)


if __name__ == "__main__":
    main()
