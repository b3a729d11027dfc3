"""Child processes of a benchmark: start, wait, end, and measure."""

from __future__ import annotations

import os
import resource
import subprocess
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx

_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


@contextmanager
def process(
    command: Sequence[str], *, log: Path | None = None, env: Mapping[str, str] | None = None
) -> Generator[subprocess.Popen[str]]:
    """Start a child that ends with the block. With ``log`` it runs in that file's folder and prints to the file."""
    if log is None:
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
    else:
        with log.open("w") as sink:
            child = subprocess.Popen(command, stdout=sink, stderr=subprocess.STDOUT, text=True, cwd=log.parent, env=env)
    try:
        yield child
    finally:
        child.terminate()
        try:
            child.wait(10)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def wait_for_http(url: str, child: subprocess.Popen[str], log: Path, seconds: float = 600) -> None:
    """Wait until ``url`` is answered with 200. Raises RuntimeError with the end of ``log`` if the child ends or is late."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and child.poll() is None:
        try:
            if httpx.get(url, timeout=seconds).status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.1)
    raise RuntimeError(f"{child.args!r} did not start; its last words: {log.read_text()[-500:]}")


def read_line(child: subprocess.Popen[str]) -> str:
    """The next line that ``child`` prints. Raises RuntimeError if the child ends instead."""
    assert child.stdout is not None
    line = child.stdout.readline()
    if not line:
        raise RuntimeError(f"{child.args!r} ended with exit code {child.wait()}")
    return line.strip()


def cpu_seconds(pid: int) -> float:
    """User and system time of all threads of a process so far, to 10 ms."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_SECOND


def resident_bytes(pid: int) -> int:
    """Resident memory of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) * 1024


def raise_file_limit() -> None:
    """Raise the limit of open files: a connection is a file, and a thousand streams need two thousand."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
