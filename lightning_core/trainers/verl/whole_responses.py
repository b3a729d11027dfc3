"""Samples constrained responses in verl's asynchronous modes, where weights interrupt a response."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from lightning_core.backends.verl import TokenOutput

_RETRY_SECONDS = 1


class WholeResponses:
    """An `LLMClient` that begins an interrupted response again, where verl's would go on after its last token."""

    def __init__(self, client: Any) -> None:
        self._client = client

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: Mapping[str, Any]
    ) -> TokenOutput:
        """Sample one response."""
        from verl.workers.rollout.llm_server import LLMServerClient

        while True:
            output: TokenOutput = await LLMServerClient.generate(
                self._client, request_id, prompt_ids=prompt_ids, sampling_params=dict(sampling_params)
            )
            if output.stop_reason not in ("abort", "aborted"):
                return output
            await asyncio.sleep(_RETRY_SECONDS)
