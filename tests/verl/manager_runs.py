"""The manager on real Ray and TransferQueue, without verl's trainer: started, requested, awaited."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import ray
import transfer_queue as tq
from omegaconf import OmegaConf
from verl.utils import tensordict_utils as tu

from lightning_core import load_config
from lightning_core.config import dump_config
from lightning_core.trainers.verl.compose import compose_config
from lightning_core.trainers.verl.dataset import TASK
from lightning_core.trainers.verl.manager import LightningManager
from lightning_core.trainers.verl.settings import defaults, translate
from tests.verl.cpu import ENVIRONMENT

SECONDS = 180
"""Longest wait for one result: a loaded machine takes minutes to start a worker."""


@contextmanager
def open_cluster() -> Iterator[None]:
    """Ray and TransferQueue on this machine."""
    ray.init(
        "local",
        num_cpus=8,
        include_dashboard=False,
        _node_ip_address="127.0.0.1",
        log_to_driver=False,
        runtime_env={"env_vars": ENVIRONMENT},
    )
    settings = {"enable": True, "backend": {"storage_backend": "SimpleStorage"}}
    settings["backend"]["SimpleStorage"] = {"total_storage_size": 100000, "num_data_storage_units": 1}
    tq.init(OmegaConf.create(settings))
    yield
    tq.close()
    ray.shutdown()


def start_manager(sections: dict[str, Any], client: Any, *, model: Path, folder: Path) -> tuple[LightningManager, Any]:
    """A manager of a run in ``folder``, as verl creates it, and verl's configuration. ``client``: samples, as verl's."""
    sections = {
        **sections,
        "policy": {"model": str(model), **sections["policy"]},
        "trainer": {"name": "verl", **sections["trainer"]},
    }
    config = load_config(sections)
    (folder / "config.yaml").write_text(dump_config(config), encoding="utf-8")
    context = sections["policy"]["max_context"]
    derived = translate(
        config, model=str(model), max_context=context, weights=10**6, folder=folder, working_dir=Path.cwd()
    )
    composed = compose_config(derived, defaults(config, max_context=context), {})
    return LightningManager.create(config=composed, llm_client=client), composed


def request(
    manager: LightningManager, *tasks: dict[str, Any], step: int = 1, uids: list[str] | None = None
) -> list[str]:
    """Request rollouts as verl's trainer does. Returns the prompts' uids. ``uids``: of earlier prompts, to request again."""
    uids = uids or [f"{task['id']}-{time.monotonic_ns()}" for task in tasks]
    columns = {
        "uid": np.array(uids, dtype=object),
        TASK: np.array([json.dumps(task) for task in tasks], dtype=object),
        "raw_prompt": np.array([[{"role": "user", "content": ""}] for _ in tasks], dtype=object),
    }
    batch = tu.get_tensordict(columns)
    tu.assign_non_tensor_data(batch, "global_steps", step)
    tags = [{"is_prompt": True, "status": "pending", "global_steps": step} for _ in uids]
    tq.kv_batch_put(keys=uids, partition_id="train", tags=tags)
    manager.generate_sequences(batch)
    return uids


def settled(uids: list[str]) -> dict[str, str]:
    """The statuses of the prompts, once they are final."""
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        tags = tq.kv_list("train")["train"]
        found = {uid: tags[uid]["status"] for uid in uids}
        if set(found.values()) <= {"finished", "failure"}:
            return found
        time.sleep(0.1)
    raise AssertionError(f"still {found}")


def rows(uids: list[str]) -> list[str]:
    """The keys of the rows of the prompts."""
    return [key for key in tq.kv_list("train")["train"] if key.rpartition("_")[0].rpartition("_")[0] in uids]
