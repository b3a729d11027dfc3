"""The model of the cluster benchmark: a script behind verl's client interface that holds all first requests until a gate opens."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verl.workers.rollout.replica import TokenOutput

TOKENS = 16
TURN_SECONDS = 0.5
_FIRST_LETTER = 0x21
"""The byte of token 0 of the tiny model, whose tokens are bytes."""


def name_to_tokens(rollout: str) -> list[int]:
    """The first `TOKENS` bytes of a rollout's name as tokens."""
    return [letter - _FIRST_LETTER for letter in rollout[:TOKENS].encode()]


class Waiting:
    """The number of waiting requests of all processes. Each process writes its own file in ``folder``."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self._mine = 0

    def change(self, by: int) -> None:
        """Add ``by`` to this process's number. `publish` writes it."""
        self._mine += by

    def publish(self) -> None:
        """Write this process's number, atomically by a rename."""
        file = self._folder / f"{os.getpid()}.new"
        file.write_text(str(self._mine))
        file.rename(self._folder / f"{os.getpid()}.waiting")

    def total(self) -> int:
        """The sum of the published numbers of all processes."""
        return sum(int(file.read_text()) for file in self._folder.glob("*.waiting"))

    @property
    def open(self) -> bool:
        """Whether the gate is open."""
        return (self._folder / "open").exists()

    def set_open(self, value: bool) -> None:
        """Open or close the gate."""
        if value:
            (self._folder / "open").touch()
        else:
            (self._folder / "open").unlink(missing_ok=True)


class Script:
    """The part of verl's client that `VerlBackend` uses. Answers with the rollout's name; first turns wait for the gate."""

    def __init__(self, folder: str) -> None:
        self._waiting = Waiting(folder)
        self._requests: Counter[str] = Counter()
        self._gate: asyncio.Event | None = None

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: Mapping[str, Any]
    ) -> TokenOutput:
        """One response."""
        del prompt_ids, sampling_params
        self._requests[request_id] += 1
        if self._requests[request_id] == 1:
            await self._wait()
        else:
            await asyncio.sleep(TURN_SECONDS)
        tokens = name_to_tokens(request_id)
        extra = {"min_global_steps": 0, "max_global_steps": 0}
        return TokenOutput(
            token_ids=tokens, log_probs=[-1.0] * len(tokens), stop_reason="completed", extra_fields=extra
        )

    async def _wait(self) -> None:
        if self._gate is None or self._gate.is_set():
            if self._waiting.open:
                await asyncio.sleep(TURN_SECONDS)
                return
            self._gate = asyncio.Event()
            self._watch = asyncio.create_task(self._open_gate(self._gate))
        self._waiting.change(1)
        try:
            await self._gate.wait()
        finally:
            self._waiting.change(-1)

    async def _open_gate(self, gate: asyncio.Event) -> None:
        while not self._waiting.open:
            self._waiting.publish()
            await asyncio.sleep(0.2)
        gate.set()
        await asyncio.sleep(TURN_SECONDS)
        self._waiting.publish()
