"""Environment variables and settings for ``trainer.verl`` to run verl on a CPU.

``eval "$(python -m tests.verl.cpu)"`` exports the variables to a shell, and the settings as ``VERL_ON_CPU``.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from typing import Any

ENVIRONMENT = {
    "VERL_PLATFORM": "cpu",
    "VERL_ENGINE_DEVICE": "cuda",  # under which the engines are registered
    "VERL_USE_EXTERNAL_MODULES": "tests.verl.cpu_platform",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    # Bound to a core, the engine starves other processes on that core: seen for 20 seconds on Linux 6.18.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    # The first logprobs would wait up to 26 seconds for the compilation of a one-line function.
    "TORCHDYNAMO_DISABLE": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": os.pathsep.join([os.getcwd(), os.path.join(os.getcwd(), "integrations")]),
}
SETTINGS: dict[str, Any] = {
    "trainer.device": "cpu",
    "actor_rollout_ref": {
        "model": {"use_remove_padding": False, "override_config": {"attn_implementation": "sdpa"}},  # no flash-attn
        "actor": {"use_torch_compile": False, "fsdp_config": {"use_torch_compile": False}},
        "rollout": {
            "enforce_eager": True,
            "free_cache_engine": False,  # there is no sleep mode
            "+enable_sleep_mode": False,
            "max_num_seqs": 16,
            "max_num_batched_tokens": 2048,
            "checkpoint_engine.update_weights_bucket_megabytes": 256,
            # New weights do not reach an output layer that is tied to the embeddings (see docs/vllm.md).
            "engine_kwargs.vllm.hf_overrides": {"tie_word_embeddings": False},
        },
    },
    "transfer_queue.backend.SimpleStorage.num_data_storage_units": 1,
    # Logical: Ray counts them, but no GPU is used.
    "ray_kwargs.ray_init": {
        "num_cpus": 16,
        "+num_gpus": 1,
        "+include_dashboard": False,
        "+_node_ip_address": "127.0.0.1",
    },
}

if __name__ == "__main__":
    for name, value in {**ENVIRONMENT, "VERL_ON_CPU": json.dumps(SETTINGS)}.items():
        sys.stdout.write(f"export {name}={shlex.quote(value)}\n")
