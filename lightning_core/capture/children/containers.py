"""Command lines of Docker and Podman."""

from __future__ import annotations

import logging
import os
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lightning_core.capture.context import outside_rollout

logger = logging.getLogger(__name__)

Runtime = Literal["docker", "podman"]

_REMOVING_SECONDS = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Container:
    """A container to run a program in."""

    image: str
    runtime: Runtime = "docker"
    args: tuple[str, ...] = ()
    """Further arguments for ``docker run`` or ``podman run``, before the image."""
    host_network: bool = True
    """Whether it shares the network of this machine, so that it reaches an endpoint on 127.0.0.1."""

    def command(
        self, command: Sequence[str], *, name: str, root: Path, work: Path, variables: Iterable[str]
    ) -> list[str]:
        """The command line that runs ``command`` in a new container called ``name``, which is removed when it ends.

        ``root``: a folder that the container shares, with the working folder ``work`` in it. ``variables``: names of variables that it
        gets from this process's environment, so that their values are on no command line.
        """
        # Docker runs programs as root by default. Podman's root is this user.
        user = [f"--user={os.getuid()}:{os.getgid()}"] if self.runtime == "docker" else []
        return [
            *(self.runtime, "run", "--rm", "--interactive", f"--name={name}"),
            *user,
            *(["--network=host"] if self.host_network else []),
            *(f"--volume={root}:{root}", f"--workdir={work}"),
            *(f"--env={variable}" for variable in variables),
            *self.args,
            self.image,
            *command,
        ]

    def has_run(self, code: int, stderr: str) -> bool:
        """Whether the program was started, by the exit code of ``run`` and what it printed."""
        # 125: the runtime failed. 126 and 127: it could not start the program, or the program is a shell that says the same.
        return code != 125 and not (code in (126, 127) and stderr.startswith(("Error: ", "docker: ")))


def remove_container(runtime: str, name: str) -> None:
    """Stop and remove a container, if it exists."""
    try:
        with outside_rollout():
            done = subprocess.run(
                [runtime, "rm", "--force", name],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=_REMOVING_SECONDS,
                check=False,
            )
    except (OSError, subprocess.TimeoutExpired) as error:
        logger.warning("the container %s could not be removed: %s", name, error)
        return
    if (
        done.returncode
        and "no such container" not in done.stderr.lower()
        and "no container with" not in done.stderr.lower()
    ):
        logger.warning("the container %s could not be removed: %s", name, done.stderr.strip())
