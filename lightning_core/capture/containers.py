"""Command lines of Docker and Podman."""

from __future__ import annotations

import logging
import os
import re
import secrets
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from lightning_core.capture.context import outside_rollout

logger = logging.getLogger(__name__)

Runtime = Literal["docker", "podman"]
RUNTIMES: tuple[str, ...] = get_args(Runtime)
NAME = re.compile(r"lightning-[0-9a-f]{16}")
"""The names of containers."""

_REMOVING_SECONDS = 20
_PAUSE_SECONDS = 0.3
_NOT_STARTED = re.compile(r"docker: Error response|Error: .*(OCI|runc|crun|starting container|start container)")
"""The start of what ``run`` prints if the container exists and its program cannot be started."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Container:
    """A container to run a program in."""

    image: str
    runtime: Runtime = "docker"
    args: tuple[str, ...] = ()
    """Further arguments for ``docker run`` or ``podman run``, before the image."""
    host_network: bool = True
    """Whether it shares the network of this machine, and so reaches an endpoint on 127.0.0.1."""

    def command(
        self,
        command: Sequence[str],
        *,
        name: str,
        volumes: Iterable[Path],
        work: Path,
        variables: Mapping[str, str],
        private: Path,
    ) -> list[str]:
        """The command line that runs ``command`` in a new container called ``name``, which is removed when it ends.

        ``volumes``: folders and files that it shares under the same paths. ``work``: the working folder. ``private``: a folder for
        files of this call, which it does not share; they hold ``variables``, so no key is on a command line. Raises ValueError
        for a variable with a line break.
        """
        environment = private / "environment"
        environment.touch(mode=0o600)
        environment.write_text("".join(f"{line}\n" for line in map(_line, variables.items())), encoding="utf-8")
        # Docker's programs run as root by default. Podman's root is this user.
        user = [f"--user={os.getuid()}:{os.getgid()}"] if self.runtime == "docker" else []
        return [
            *(self.runtime, "run", "--rm", "--interactive", f"--name={name}", "--label=lightning"),
            *(f"--cidfile={private / 'created'}", f"--env-file={environment}"),
            *user,
            *(["--network=host"] if self.host_network else []),
            *(f"--volume={volume}:{volume}" for volume in volumes),
            f"--workdir={work}",
            *self.args,
            self.image,
            *command,
        ]

    def has_run(self, code: int, stderr: str, *, private: Path) -> bool:
        """Whether the program was started, by what ``run`` left, its exit code, and what it printed."""
        # 126 and 127: the program could not be started, or it is a shell that returned the same code.
        return (private / "created").exists() and not (code in (126, 127) and _NOT_STARTED.match(stderr))


def new_name() -> str:
    """A name for a container."""
    return f"lightning-{secrets.token_hex(8)}"


def _line(variable: tuple[str, str]) -> str:
    name, value = variable
    if "\n" in value:
        raise ValueError(f"the variable {name} has a line break, which containers cannot get; use a file")
    return f"{name}={value}"


def remove_container(runtime: str, name: str) -> None:
    """Kill and remove a container, if it exists. A container that is just ending can refuse, and is tried again."""
    end = time.monotonic() + _REMOVING_SECONDS
    try:
        while problem := _problem_of_removing(runtime, name, seconds=_REMOVING_SECONDS):
            if time.monotonic() >= end:
                break
            time.sleep(_PAUSE_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        problem = str(error)
    if problem:
        logger.warning("the container %s could not be removed: %s", name, problem)


def _problem_of_removing(runtime: str, name: str, *, seconds: float) -> str | None:
    at_once = ["--time=0"] if runtime == "podman" else []
    with outside_rollout():
        done = subprocess.run(
            [runtime, "rm", "--force", *at_once, name],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
    said = done.stderr.strip()
    if done.returncode == 0 or "no such container" in said.lower() or "no container with" in said.lower():
        return None
    return said or f"{runtime} rm ended with exit code {done.returncode}"
