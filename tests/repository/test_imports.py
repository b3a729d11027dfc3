"""Imports are cheap and respect the layers."""

import subprocess
import sys
from importlib import import_module

import pytest
from lightning_core.old_paths import MOVED

import lightning_core
from lightning_core.capture.integration import discover


def test_the_core_loads_no_framework_and_no_torch():
    hosts = {host for entry in discover().values() for host in entry.load().hosts}
    heavy = {"torch", "transformers", "openai", "ray", "verl", "vllm", "starlette", *hosts}
    program = (
        "import sys, lightning_core, lightning_core.capture.mark, lightning_core.capture\n"
        "import lightning_core.transitions, lightning_core.credit\n"
        f"print(sorted({heavy} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_public_names_exist():
    assert len(lightning_core.__all__) <= 22
    for name in lightning_core.__all__:
        assert getattr(lightning_core, name) is not None


DOCUMENTED_BEFORE_THE_MOVE = """
from lightning_core.capture import current_run, reward, scope
from lightning_core.errors import ConfigError
from lightning_core.integration import Integration, TrainSpec
from lightning_core.otel import exporting, read_traces, spans_to_otlp
from lightning_core.patching import Patches
from lightning_core.policy.chat import Chat
from lightning_core.policy.client import install_client
from lightning_core.policy.endpoint import Limits, PolicyEndpoint, Routing
from lightning_core.policy.scripted import ScriptedBackend
from lightning_core.scoping import scope_function
from lightning_core.tools.serving import ServingEndpoint, open_serving
from lightning_core.tasks import load_tasks
from lightning_core.trainers import Trainer, make_trainer
from lightning_core.transitions import refused_calls
"""


def test_imports_that_the_documentation_showed_work_until_0_2():
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", DOCUMENTED_BEFORE_THE_MOVE],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("old", "new"), sorted(MOVED.items()))
def test_old_import_paths_give_the_new_modules_with_a_warning(old: str, new: str):
    program = f"import {old}, sys, importlib; assert sys.modules[{old!r}] is importlib.import_module({new!r})"
    if old == "lightning_core.trainable":  # its name is the decorator's too
        program = (
            f"import {old}, lightning_core, importlib; from {old} import marked_agents\n"
            f"assert marked_agents is importlib.import_module({new!r}).marked_agents and callable(lightning_core.trainable)"
        )
    done = subprocess.run(
        [sys.executable, "-W", "always::DeprecationWarning", "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    if old != "lightning_core.trainable":
        assert f"{old} has moved to {new}; the old path will be removed in 0.2" in done.stderr


def test_the_commands_start_as_a_module():
    done = subprocess.run(
        [sys.executable, "-m", "lightning_core.tools.cli", "--help"], capture_output=True, text=True, check=True
    )
    assert "lightning-rl" in done.stdout


def test_unknown_modules_of_the_old_package_are_not_found():
    with pytest.raises(ModuleNotFoundError):
        import_module("lightning_core.policy.nothing")
