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
`constraints.txt`), `make test-lowest` the contract suite and the tests of each integration with the
lowest versions that the extras allow, and `make test-lowest-long` runs all tests with the lowest.

## Names of agents

How the agents of a framework get the names that `agents.train` selects, with the test against the
real package. `make test-frameworks` runs those in `tests/frameworks`, in two environments, since
CrewAI requires a version of mcp that LiteLLM cannot use, and Google ADK an older opentelemetry-sdk.

{names}
See [other frameworks](integrations/other-frameworks.md).

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
        "Spider, MAWPS and ASDiv-A with SVAMP, GSM8K, MuSiQue, 2WikiMultihopQA and HotpotQA; the reader for Calc-X, on small "
        "files in its format",
        "Calc-X itself; training on Spider; `examples/text_to_sql/lightning_gpu.yaml`",
    ),
)
_NAMES = (
    ("Framework", "Named by", "Test"),
    ("---", "---", "---"),
    ("LangChain", "integration", "`tests/integrations/test_langchain.py`"),
    ("LangGraph", "integration", "`tests/integrations/test_langgraph.py`"),
    ("OpenAI Agents SDK", "integration", "`tests/integrations/test_openai_agents.py`"),
    ("AutoGen AgentChat", "integration", "`tests/integrations/test_autogen_agentchat.py`"),
    ("Pydantic AI", "its GenAI spans", "`tests/frameworks/first/test_pydantic_ai.py`"),
    ("Microsoft Agent Framework", "its GenAI spans", "`tests/frameworks/first/test_agent_framework.py`"),
    ("Strands Agents", "its GenAI spans", "`tests/frameworks/first/test_strands.py`"),
    ("Semantic Kernel", "its GenAI spans", "`tests/frameworks/first/test_semantic_kernel.py`"),
    ("Google ADK", "its GenAI spans", "`tests/frameworks/second/test_google_adk.py`"),
    ("smolagents", "OpenInference spans", "`tests/frameworks/first/test_smolagents.py`"),
    ("Agno", "OpenInference spans", "`tests/frameworks/first/test_agno.py`"),
    ("CrewAI", "OpenInference spans", "`tests/frameworks/first/test_crewai.py`"),
    ("LlamaIndex", "selector by class", "`tests/frameworks/first/test_llama_index.py`"),
    ("Haystack", "selector by class", "`tests/frameworks/first/test_haystack.py`"),
    ("AG2", "selector by class", "`tests/frameworks/second/test_ag2.py`"),
    ("LiteLLM, Instructor, mini-swe-agent", "mark", "`tests/frameworks/second/test_marks.py`"),
    ("DSPy 3", 'mark, with `engine="litellm"`', "`tests/frameworks/second/test_marks.py`"),
)
_NAME = "lightning-rl"
_INTERNAL = ("all", "dev", "dev-models", "dev-view", "docs", "examples", "quickstart")
"""Extras that combine others, or are for development."""


def compatibility() -> str:
    """The page docs/compatibility.md, from the pyproject.toml of this checkout."""
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    project: dict[str, Any] = tomllib.loads(text)["project"]
    extras: dict[str, list[str]] = project["optional-dependencies"]
    rows = [
        f"| `{extra}` | {', '.join(_cell(needed) for needed in _requirements(extra, extras))} |\n"
        for extra in sorted(extras)
        if extra not in _INTERNAL and extras[extra]
    ]
    end = _END.format(names=_table(_NAMES), limits=_table(_LIMITS))
    return _INTRODUCTION.format(python=project["requires-python"]) + "".join(rows) + end


def _table(rows: Sequence[Sequence[str]]) -> str:
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _requirements(extra: str, extras: Mapping[str, Sequence[str]]) -> list[Requirement]:
    """Requirements of ``extra``, sorted by name, including nested extras."""
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
