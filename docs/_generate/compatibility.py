"""Generates docs/compatibility.md from the extras.

Run ``python -m docs._generate.compatibility > docs/compatibility.md``.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

_INTRODUCTION = """\
# Compatibility

<!-- Generated: python -m docs._generate.compatibility > docs/compatibility.md -->

Python {python}. The extras are the only place that defines version ranges, and `install("langgraph")`
reads them: a framework outside its range raises an error with the version found and the one
required.

| Extra | Requires |
|---|---|
"""
_END = """
`make test` runs the integrations' tests with the newest versions (exact versions in
`constraints.txt`), `make test-lowest` with the lowest versions that the extras allow.

## Limits

What has been tested, and what has not:

{limits}
Settings that a trainer or sampler does not support are rejected when the configuration is read; see
[verl](trainers.md#keys-in-verls-configuration) and
[vLLM](vllm.md#differences-from-sampling-in-process).
"""
_LIMITS = (
    ("Area", "Tested", "Not tested"),
    ("---", "---", "---"),
    ("GPU", "", "Single-GPU training is implemented but not yet tested on hardware."),
    ("Operating system", "Linux on x86-64", "other platforms"),
    ("CPU", "Intel Xeon with AMX and with AVX-512 only; AMD EPYC with AVX512_BF16", ""),
    ("Python", "3.11; on 3.12 and 3.13 the tests that need no torch", "training on 3.12 and later"),
    ("vLLM", "its builds for CPUs, 0.27.1 and 0.32.0", "vLLM on a GPU"),
    (
        "verl",
        "verl 0.9.1 and its trainer on CPUs: FSDP2, gloo, vLLM's build for CPUs, all values of `trainer.mode`",
        "verl on GPUs; Megatron; SGLang; `policy.tuning: lora` with verl",
    ),
    (
        "the extra `verl`",
        "installation without flash-attn (11 GB, four minutes, no conflicts); in that environment the comparison of "
        "gradients and the contract test",
        "flash-attn",
    ),
    ("`trainer.mode: separate_async`", "with the tests' own transport for weights", "with NCCL"),
    ("Ray clusters", "one machine; up to eight simulated nodes", "several machines"),
    (
        "Data sets of the examples",
        "readers for Spider, Calc-X and MuSiQue, on small files in their formats",
        "the data sets themselves; `examples/text_to_sql/lightning_gpu.yaml`",
    ),
)
_NAME = "lightning-rl"
_INTERNAL = ("all", "dev", "examples")
"""Extras that combine others, or are for development."""


def compatibility() -> str:
    """The page docs/compatibility.md, from the pyproject.toml of this checkout."""
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    project: dict[str, Any] = tomllib.loads(text)["project"]
    extras: dict[str, list[str]] = project["optional-dependencies"]
    rows = [
        f"| `{extra}` | {', '.join(_cell(needed) for needed in _requirements(extra, extras))} |\n"
        for extra in sorted(extras)
        if extra not in _INTERNAL
    ]
    limits = "".join(f"| {' | '.join(row)} |\n" for row in _LIMITS)
    return _INTRODUCTION.format(python=project["requires-python"]) + "".join(rows) + _END.format(limits=limits)


def _requirements(extra: str, extras: Mapping[str, Sequence[str]]) -> list[Requirement]:
    """Requirements of ``extra``, sorted by name, including those of nested extras."""
    found: dict[str, Requirement] = {}
    for text in extras[extra]:
        needed = Requirement(text)
        parts = [needed] if needed.name != _NAME else [r for part in needed.extras for r in _requirements(part, extras)]
        found |= {r.name: r for r in parts}
    return [found[name] for name in sorted(found)]


def _cell(requirement: Requirement) -> str:
    extras = f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""
    return f"`{requirement.name}{extras}{','.join(sorted(map(str, requirement.specifier), reverse=True))}`"


if __name__ == "__main__":
    sys.stdout.write(compatibility())
