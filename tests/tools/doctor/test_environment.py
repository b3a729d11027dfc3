"""What the doctor finds in the environment."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import Distribution
from pathlib import Path

import pytest

from lightning_core.config import load_config
from lightning_core.tools.cli.main import main
from lightning_core.tools.doctor.environment import Devices, Environment, Extra, checks
from lightning_core.tools.doctor.finding import Finding
from lightning_core.tools.doctor.gather import (
    catching_proxies,
    free_bytes,
    gather_environment,
    needed_extras,
    read_extras,
    why_closed,
    why_not_created,
)
from tests.tools.doctor.conftest import named

METADATA = """\
Metadata-Version: 2.4
Name: product
Version: 1
Provides-Extra: web
Provides-Extra: web-fast
Provides-Extra: nothing
Requires-Dist: httpx>=0.1; extra == "web"
Requires-Dist: packaging>=1; extra == "web"
Requires-Dist: httpx>=0.1; extra == "web-fast"
Requires-Dist: packaging>=1; extra == "web-fast"
Requires-Dist: {fast}; extra == "web-fast"
"""
EXAMPLE = Environment(
    versions={"Python": "3.11", "lightning-rl": "1", "torch": "2", "transformers": "5"},
    integrations={},
    extras={},
    cpu="Intel Xeon",
    cores=8,
    devices=Devices(kernels="AVX2", bfloat16=None, threads=8, free_bytes=16 << 30),
    folder="runs",
    disk_bytes=100 << 30,
    folder_error=None,
    port="127.0.0.1:0",
    port_error=None,
)


def examine(environment: Environment) -> list[Finding]:
    return list(checks.examine("environment", environment))


@pytest.fixture
def product(tmp_path: Path) -> Callable[[str], Distribution]:
    """A distribution whose extra ``web-fast`` includes ``web`` and requires one more package."""

    def make(fast: str) -> Distribution:
        folder = tmp_path / "product-1.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(METADATA.format(fast=fast))
        return Distribution.at(folder)

    return make


def test_the_example_is_healthy() -> None:
    assert {f.level for f in examine(EXAMPLE)} == {"ok", "info"}


def test_this_environment_is_gathered() -> None:
    found = examine(gather_environment())
    (versions,) = [f for f in found if f.name == "versions"]
    assert re.search(r"Python 3\.\d+\.\d+, lightning-rl \d", versions.found)


def test_an_extra_with_a_missing_package_is_named(product: Callable[[str], Distribution]) -> None:
    extras = read_extras(product("lightning-has-no-such-package>=2"), ["web", "web-fast", "nothing"])
    assert list(extras["web"].installed) == ["httpx", "packaging"]
    assert extras["web"].conflicts == []
    assert extras["web-fast"] == Extra(installed={}, conflicts=["lightning-has-no-such-package>=2 (missing)"])
    assert "nothing" not in extras
    found = examine(replace(EXAMPLE, extras=extras))
    assert named(found, "extras") == []
    assert [f.found for f in found if f.name == "extras"][1:] == ["not installed: web-fast"]


def test_an_extra_with_a_package_that_is_too_old_is_incomplete(product: Callable[[str], Distribution]) -> None:
    extras = read_extras(product("pytest>=900"), ["web", "web-fast"])
    (incomplete,) = named(examine(replace(EXAMPLE, extras=extras)), "extras")
    assert incomplete.found == f"web-fast is incomplete: pytest>=900 ({pytest.__version__})"
    assert incomplete.advice == "pip install 'lightning-rl[web-fast]'"


def test_an_extra_of_which_one_package_is_missing_is_incomplete() -> None:
    extra = Extra(installed={"torch": "2.13"}, conflicts=["llguidance>=1.7 (missing)"])
    (incomplete,) = named(examine(replace(EXAMPLE, extras={"torch": extra})), "extras")
    assert incomplete.found == "torch is incomplete: llguidance>=1.7 (missing)"


def test_an_extra_that_the_configuration_needs_is_a_problem() -> None:
    config = load_config({"policy": {"model": "m"}, "otlp": {"endpoint": "http://localhost:4318/v1/traces"}})
    assert needed_extras(config) == {"torch": "trainer.name: torch", "otlp": "otlp.endpoint"}
    verl = load_config({"policy": {"model": "m"}, "trainer": {"name": "verl"}})
    extras = {"verl": Extra(installed={}, conflicts=["verl<0.10,>=0.9.1 (missing)"])}
    found = examine(replace(EXAMPLE, extras=extras, needed=needed_extras(verl)))
    (missing,) = named(found, "needed extras")
    assert (missing.level, missing.advice) == ("problem", "pip install 'lightning-rl[verl]'")
    assert missing.found == "trainer.name: verl needs the extra verl: verl<0.10,>=0.9.1 (missing)"


def test_little_memory_a_full_disk_and_a_slow_cpu_are_named() -> None:
    poor = replace(
        EXAMPLE, disk_bytes=1 << 30, devices=Devices(kernels="DEFAULT", bfloat16=None, threads=1, free_bytes=1 << 29)
    )
    assert [f.name for f in examine(poor) if f.level == "warning"] == ["cpu", "memory", "disk"]


def test_a_folder_that_cannot_be_written_is_a_problem() -> None:
    (disk,) = named(examine(replace(EXAMPLE, folder_error="Read-only file system")), "disk")
    assert (disk.level, disk.found) == ("problem", "no run can be created in runs: Read-only file system")


def test_a_folder_that_cannot_be_created_has_a_reason(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "disk").symlink_to(tmp_path / "unmounted")
    assert why_not_created(tmp_path / "new" / "runs") is None
    assert list(tmp_path.rglob(".*")) == []
    for path in ("file", "file/runs"):
        assert why_not_created(tmp_path / path) == f"'{tmp_path / 'file'}' is not a folder"
    assert "unmounted', which does not exist" in (why_not_created(tmp_path / "disk" / "runs") or "")
    assert free_bytes(tmp_path / "disk" / "runs") > 0
    if Path("/proc/self").exists():  # where permissions say yes
        assert why_not_created(Path("/proc/nosuch")) == "No such file or directory ('/proc')"


def test_a_proxy_that_catches_this_machine_is_named_without_its_password(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_PROXY", "no_proxy", "HTTP_PROXY", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", "http://me:secret@proxy:3128")
    assert catching_proxies() == {"http_proxy": "http://***@proxy:3128"}
    (proxy,) = named(examine(replace(EXAMPLE, proxies=catching_proxies())), "proxies")
    assert proxy.found == "http_proxy=http://***@proxy:3128 catches 127.0.0.1"
    monkeypatch.setenv("no_proxy", "localhost,127.0.0.1")
    assert catching_proxies() == {}


def test_a_port_that_is_taken_is_a_problem() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        error = why_closed("127.0.0.1", port)
    assert error is not None
    assert why_closed("127.0.0.1", 0) is None
    (taken,) = named(examine(replace(EXAMPLE, port=f"127.0.0.1:{port}", port_error=error)), "port")
    assert taken.level == "problem"


def test_the_command_without_a_configuration_reports_the_environment(capsys: pytest.CaptureFixture[str]) -> None:
    main(["doctor"])
    text = capsys.readouterr().out
    assert text.startswith("environment\n  info")
    assert "versions" in text
    assert re.search(r"\d problems?, \d warnings?", text)


WITHOUT_TORCH = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformers", "psutil"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Missing())
from importlib import metadata
from lightning_core.tools.doctor import gather
found = gather.find_distribution
gather.find_distribution = lambda name: None if name in ("torch", "transformers") else found(name)
from lightning_core.tools.cli.main import main
sys.exit(main(["doctor", "--json"]))
"""


def test_without_torch_the_environment_is_checked_all_the_same() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH], capture_output=True, text=True, check=False, timeout=120
    )
    found = [Finding(**finding) for finding in json.loads(done.stdout)]
    assert [f.found for f in named(found, "torch")] == ["torch is not installed"]
    assert [f.level for f in found if f.name == "cpu"] == ["info"]
    assert "memory" not in {f.name for f in found}
