"""Sets up a process to run verl's actor on a CPU, without Ray or vLLM. Import it before verl."""

from __future__ import annotations

import os
import warnings

# verl chooses its device when it is imported.
os.environ.update(
    {
        "VERL_PLATFORM": "cpu",
        "VERL_ENGINE_DEVICE": "cuda",
        "VERL_USE_EXTERNAL_MODULES": "tests.verl.cpu_platform",
        "TORCHDYNAMO_DISABLE": "1",
        "HF_HUB_OFFLINE": "1",
    }
)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it warns of each engine that is not installed
    import verl.models.transformers.monkey_patch
    import verl.workers.engine

    # The entry point loads it only if the distribution is installed with it.
    from lightning_core.trainers.verl.plugin import register_loss

for name in ("dppo_kl", "m2po"):
    register_loss(f"examples.rules.losses:{name}")

assert verl.utils.device.get_device_name() == "cpu", "verl was imported before, for another platform"

# If TRL is installed, verl patches a class in it that newer versions (1.16) do not have. The parity tests use the same environment.
verl.models.transformers.monkey_patch.is_trl_available = lambda: False
