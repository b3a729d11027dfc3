"""Checks of the environment: versions, hardware, memory, disk, extras, network."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from lightning_core.tools.doctor.finding import Checks, Observed
from lightning_core.tools.doctor.units import size

_LITTLE_MEMORY = 2 << 30
_LITTLE_DISK = 5 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Extra:
    """An optional extra of the distribution."""

    installed: Mapping[str, str]
    """The versions of its installed packages, without the packages of extras that it includes. Empty if it is not used."""
    conflicts: Sequence[str]
    """Its unmet requirements: ``llguidance>=1.7 (missing)``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Devices:
    """The device that torch computes with."""

    gpus: Sequence[str] = ()
    kernels: str
    bfloat16: str | None
    threads: int
    free_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """The machine and the installed packages."""

    versions: Mapping[str, str]
    """The versions of Python, lightning-rl, and torch and transformers if installed."""
    integrations: Mapping[str, Extra]
    """The frameworks by the names of their integrations."""
    extras: Mapping[str, Extra]
    """The other extras."""
    needed: Mapping[str, str] = field(default_factory=dict[str, str])
    """The extras that the configuration needs, and the setting that does."""
    cpu: str
    cores: int
    """The CPUs that this process may use."""
    devices: Devices | None
    """None without torch."""
    folder: str
    """The folder of runs."""
    disk_bytes: int
    """Free bytes there."""
    folder_error: str | None
    """The reason no run can be created there, or None."""
    proxies: Mapping[str, str] = field(default_factory=dict[str, str])
    """The variables of proxies that requests to this machine would go through, and the proxies."""
    port: str
    """The address of the endpoint: ``127.0.0.1:0``."""
    port_error: str | None
    """The reason it cannot be opened, or None."""


checks: Checks[Environment] = Checks("Environment")


@checks.check("versions")
def versions(e: Environment) -> Iterator[Observed]:
    """Versions of Python, Lightning, torch and transformers. Quote them in a report of a bug."""
    yield Observed("info", ", ".join(f"{name} {version}" for name, version in e.versions.items()))


@checks.check("torch")
def torch(e: Environment) -> Iterator[Observed]:
    """torch is not installed. Training and serving need it; recording, credit and traces do not. Install the extra `torch`."""
    if "torch" not in e.versions:
        yield Observed("warning", "torch is not installed", "to train or serve: pip install 'lightning-rl[torch]'")


@checks.check("frameworks")
def frameworks(e: Environment) -> Iterator[Observed]:
    """A framework whose installed version is not supported, or that is incomplete. Its agents are not named and its
    events are not recorded. Install the extra of its name."""
    complete = [i.installed for i in e.integrations.values() if i.installed and not i.conflicts]
    if complete:
        shown = (f"{name} {version}" for packages in complete for name, version in packages.items())
        yield Observed("ok", ", ".join(shown))
    yield from _unmet(e.integrations)


@checks.check("extras")
def extras(e: Environment) -> Iterator[Observed]:
    """Some packages of an extra are missing or too old, so its features fail later. Install the extra."""
    if complete := [name for name, extra in e.extras.items() if extra.installed and not extra.conflicts]:
        yield Observed("ok", ", ".join(complete))
    yield from _unmet(e.extras)


@checks.check("needed extras")
def needed(e: Environment) -> Iterator[Observed]:
    """An extra that the configuration needs is not installed, or not completely. The run would stop. Install it."""
    for name, setting in e.needed.items():
        if name in e.extras and e.extras[name].conflicts:
            unmet = ", ".join(e.extras[name].conflicts)
            yield Observed(
                "problem", f"{setting} needs the extra {name}: {unmet}", f"pip install 'lightning-rl[{name}]'"
            )


@checks.check("cpu")
def cpu(e: Environment) -> Iterator[Observed]:
    """CPU, cores, and the instructions that the model uses. With AMX or AVX512_BF16, matrix products are about twice as
    fast. Without AVX2, training on this CPU is slow."""
    description = f"{e.cpu}, {e.cores} cores"
    if e.devices is None:
        yield Observed("info", description)
        return
    units = [e.devices.kernels, *filter(None, [e.devices.bfloat16])]
    text = f"{description}, {e.devices.threads} threads, {' + '.join(units)}"
    if e.devices.kernels in ("AVX512", "AVX2") or not e.cpu.startswith(("Intel", "AMD")):
        yield Observed("info", text)
    else:
        yield Observed("warning", text, "the model runs without AVX2 kernels: use another machine to train")


@checks.check("gpu")
def gpu(e: Environment) -> Iterator[Observed]:
    """The GPUs that torch sees. If one is missing, torch is a CPU build or the driver is too old."""
    if e.devices is not None:
        yield Observed("info", ", ".join(e.devices.gpus) or "none: the model runs on the CPU")


@checks.check("memory")
def memory(e: Environment) -> Iterator[Observed]:
    """Free memory of the device, within the limit of the container or job. Full training needs about 16 bytes per trained
    weight, and the rest is divided between the sampler's cache and a training pass. Use a smaller model, `train_layers` or
    LoRA if it is short."""
    if e.devices is None:
        return
    text = f"{size(e.devices.free_bytes)} free"
    if e.devices.free_bytes < _LITTLE_MEMORY:
        yield Observed(
            "warning", text, "end other programs, raise the limit of the container, or use a smaller model or LoRA"
        )
    else:
        yield Observed("ok", text)


@checks.check("disk")
def disk(e: Environment) -> Iterator[Observed]:
    """Free disk space in `run.dir`, and whether a run can be created there. A checkpoint of full training has 12 bytes per
    trained weight, and a full disk stops the run."""
    text = f"{size(e.disk_bytes)} free in {e.folder}"
    if e.folder_error is not None:
        advice = "set run.dir to a folder that you may write to, or mount its disk"
        yield Observed("problem", f"no run can be created in {e.folder}: {e.folder_error}", advice)
    elif e.disk_bytes < _LITTLE_DISK:
        yield Observed("warning", text, "free space, or set run.dir to another disk")
    else:
        yield Observed("ok", text)


@checks.check("proxies")
def proxies(e: Environment) -> Iterator[Observed]:
    """A proxy in the environment that requests to this machine would go through. Routed requests of Python clients and of
    child programs bypass it; other clients of agents, such as those in containers, do not. Add the endpoint to `NO_PROXY`."""
    for variable, proxy in e.proxies.items():
        yield Observed("warning", f"{variable}={proxy} catches 127.0.0.1", "set NO_PROXY=127.0.0.1,localhost")


@checks.check("port")
def port(e: Environment) -> Iterator[Observed]:
    """Whether the endpoint can open its port (`endpoint.host`, `endpoint.port`). Another program, often a run that still
    goes on, may have it. With port 0 any free one is used."""
    if e.port_error is None:
        yield Observed("ok", f"the endpoint can open {e.port}")
    else:
        advice = "end the program that has it, or set endpoint.port: 0"
        yield Observed("problem", f"the endpoint cannot open {e.port}: {e.port_error}", advice)


def _unmet(extras: Mapping[str, Extra]) -> Iterator[Observed]:
    for name, extra in extras.items():
        if extra.installed and extra.conflicts:
            text = f"{name} is incomplete: {', '.join(extra.conflicts)}"
            yield Observed("warning", text, f"pip install 'lightning-rl[{name}]'")
    if absent := [name for name, extra in extras.items() if not extra.installed]:
        yield Observed("info", f"not installed: {', '.join(absent)}")
