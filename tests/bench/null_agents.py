"""Agents of the rollouts benchmark, which worker processes import."""

from __future__ import annotations

import asyncio
import time
from typing import Any

TOOL_SECONDS = 0.1


async def nothing(task: Any) -> float:
    """An agent that makes no call and earns 1."""
    return 1.0


async def tool(task: Any) -> float:
    """An agent with one blocking tool."""
    await asyncio.to_thread(time.sleep, TOOL_SECONDS)
    return 1.0
