"""The prompts of verl in TransferQueue, where its trainer waits for their rows."""

from __future__ import annotations

from collections.abc import Sequence

import transfer_queue as tq
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from lightning_core.trainers.verl.prompts import Prompt
from lightning_core.trainers.verl.rows import VerlRow

_FINAL = ("finished", "failure")


def incomplete_prompts() -> list[str]:
    """The ids of the training prompts without a final status: at the start, those that verl requests again."""
    tags = tq.kv_list("train").get("train", {})
    return [key for key, tag in tags.items() if tag.get("is_prompt") and tag.get("status") not in _FINAL]


async def mark_running(prompt: Prompt) -> None:
    """Set the status of ``prompt``, whose rollouts begin."""
    await _set_status(prompt, "running")


async def put_rows(prompt: Prompt, rows: Sequence[VerlRow]) -> None:
    """Put the rows of ``prompt``, then its final status.

    verl reads the rows of a prompt with a final status.
    """
    if rows:
        await tq.async_kv_batch_put(
            keys=[row.key for row in rows],
            fields=list_of_dict_to_tensordict([dict(row.fields) for row in rows]),
            tags=[dict(row.tag) for row in rows],
            partition_id=prompt.partition,
        )
    await _set_status(prompt, "finished" if rows else "failure")


async def _set_status(prompt: Prompt, status: str) -> None:
    await tq.async_kv_put(key=prompt.uid, partition_id=prompt.partition, tag={"status": status})
