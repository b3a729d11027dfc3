"""Makes a process one in which verl's actor runs on a CPU, without Ray or vLLM. To be imported before anything of verl's."""

from __future__ import annotations

import os
import warnings

# verl decides what it runs on while it is imported.
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

    # By the entry point it is there only where the distribution is installed with it.
    import lightning_core.trainers.verl.plugin  # noqa: F401

assert verl.utils.device.get_device_name() == "cpu", "verl was imported before, for another platform"

# Where there is TRL, verl patches a class in it that newer versions (1.16) do not have. The parity tests are in the same environment.
verl.models.transformers.monkey_patch.is_trl_available = lambda: False
