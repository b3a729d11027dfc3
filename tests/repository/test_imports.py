"""Imports are cheap and respect the layers."""

import subprocess
import sys

import lightning_core
from lightning_core.capture.integration import discover


def test_the_core_loads_no_framework_and_no_torch():
    hosts = {host for entry in discover().values() for host in entry.load().hosts}
    heavy = {"torch", "transformers", "openai", "ray", "verl", "vllm", "starlette", *hosts}
    program = (
        "import sys, lightning_core, lightning_core.capture.mark, lightning_core.propagation\n"
        "import lightning_core.transitions, lightning_core.credit\n"
        f"print(sorted({heavy} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_worker_process_loads_no_configuration():
    """Building the sections takes as long as everything else that it loads."""
    program = (
        "import sys, lightning_core.rollouts.executors.launcher, lightning_core.rollouts.executors.worker\n"
        "print(sorted({'pydantic', 'yaml', 'lightning_core.credit', 'lightning_core.config.config'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_public_names_exist():
    assert len(lightning_core.__all__) <= 22
    for name in lightning_core.__all__:
        assert getattr(lightning_core, name) is not None


def test_the_commands_start_as_a_module():
    done = subprocess.run(
        [sys.executable, "-m", "lightning_core.tools.cli", "--help"], capture_output=True, text=True, check=True
    )
    assert "lightning-rl" in done.stdout
