"""Exported models and checkpoints in vLLM: a server gives the logprobs of their trainer. The long form also
starts a server from an exported model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from numpy.typing import NDArray

from lightning_core.backends.vllm.backend import VllmBackend
from lightning_core.backends.vllm.server import serve_vllm
from lightning_core.tools.cli.main import main
from lightning_core.trace import POLICY
from tests.tools.export.runs import TOLERANCE, difference, sequences, train, trainer_logprobs
from tests.vllm.conftest import ARGS, MAX_CONTEXT

IDS = sequences(259)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, model: Path) -> dict[str, Path]:
    """A run for each way of tuning."""
    folder = tmp_path_factory.mktemp("runs")
    return {tuning: train(folder, model, name=tuning, policy={"tuning": tuning}) for tuning in ("full", "lora")}


def export(run: Path, out: Path) -> Path:
    assert main(["export", str(run), str(out), "--dtype", "float32"]) == 0
    return out


@pytest.fixture(scope="module")
def url(runs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server of the exported model of the run with full tuning."""
    out = export(runs["full"], tmp_path_factory.mktemp("exported") / "out")
    with serve_vllm(out, dtype="float32", max_context=MAX_CONTEXT, args=ARGS, start_seconds=270) as url:
        yield url


def prompt_logprobs(url: str) -> list[NDArray[Any]]:
    """The logprob of each token but the first of `IDS`."""
    name = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]
    found: list[NDArray[Any]] = []
    for tokens in IDS:
        request = {"model": name, "prompt": tokens, "max_tokens": 1, "temperature": 1, "prompt_logprobs": 0}
        (choice,) = httpx.post(f"{url}/v1/completions", json=request, timeout=120).raise_for_status().json()["choices"]
        entries = zip(tokens, choice["prompt_logprobs"], strict=True)
        found.append(np.array([entry[str(token)]["logprob"] for token, entry in entries if entry is not None]))
    return found


@pytest.mark.long
def test_a_server_gives_the_logprobs_of_the_trainer(runs: dict[str, Path], url: str) -> None:
    assert difference(prompt_logprobs(url), trainer_logprobs(runs["full"], "step-000002", IDS)) < TOLERANCE


@pytest.mark.parametrize(("tuning", "checkpoint"), [("full", "step-000001"), ("lora", "step-000002")])
def test_a_checkpoint_and_a_merged_adapter_are_loaded(
    runs: dict[str, Path], server: str, tmp_path: Path, tuning: str, checkpoint: str
) -> None:
    run = runs[tuning]
    folder = run / "checkpoints" / checkpoint if tuning == "full" else export(run, tmp_path / "out")
    backend = VllmBackend(server, model=POLICY)
    backend.push(folder, 1)
    backend.close()
    assert difference(prompt_logprobs(server), trainer_logprobs(run, checkpoint, IDS)) < TOLERANCE
