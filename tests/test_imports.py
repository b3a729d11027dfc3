"""Imports are cheap and respect the layers."""

import contextlib
import subprocess
import sys
from importlib import import_module

import pytest

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
    assert len(lightning_core.__all__) <= 20
    for name in lightning_core.__all__:
        assert getattr(lightning_core, name) is not None


@pytest.mark.parametrize(
    ("old", "new", "name"),
    [
        ("capture", "capture", "rollout"),
        ("integration", "capture.integration", "TrainSpec"),
        ("patching", "capture.patching", "Patches"),
        ("policy.client", "capture.http_clients", "install_client"),
        ("policy.endpoint", "endpoint.server", "PolicyEndpoint"),
        ("policy.limits", "endpoint.limits", "Limits"),
        ("policy.scripted", "backends.scripted", "ScriptedBackend"),
        ("scoping", "capture.wrapping", "scope_function"),
        ("store", "records.store", "Store"),
        ("threads", "capture.threads", "install_threads"),
        ("trainable", "capture.mark", "marked_agents"),
    ],
)
def test_old_import_paths_give_the_same_objects_until_0_2(old: str, new: str, name: str):
    with (
        pytest.warns(DeprecationWarning, match="removed in 0.2")
        if old not in ("capture", "trainable")
        else contextlib.nullcontext()
    ):
        sys.modules.pop(f"lightning_core.{old}" if old not in ("capture", "trainable") else "", None)
        found = import_module(f"lightning_core.{old}")
    assert getattr(found, name) is getattr(import_module(f"lightning_core.{new}"), name)
    assert callable(lightning_core.trainable)


def test_unknown_modules_of_the_old_package_are_not_found():
    with pytest.raises(ModuleNotFoundError):
        import_module("lightning_core.policy.nothing")
