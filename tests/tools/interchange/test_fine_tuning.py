"""Imported traces are what ``lightning-rl sft`` learns from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from lightning_core.tools.cli.main import main
from tests.tiny_model import make_tiny_model


@pytest.mark.slow
def test_imported_completions_are_learned(tmp_path: Path) -> None:
    page = [
        {
            "id": f"chatcmpl-{n}",
            "object": "chat.completion",
            "created": 1764000000 + n,
            "model": "gpt-4o-mini",
            "messages": [{"role": "user", "content": f"hi {n}"}],
            "choices": [{"index": 0, "message": {"role": "assistant", "content": "hello"}, "finish_reason": "stop"}],
            "metadata": {"agent": "greeter"},
        }
        for n in range(4)
    ]
    (tmp_path / "page.json").write_text(json.dumps({"object": "list", "data": page}))
    folder = tmp_path / "traces"
    assert main(["traces", "import", str(tmp_path / "page.json"), "-o", str(folder), "--agent-key", "agent"]) == 0
    settings = {
        "agent": "tests.tools.sft.sft_agents:door",
        "agents": {"train": ["greeter"]},
        "tasks": {"train": "tests.tools.sft.sft_agents:tasks"},
        "policy": {"model": str(make_tiny_model(tmp_path / "model")), "max_context": 512, "dtype": "float32"},
        "run": {"dir": str(tmp_path / "runs"), "name": "warm"},
    }
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(settings))
    assert main(["sft", str(folder), "-c", str(tmp_path / "c.yaml"), "--held-out", "0.25", "--batch", "3"]) == 0
    report = json.loads((tmp_path / "runs" / "warm" / "sft.json").read_text())
    assert report["left_out"] == {}
