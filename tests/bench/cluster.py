"""Ten thousand concurrent rollouts on Ray through the real manager: checks for lost and duplicate rollouts, measures their cost.

    python -m tests.bench.cluster [--rollouts 1000 3000 10000] [--turns 2 4 8] [--nodes 2 4 8] [--workers 4] [--timeout 600]

Real components: `LightningManager`, its workers (Ray actors, each with a policy endpoint and a runner), TransferQueue, verl's replay
buffer, the agents' HTTP requests, the store. There are no updates, and the model is a script behind verl's client interface
(cluster_model.py). It holds the first request of each rollout until all rollouts of the case have sent theirs, so that all run
concurrently, and answers with the rollout's name, so that each row can be traced to its rollout. Each case is a process with its own
cluster:

- *rollouts*: the given number of rollouts, one turn each;
- *turns*: the first of those numbers of rollouts, with the given number of turns each;
- *nodes*: the same number of rollouts on the given number of Ray nodes with one worker each. All nodes are on this machine: this
  measures the overhead of nodes in the manager and Ray, not the network.

CPU is user and system time from the request for rollouts until the trainer has its batch. The manager shares a process with the trainer;
its CPU time excludes the trainer's thread. RAM is the peak of the processes' private memory above that at the start.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests.bench.processes import raise_file_limit
from tests.bench.ray_processes import Known, cpu_by_kind, end, resident_by_kind
from tests.verl.cpu import ENVIRONMENT

GROUP = 8
WARM_UP = 16
"""Warm-up rollouts per worker before the case."""
OUTPUT_TOKENS = 24
KINDS = ("agents", "driver", "TransferQueue", "Ray")
_RESULT = "result.json"
_PATIENCE = 30.0
"""Seconds without a new request at the gate after which it is opened although requests are missing."""


def run_case(options: Any) -> dict[str, Any]:
    """Run one case in this process."""
    import ray
    import transfer_queue as tq
    from omegaconf import OmegaConf

    from tests.bench.cluster_model import Script, Waiting

    raise_file_limit()
    with ray_nodes(options.nodes, options.workers, options.ray_folder):
        tq.init(
            OmegaConf.create(
                {
                    "backend": {
                        "storage_backend": "SimpleStorage",
                        "SimpleStorage": {"total_storage_size": 100_000, "num_data_storage_units": 2 * options.nodes},
                    }
                }
            )
        )
        try:
            gate = options.scratch / "gate"
            gate.mkdir()
            manager = make_manager(options, Script(str(gate)))
            return measure(manager, options, Waiting(str(gate)))
        finally:
            tq.close()
            ray.shutdown()


@contextmanager
def ray_nodes(count: int, workers: int, folder: Path) -> Iterator[None]:
    """A cluster of ``count`` nodes on this machine. Its CPUs are logical: enough for workers, storage and controller."""
    import ray
    from ray.cluster_utils import Cluster
    from ray.util import get_node_ip_address

    cpus = -(-workers // count) + 8
    driver: dict[str, Any] = {
        "log_to_driver": False,
        "runtime_env": {"env_vars": ENVIRONMENT},
    }
    if count == 1:
        own = {"include_dashboard": False, "_temp_dir": str(folder), "_node_ip_address": "127.0.0.1"}
        ray.init("local", num_cpus=cpus, **own, **driver)
        yield
        return
    # Without the patch, Ray records this cluster as the one that other programs on the machine join.
    with patch("ray._private.utils.write_ray_address"):
        place = {"num_cpus": cpus, "node_ip_address": get_node_ip_address()}
        head = {**place, "include_dashboard": False, "temp_dir": str(folder)}
        cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        for _ in range(count - 1):
            cluster.add_node(**place)
        cluster.wait_for_nodes()
        ray.init(address=cluster.address, **driver)
        yield
    finally:
        ray.shutdown()
        cluster.shutdown()


def make_manager(options: Any, client: Any) -> Any:
    """Create the manager as verl does, with verl's configuration."""
    from lightning_core import load_config
    from lightning_core.config import dump_config
    from lightning_core.trainers.verl.compose import compose_config
    from lightning_core.trainers.verl.manager import LightningManager
    from lightning_core.trainers.verl.settings import defaults, translate

    model = str(options.model)
    config = load_config(
        {
            "agent": "tests.bench.verl_agents:talk",
            "agents": {"train": ["talker"]},
            "policy": {"model": model, "max_context": 2048},
            "rollouts": {
                "tasks_per_step": options.rollouts // GROUP,
                "group_size": GROUP,
                "max_tokens": OUTPUT_TOKENS,
                # Each worker gets an equal share, and groups are not split: leave room for the workers with one group more.
                "concurrency": -(-options.rollouts // GROUP // options.workers) * GROUP * options.workers,
                "timeout_seconds": options.timeout,
            },
            "trainer": {"name": "verl", "rollout_workers": options.workers, "nodes": options.nodes},
        }
    )
    (options.scratch / "config.yaml").write_text(dump_config(config))
    derived = translate(config, model=model, max_context=2048, folder=options.scratch, working_dir=Path.cwd())
    return LightningManager.create(
        config=compose_config(derived, defaults(config, max_context=2048), {}), llm_client=client
    )


def measure(manager: Any, options: Any, waiting: Any) -> dict[str, Any]:
    from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

    buffer = ReplayBuffer(
        trainer_mode="sync",
        trainer_config={},  # type: ignore[arg-type]
        max_off_policy_threshold=None,
        max_off_policy_strategy="drop",
        sampler_kwargs={},  # type: ignore[arg-type]
    )
    waiting.set_open(True)
    warm = ask(manager, options.workers * WARM_UP // GROUP, options.turns, step=1, prefix="w")
    buffer.sample(global_steps=1, partition_id="train", batch_size=len(warm))
    waiting.set_open(False)

    known: Known = {}
    watch = Watch(options.rollouts, waiting)
    pid = os.getpid()
    before, memory = cpu_by_kind(pid, known), resident_by_kind(pid, known)
    own = time.thread_time()
    watch.start(memory)
    started = time.monotonic()
    uids = ask(manager, options.rollouts // GROUP, options.turns, step=2, prefix="t")
    requested = time.monotonic()
    batch, _ = buffer.sample(global_steps=2, partition_id="train", batch_size=len(uids))
    ended = time.monotonic()
    after = cpu_by_kind(pid, known)
    trainer = time.thread_time() - own
    watch.stop()
    cpu = {kind: after.get(kind, 0.0) - before.get(kind, 0.0) for kind in KINDS}
    cpu["driver"] -= trainer + watch.cpu
    return {
        "rollouts": options.rollouts,
        "turns": options.turns,
        "nodes": options.nodes,
        "workers": options.workers,
        "most": watch.most,
        "seconds": {
            "dispatch": requested - started,
            "all arrived": watch.opened - started,
            "answered to batch": ended - watch.opened,
        },
        "cpu": {**cpu, "trainer": trainer},
        "ram": watch.ram,
        **check(options, uids, batch),
    }


def ask(manager: Any, prompts: int, turns: int, *, step: int, prefix: str) -> dict[str, str]:
    """Request rollouts as verl's trainer does. Returns task ids by prompt uid."""
    import numpy as np
    import transfer_queue as tq
    from verl.utils import tensordict_utils as tu

    from lightning_core.trainers.verl.dataset import TASK

    tasks = [{"id": f"{prefix}{number:06d}", "turns": turns} for number in range(prompts)]
    uids = [f"{task['id']}-{time.monotonic_ns()}" for task in tasks]
    batch = tu.get_tensordict(
        {
            "uid": np.array(uids, dtype=object),
            TASK: np.array([json.dumps(task) for task in tasks], dtype=object),
            "raw_prompt": np.array([[{"role": "user", "content": task["id"]}] for task in tasks], dtype=object),
        }
    )
    tu.assign_non_tensor_data(batch, "global_steps", step)
    tags = [{"is_prompt": True, "status": "pending", "global_steps": step} for _ in uids]
    tq.kv_batch_put(keys=uids, partition_id="train", tags=tags)
    manager.generate_sequences(batch)
    return {uid: str(task["id"]) for uid, task in zip(uids, tasks, strict=True)}


class Watch:
    """Watches a case: opens the model's gate when all rollouts wait there; records peak waiting requests and peak memory."""

    def __init__(self, rollouts: int, waiting: Any) -> None:
        self._rollouts = rollouts
        self._waiting = waiting
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self.most = 0
        self.opened = 0.0
        self.cpu = 0.0
        self.ram: dict[str, int] = {}

    def start(self, memory: Mapping[str, int]) -> None:
        self._before = memory
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        known: Known = {}
        most: dict[str, int] = defaultdict(int)
        looks = 0
        grown = time.monotonic()
        while not self._over.wait(0.25):
            if not self.opened:
                total = self._waiting.total()
                if total > self.most:
                    self.most, grown = total, time.monotonic()
                if self.most >= self._rollouts or time.monotonic() - grown > _PATIENCE:
                    self._memory(most, known)
                    self._waiting.set_open(True)
                    self.opened = time.monotonic()
            looks += 1
            if looks % 8 == 0:
                self._memory(most, known)
            self.cpu = time.thread_time()
        self.ram = {kind: most[kind] - self._before.get(kind, 0) for kind in KINDS}

    @staticmethod
    def _memory(most: dict[str, int], known: Known) -> None:
        for kind, size in resident_by_kind(os.getpid(), known).items():
            most[kind] = max(most[kind], size)


def check(options: Any, uids: Mapping[str, str], batch: Any) -> dict[str, Any]:
    """Trace each row to its rollout and its task, and count violations."""
    import transfer_queue as tq

    from lightning_core.model.source import load_tokenizer
    from lightning_core.records.store import Store

    tokenizer: Any = load_tokenizer(str(options.model))
    found: Counter[str] = Counter()
    owners: Counter[str] = Counter()
    with Store(options.scratch / "store.db", read_only=True) as store:
        stored = {r.id[:16]: r for r in store.rollouts(phase="train", step=2)}
        credit = Counter(c.rollout[:16] for c in store.credit(step=2))
    for start in range(0, len(batch.keys), 1000):
        keys = batch.keys[start : start + 1000]
        data = tq.kv_batch_get(keys=keys, partition_id="train", select_fields=["prompts", "responses", "response_mask"])
        for key, prompt, response, mask in zip(
            keys, data["prompts"], data["responses"], data["response_mask"], strict=True
        ):
            said = tokenizer.decode(response[mask.bool()])
            names = {said[i : i + 16] for i in range(0, len(said), 16)}
            task = uids[key.rpartition("_")[0].rpartition("_")[0]]
            name = min(names)
            owners[name] += 1
            whole = names == {name} and len(said) == 16 * options.turns
            found["rows that are not one rollout's turns"] += not whole
            found["rows of another task"] += f"\n{task}" not in tokenizer.decode(prompt)
            found["rows of a rollout that is not stored"] += name not in stored
            found["rollouts stored with another task"] += name in stored and stored[name].task_id != task
    found["rollouts without a row"] = len(stored.keys() - owners.keys())
    found["rollouts with more rows than one"] = sum(count > 1 for count in owners.values())
    found["rollouts not stored"] = options.rollouts - len(stored)
    found["rollouts that did not end well"] = sum(r.status != "ok" for r in stored.values())
    for error in Counter(r.error for r in stored.values() if r.status != "ok"):
        print(error)
    found["calls without credit"] = options.rollouts * options.turns - sum(credit.values())
    return {"rows": len(batch.keys), "wrong": {what: count for what, count in found.items() if count}}


def start_case(options: Any, scratch: Path, **case: int) -> dict[str, Any]:
    """Run one case in a new process. It is killed with all its children when it exceeds the time limit."""
    folder = scratch / "-".join(f"{key}{value}" for key, value in case.items())
    folder.mkdir()
    # Ray's sockets are in its folder, and paths of sockets must be short.
    ray_folder = Path(tempfile.mkdtemp(prefix="lcb", dir="/tmp"))
    command = [sys.executable, "-m", "tests.bench.cluster", "--case", "--scratch", str(folder)]
    command += ["--model", str(scratch / "model"), "--ray-folder", str(ray_folder), f"--timeout={options.timeout}"]
    command += [word for key, value in case.items() for word in (f"--{key}", str(value))]
    with (folder / "log").open("w") as sink:
        child = subprocess.Popen(
            command, stdout=sink, stderr=sink, env={**os.environ, **ENVIRONMENT}, start_new_session=True
        )
    known: Known = {}
    deadline = time.monotonic() + options.timeout
    try:
        while child.poll() is None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{case} took more than {options.timeout} s; see {folder / 'log'}")
            time.sleep(1)
            cpu_by_kind(child.pid, known)
    finally:
        end(child, known)
        shutil.rmtree(ray_folder, ignore_errors=True)
    result = folder / _RESULT
    if not result.is_file():
        raise RuntimeError(f"{case} ended with exit code {child.returncode}; see {folder / 'log'}")
    return json.loads(result.read_text())


def report(result: Mapping[str, Any]) -> None:
    count = result["rollouts"]
    cpu, ram, seconds = result["cpu"], result["ram"], result["seconds"]
    cells = "".join(f"{cpu[kind] * 1000 / count:9.2f}" for kind in (*KINDS, "trainer"))
    memory = "".join(f"{ram[kind] / 1024 / count:9.1f}" for kind in KINDS)
    head = "".join(f"{result[key]:>9}" for key in ("rollouts", "turns", "nodes", "workers", "most", "rows"))
    wrong = ", ".join(f"{what}: {n}" for what, n in result["wrong"].items()) or "none"
    times = " + ".join(f"{value:.1f}" for value in seconds.values())
    print(f"{head} |{cells} |{memory} | {times} | {wrong} | load {os.getloadavg()[0]:.1f}", flush=True)


def saturation(results: Sequence[Mapping[str, Any]]) -> None:
    """Print the throughput limit of one manager, which uses one core at most, unlike the workers."""
    largest = max(results, key=lambda r: r["rollouts"])
    count = largest["rollouts"]
    manager, worker, queue = (largest["cpu"][kind] / count for kind in ("driver", "agents", "TransferQueue"))
    each = f"the manager {manager * 1000:.2f} ms, TransferQueue {queue * 1000:.2f} ms, workers {worker * 1000:.2f} ms"
    print(f"\nmodel, from the largest case: a rollout of one turn costs {each}")
    print(
        f"one manager on one core handles {1 / manager:.0f} rollouts/s, the output of {worker / manager:.0f} cores of workers"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, nargs="*", default=[1000, 3000, 10000])
    parser.add_argument("--turns", type=int, nargs="*", default=[2, 4, 8])
    parser.add_argument("--nodes", type=int, nargs="*", default=[2, 4, 8])
    parser.add_argument("--workers", type=int, default=4, help="workers of a case on one node")
    parser.add_argument("--timeout", type=float, default=600, help="time limit of a case in seconds")
    parser.add_argument("--scratch", type=Path, help="folder for the files of the cases; default: a temporary one")
    for name in ("--model", "--ray-folder"):
        parser.add_argument(name, type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--case", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        options.rollouts, options.turns, options.nodes = options.rollouts[0], options.turns[0], options.nodes[0]
        (options.scratch / _RESULT).write_text(json.dumps(run_case(options)))
        return
    from tests.bench.verl_agents import make_endless_model

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # raises SystemExit, so that started processes are ended
    made = Path(tempfile.mkdtemp(prefix="lightning-bench-"))
    scratch = options.scratch or made
    scratch.mkdir(parents=True, exist_ok=True)
    first = options.rollouts[0] if options.rollouts else 1000
    print(f"Python {platform.python_version()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    print(
        f"{'rollouts':>9}{'turns':>9}{'nodes':>9}{'workers':>9}{'at once':>9}{'rows':>9} | CPU ms a rollout: agents, manager, "
        "TransferQueue, Ray, trainer | RAM KiB a rollout: the same | seconds: dispatch + all arrived + batch | wrong"
    )
    try:
        make_endless_model(scratch / "model")
        sizes: list[dict[str, Any]] = []
        for count in options.rollouts:
            sizes.append(start_case(options, scratch, rollouts=count, turns=1, nodes=1, workers=options.workers))
            report(sizes[-1])
        for turns in options.turns:
            report(start_case(options, scratch, rollouts=first, turns=turns, nodes=1, workers=options.workers))
        for nodes in options.nodes:
            report(start_case(options, scratch, rollouts=first, turns=1, nodes=nodes, workers=nodes))
        if sizes:
            saturation(sizes)
    finally:
        shutil.rmtree(made, ignore_errors=True)


if __name__ == "__main__":
    main()
