"""Tasks from parquet files: verl requires pyarrow, Lightning does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from lightning_core.rollouts.tasks import load_tasks


def test_nested_keys_that_parquet_fills_with_null_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Arrow gives all objects of a column the same keys, so that the tasks are not those that were written."""
    rows: list[dict[str, Any]] = [
        {"id": "a", "q": None, "extra": {"x": 1}, "messages": [{"role": "user"}, {"role": "tool", "name": "t"}]},
        {"id": "b", "q": "1", "extra": {"y": {"z": 2}}, "messages": [{"role": "user"}]},
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "t.parquet")
    tasks = load_tasks(str(tmp_path / "t.parquet"), key="tasks.train")
    assert tasks[1]["extra"] == {"x": None, "y": {"z": 2}}
    (record,) = caplog.records
    assert record.getMessage().startswith("tasks.train: in parquet all objects of a column have the same keys")
    assert "have such nulls in extra.x, extra.y, messages[].name. If" in record.getMessage()
    caplog.clear()
    del rows[0]["messages"][1]["name"]
    parquet.write_table(pyarrow.Table.from_pylist(rows[:1]), tmp_path / "t.parquet")
    load_tasks(str(tmp_path / "t.parquet"))
    assert not caplog.records, "without objects of different keys"
