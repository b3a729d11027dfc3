"""Gathers the evidence about the environment: packages, hardware, disk, network."""

from __future__ import annotations

import os
import platform
import shutil
import socket
import tempfile
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path

from packaging.utils import canonicalize_name

from lightning_core.capture.integration import (
    Conflict,
    discover,
    find_conflicts,
    find_framework_conflicts,
    find_hosts,
    requirements_of_extra,
)
from lightning_core.config import Config
from lightning_core.config.sections import TRACKERS
from lightning_core.errors import os_problem, redact_urls
from lightning_core.rollouts.hardware import processors
from lightning_core.tools.doctor.environment import Devices, Environment, Extra

_DISTRIBUTION = "lightning-rl"
_NOT_REPORTED = ("dev", "dev-models", "dev-view", "docs", "examples", "all", "quickstart")
"""Extras that are for development or combine others."""


def gather_environment(config: Config | None = None) -> Environment:
    """The environment; ``config``: for the endpoint's address and the folder of runs."""
    host, port = ("127.0.0.1", 0) if config is None else (config.endpoint.host, config.endpoint.port)
    runs = Path("runs" if config is None else config.run.dir)
    lightning = find_distribution(_DISTRIBUTION)
    names = list((lightning.metadata.get_all("Provides-Extra") if lightning else None) or ())
    extras = read_extras(lightning, [name for name in names if name not in _NOT_REPORTED])
    integrations = {name: extras.pop(name) for name in discover() if name in extras}
    for name, entry in discover().items():
        if entry.dist is not None and canonicalize_name(entry.dist.name) != _DISTRIBUTION:
            integrations |= read_extras(entry.dist, [name])
        if name in integrations:
            conflicts = find_framework_conflicts(entry, find_hosts(name))
            integrations[name] = replace(integrations[name], conflicts=_words(conflicts))
    packages = ("lightning-rl", "torch", "transformers")
    versions = {name: dist.version for name in packages if (dist := find_distribution(name)) is not None}
    return Environment(
        versions={"Python": platform.python_version(), **versions},
        integrations=integrations,
        extras=extras,
        needed={} if config is None else needed_extras(config),
        cpu=cpu_model(),
        cores=processors(),
        devices=_devices(),
        folder=str(runs),
        disk_bytes=free_bytes(runs),
        folder_error=why_not_created(runs),
        proxies=catching_proxies(),
        port=f"{host}:{port}",
        port_error=why_closed(host, port),
    )


def free_bytes(folder: Path) -> int:
    """The free bytes where ``folder`` is, or would be created."""
    return shutil.disk_usage(_nearest(folder, os.path.exists)).free


def why_not_created(folder: Path) -> str | None:
    """The reason no folder can be created in ``folder``, which may not exist, or None.

    Tried: permissions do not show a disk that is mounted read-only, or a file system such as ``/proc``.
    """
    nearest = _nearest(folder, os.path.lexists)
    if nearest.is_symlink() and not nearest.exists():
        return f"{str(nearest)!r} is a link to {str(nearest.readlink())!r}, which does not exist"
    if not nearest.is_dir():
        return f"{str(nearest)!r} is not a folder"
    try:
        with tempfile.TemporaryDirectory(prefix=".lightning-doctor-", dir=nearest):
            return None
    except OSError as error:
        return f"{error.strerror or error} ({str(nearest)!r})"


def _nearest(folder: Path, exists: Callable[[Path], bool]) -> Path:
    """``folder``, or the nearest of the folders around it that exists."""
    return next(parent for parent in (folder, *folder.absolute().parents) if exists(parent))


def needed_extras(config: Config) -> dict[str, str]:
    """The extras that ``config`` needs, and the setting that does. A vLLM of another distribution is accepted."""
    name, starts_vllm = config.trainer.name, config.policy.backend == "vllm" and config.policy.vllm.url is None
    needed = {name: f"trainer.name: {name}"}
    if starts_vllm and find_spec("vllm") is None:
        needed["vllm"] = "policy.backend: vllm"
    needed |= {name: f"run.report_to: {name}" for name in config.run.report_to if name in TRACKERS}
    if config.otlp.endpoint is not None:
        needed["otlp"] = "otlp.endpoint"
    return needed


def find_distribution(name: str) -> Distribution | None:
    """The installed distribution ``name``, or None."""
    try:
        return distribution(name)
    except PackageNotFoundError:
        return None


def read_extras(dist: Distribution | None, names: Sequence[str]) -> dict[str, Extra]:
    """The installed packages of the extras ``names``. Extras without packages are left out.

    The metadata lists the packages of an extra with the packages of the extras that it includes.
    """
    required = {name: {r.name for r in requirements_of_extra(dist, name)} for name in names}
    return {name: _read_extra(dist, name, _own(packages, required)) for name, packages in required.items() if packages}


def _own(packages: set[str], required: Mapping[str, set[str]]) -> list[str]:
    """The ``packages`` of an extra that are in none of the extras that it includes."""
    included = [other for other in required.values() if other < packages]
    return sorted(packages.difference(*included))


def _read_extra(dist: Distribution | None, name: str, packages: Sequence[str]) -> Extra:
    conflicts = _words(find_conflicts(dist, name))
    versions = {package: found.version for package in packages if (found := find_distribution(package)) is not None}
    return Extra(installed=versions, conflicts=conflicts)


def _words(conflicts: Sequence[Conflict]) -> list[str]:
    return [f"{c.required} ({c.found or 'missing'})" for c in conflicts]


def cpu_model() -> str:
    """The name of the CPU; on Linux with its family and model, since virtual machines call several generations `AMD EPYC`."""
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        entries = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
        match entries:
            case {"model name": name, "cpu family": family, "model": model}:
                return f"{name} (family {family}, model {model})"
            case {"model name": name}:
                return name
            case _:
                pass
    return platform.processor() or platform.machine()


def _devices() -> Devices | None:
    try:
        from lightning_core.trainers.torch.machine import torch_machine  # loads torch
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("lightning_core"):
            raise
        return None
    machine = torch_machine()
    return Devices(
        gpus=machine.gpus,
        kernels=machine.kernels,
        bfloat16=machine.bfloat16,
        threads=machine.threads,
        free_bytes=machine.free_bytes,
    )


def catching_proxies(host: str = "127.0.0.1") -> Mapping[str, str]:
    """The variables of proxies that plain HTTP requests to ``host`` would use, without credentials."""
    if urllib.request.proxy_bypass(host):
        return {}
    proxies = urllib.request.getproxies()
    return {f"{kind}_proxy": redact_urls(proxies[kind]) for kind in ("http", "all") if kind in proxies}


def why_closed(host: str, port: int) -> str | None:
    """The reason a server cannot listen at this address, or None."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
    except OSError as error:
        return os_problem(error)
    return None
