"""A CPU platform for verl 0.9.1, so that its real trainer runs in CI without a GPU. For tests only.

verl loads it through environment variables (``cpu.py``). Behavior that verl's plugin interface cannot change is wrapped on import; no
file of verl or vLLM is edited.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from typing import Any

import psutil
import ray.util
import torch
import verl.utils.distributed as distributed
import wrapt
from verl.plugin.platform import PlatformBase, PlatformRegistry

_HEAD, _EMBEDDINGS = "lm_head.weight", "model.embed_tokens.weight"


class _DeviceModule(types.ModuleType):
    """``torch.cpu`` with the calls that verl makes on ``torch.cuda``."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    memory_allocated = memory_reserved = max_memory_allocated = max_memory_reserved = staticmethod(lambda *_, **__: 0)
    empty_cache = ipc_collect = reset_peak_memory_stats = set_device = synchronize = staticmethod(lambda *_, **__: None)
    manual_seed = manual_seed_all = staticmethod(torch.manual_seed)
    get_rng_state = staticmethod(lambda *_: torch.get_rng_state())
    set_rng_state = staticmethod(lambda state, *_: torch.set_rng_state(state))
    mem_get_info = staticmethod(lambda *_: (psutil.virtual_memory().available, psutil.virtual_memory().total))
    get_device_name = staticmethod(lambda *_: "CPU")
    device_count = staticmethod(lambda: 1)
    current_device = staticmethod(lambda: torch.device("cpu"))


@PlatformRegistry.register(platform="cpu")
class CpuPlatform(PlatformBase):
    """One logical accelerator for each worker: Ray is configured with the required number of "GPUs"."""

    device_name = "cpu"
    vendor_name = "cpu"
    device_module = _DeviceModule("verl_cpu_device")

    def is_available(self) -> bool:
        return True

    def current_device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cpu")

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: Any) -> None: ...

    def synchronize(self, device_index: Any = None) -> None: ...

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None: ...

    def empty_cache(self) -> None: ...

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextlib.contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None: ...

    def profiler_stop(self) -> None: ...

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False  # weights travel by shared memory

    def cudart(self) -> None:
        return None


# Every server on the loopback device: Ray reports the first other address, which other machines could reach.
ray.util.get_node_ip_address = lambda *_, **__: "127.0.0.1"

_initialize = distributed.initialize_global_process_group_ray


def _initialize_with_gloo(timeout_second: int | None = None, backend: str | None = None) -> Any:
    # verl passes "cpu:gloo,cpu:gloo", the device twice, which torch rejects.
    return _initialize(timeout_second=timeout_second, backend=backend or "cpu:gloo")


distributed.initialize_global_process_group_ray = _initialize_with_gloo


@wrapt.when_imported("verl.workers.rollout.vllm_rollout.utils")
def _receive_copies(module: Any) -> None:
    """verl streams weights into ``model.load_weights``, bucket by bucket, from shared memory.

    vLLM's linear layers for CPUs are repacked after loading, so they cannot be loaded in that way, and ``to("cpu")`` does not copy, so
    the segment could not be closed. This uses vLLM's own reload with copies, as its HTTP server does.
    """

    def update_weights_from_ipc(
        self: Any, peft_config: Any = None, base_sync_done: bool = False, use_shm: bool = False
    ) -> None:
        from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightReceiver

        if peft_config:
            raise NotImplementedError("adapters are not pushed on the CPU platform")
        received: list[tuple[str, torch.Tensor]] = []
        receiver = BucketedWeightReceiver(zmq_handle=self._get_zmq_handle(), device=self.device, use_shm=use_shm)
        receiver.receive_weights(lambda weights, is_last: received.extend((n, w.clone()) for n, w in weights))
        names = dict(received)
        if _HEAD not in names:  # for a model whose output layer is tied to the embeddings, which is served untied
            received.append((_HEAD, names[_EMBEDDINGS]))
        self.model_runner.reload_weights(weights_iterator=iter(received))

    module.vLLMColocateWorkerExtension.update_weights_from_ipc = update_weights_from_ipc


@wrapt.when_imported("verl.workers.engine.fsdp.transformer_impl")
def _do_not_pin(module: Any) -> None:
    """The reference model's offload policy pins memory, which needs an accelerator."""
    policy = module.CPUOffloadPolicy
    module.CPUOffloadPolicy = lambda pin_memory=True: policy(pin_memory=False)


@wrapt.when_imported("verl.models.transformers.monkey_patch")
def _do_not_patch_trl(module: Any) -> None:
    """verl patches a class of TRL's that newer versions (1.16) do not have. The parity tests use one of those."""
    module.is_trl_available = lambda: False
