"""vLLM's own OpenAI server, for the endpoint benchmark: its API process, which tokenises, without its engine, another process.

Its model is tiny and random, with the tokenizer of the benchmark.
"""

from __future__ import annotations

import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.bench.processes import process, wait_for_http

PATH = "/v1/chat/completions"
CONTEXT = 2048
FIELDS = {"ignore_eos": True}
"""Of a request: the random model would end its responses anywhere."""
_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TORCHDYNAMO_DISABLE": "1",
}


def find(_: str | None) -> Path:
    """The command ``vllm``, of `make test-vllm` or on the path. Exits if there is none."""
    beside = Path(__file__).parents[2] / ".venv-cluster" / "bin"
    found = shutil.which("vllm", path=f"{beside}{os.pathsep}{os.environ.get('PATH', '')}")
    if found is None:
        sys.exit("there is no vllm: make test-vllm installs it, or put it on the path")
    return Path(found)


@contextmanager
def serve(command: Path, tokenizer: str) -> Generator[tuple[int, int]]:
    """Start the server. Yields the id of its API process, and its port."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as scratch:
        model = Path(scratch) / "model"
        _write_model(model, tokenizer)
        arguments = ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", "policy", "--dtype", "float32"]
        arguments += ["--max-model-len", str(CONTEXT), "--enforce-eager", "--uvicorn-log-level", "warning"]
        log = Path(scratch) / "vllm.log"
        environment = {
            **os.environ,
            **_ENVIRONMENT,
            "PATH": f"{command.parent}{os.pathsep}{os.environ.get('PATH', '')}",
        }
        with process([str(command), "serve", str(model), *arguments], log=log, env=environment) as child:
            wait_for_http(f"http://127.0.0.1:{port}/health", child, log)
            yield child.pid, port


def _write_model(folder: Path, name: str) -> None:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from lightning_core.model import source

    tokenizer: Any = source.load_tokenizer(source.resolve_model(name))
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=64,  # vLLM on a CPU requires 32 dimensions per head
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
