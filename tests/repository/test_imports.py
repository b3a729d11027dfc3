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


def test_a_rollout_of_the_public_name_reaches_other_processes():
    program = """
import os, pickle
from lightning_core import rollout

with rollout({}) as run:
    pickle.dumps(run)
    child = os.fork()
    if child == 0:
        os._exit(7 if type(run).__name__ == "RemoteRollout" else 1)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "7"


def test_a_configuration_is_valid_on_the_first_threads_that_read_one_and_leaves_the_environment_alone():
    program = """
import os, sys, threading
from lightning_core import load_config

sys.setswitchinterval(1e-6)
before, errors, barrier = dict(os.environ), [], threading.Barrier(4)

def read():
    barrier.wait()
    try:
        load_config({
            "policy": {"model": "m"}, "monitors": {"disable": ["no_gradient"]},
            "credit": {"rewards": "vine", "advantage": "none"}, "rollouts": {"forks": {"points": 1, "samples": 2}},
        })
    except Exception as error:
        errors.append(str(error))

threads = [threading.Thread(target=read) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert not errors, errors
assert dict(os.environ) == before
"""
    for _ in range(3):
        subprocess.run([sys.executable, "-c", program], check=True)


def test_public_names_exist():
    assert len(lightning_core.__all__) <= 23
    for name in lightning_core.__all__:
        assert getattr(lightning_core, name) is not None


def test_the_commands_start_as_a_module():
    done = subprocess.run(
        [sys.executable, "-m", "lightning_core.tools.cli", "--help"], capture_output=True, text=True, check=True
    )
    assert "lightning-rl" in done.stdout
