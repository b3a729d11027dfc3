"""Real vLLM servers on a tiny random model. See ``make test-vllm`` for their environment."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from lightning_core.backends.vllm.api import CPU_ARGS
from lightning_core.backends.vllm.backend import VllmBackend
from lightning_core.backends.vllm.server import serve_vllm
from lightning_core.model.constraint import Constraints
from lightning_core.model.source import load_tokenizer
from lightning_core.trace import POLICY
from tests.tiny_model import make_tiny_model

ARGS = (*CPU_ARGS, "--enforce-eager", "--max-num-seqs", "16")
MAX_CONTEXT = 4096


@pytest.fixture(scope="session", autouse=True)
def environment() -> Iterator[None]:
    settings = {
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
        # Bound to a core, the engine starves other processes on that core: seen for 20 seconds on Linux 6.18.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        # The first logprobs would wait up to 26 seconds for the compilation of a one-line function.
        "TORCHDYNAMO_DISABLE": "1",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in settings.items():
            patch.setenv(name, value)
        yield


def _mapped(file: Path) -> bool:
    """Whether a process maps it. That is another program then: the servers started here have ended."""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):  # ended meanwhile, or another user's
            if str(file) in maps.read_text():
                return True
    return False


@pytest.fixture(scope="session", autouse=True)
def no_shared_memory_leaks(environment: None) -> Iterator[None]:
    """Checks that stopped servers removed their shared memory, and removes the rest."""
    before = set(Path("/dev/shm").glob("psm_*"))
    yield
    left = {file for file in set(Path("/dev/shm").glob("psm_*")) - before if not _mapped(file)}
    for file in left:
        file.unlink(missing_ok=True)
    assert not left


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # vLLM on a CPU requires 32 dimensions per head, and an output layer that is not tied to the embeddings. With fewer layers its engine
    # is faster than its HTTP server, and a response ends before the disconnect arrives.
    return make_tiny_model(tmp_path_factory.mktemp("model"), arch="qwen2", heads=2, layers=12)


@pytest.fixture(scope="session")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("other"), arch="qwen2", heads=2, layers=12, seed=1)


@pytest.fixture(scope="session")
def server(environment: None, no_shared_memory_leaks: None, model: Path) -> Iterator[str]:
    """The URL of a server that all tests share; each test starts with the weights of ``model``."""
    with serve_vllm(model, dtype="float32", max_context=MAX_CONTEXT, args=ARGS, start_seconds=270) as url:
        yield url


@pytest.fixture
def backend(server: str, model: Path) -> Iterator[VllmBackend]:
    tokenizer: Any = load_tokenizer(model)
    backend = VllmBackend(server, model=POLICY, constraints=Constraints(tokenizer, len(tokenizer)))
    backend.push(model, 0)
    yield backend
    backend.close()
