"""The file of wandb's offline mode holds the run."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import wandb
from wandb.proto import wandb_internal_pb2

from tests.trackers.reported import FILES, interrupt_run, make_folder, report_run, resume_run

_BLOCK, _HEADER = 32_768, 7


def records(path: Path) -> Iterator[Any]:
    """The records of a ``.wandb`` file: LevelDB's log format after 7 bytes, with one protobuf message a record."""
    data, at, parts = path.read_bytes(), 7, b""
    while at + _HEADER <= len(data):
        if _BLOCK - at % _BLOCK < _HEADER:
            at += _BLOCK - at % _BLOCK
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + _HEADER])
        parts += data[at + _HEADER : at + _HEADER + length]
        at += _HEADER + length
        if kind in (1, 4):  # a whole record, or the last part of one
            record = wandb_internal_pb2.Record()
            record.ParseFromString(parts)
            yield record
            parts = b""


def read(folder: Path) -> list[list[Any]]:
    """The records of each process that reported the run, the first one first."""
    wandb.teardown()  # its service process writes to the end
    return [list(records(path)) for path in sorted(folder.glob("wandb/offline-run-*/*.wandb"))]


def history(found: list[Any]) -> list[dict[str, Any]]:
    rows = [r.history for r in found if r.WhichOneof("record_type") == "history"]
    return [{i.key or ".".join(i.nested_key): json.loads(i.value_json) for i in row.item} for row in rows]


def values(found: list[Any], key: str) -> list[tuple[int, Any]]:
    return [(row["step"], row[key]) for row in history(found) if key in row]


def one(found: list[Any], kind: str) -> Any:
    return next(getattr(r, kind) for r in found if r.WhichOneof("record_type") == kind)


def test_history_configuration_summary_and_artifact_are_recorded(home: Path):
    folder = make_folder(home, "wandb")
    report_run(folder, "wandb")
    (found,) = read(folder)
    run = one(found, "run")
    assert (run.project, run.display_name, list(run.tags)) == ("lightning-rl", "a-wandb", ["first try", "demo"])
    config = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert config["policy"]["model"] == "tiny"
    assert values(found, "reward") == [(1, 0.25), (2, 0.5)]
    assert values(found, "loss") == [(2, 0.125)], "NaN is left out"
    assert values(found, "sql/kl") == [(1, 0.5)]
    assert values(found, "eval/reward") == [(0, 0.5), (2, 1.0)]
    assert any("curve" in "".join(row) for row in history(found))
    summary = {
        item.key or ".".join(item.nested_key): json.loads(item.value_json)
        for record in found
        if record.WhichOneof("record_type") == "summary"
        for item in record.summary.update
    }
    assert (summary["state"], summary["summary/improvement"]) == ("finished", 0.5)
    contents = {entry.path for entry in one(found, "artifact").manifest.contents}
    checkpoint = {"step-000002/weights.safetensors", "step-000002/adapter/adapter.safetensors"}
    assert contents == FILES | checkpoint, "without the optimizer's state"
    assert one(found, "exit").exit_code == 0


def test_a_resumed_run_continues_under_its_id(home: Path):
    folder = make_folder(home, "wandb")
    interrupt_run(folder, "wandb")
    resume_run(folder, "wandb")
    first, second = sorted(read(folder), key=lambda found: values(found, "reward"))
    assert one(first, "run").run_id == one(second, "run").run_id
    assert one(first, "exit").exit_code == 255
    assert values(second, "reward") == [(3, 1.5), (4, 2.0)]
