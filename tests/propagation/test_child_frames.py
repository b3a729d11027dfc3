"""Processes that a run starts, when the run is gone."""

from __future__ import annotations

import socket

from lightning_core.propagation.children.frames import serve


def test_a_process_whose_run_is_gone_ends_in_silence() -> None:
    ours, theirs = socket.socketpair()
    ours.close()

    def report(fd: int) -> None:
        with socket.socket(fileno=fd) as connection:
            connection.sendall(b"ready")

    serve(report, theirs.detach())
