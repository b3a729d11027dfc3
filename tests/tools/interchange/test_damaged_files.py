"""Damaged files: a field that is missing or has another type rejects a trace, and never ends the import."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lightning_core.errors import ConfigError
from lightning_core.tools.interchange.importing import ImportOptions, import_traces

SAMPLES = Path(__file__).parent / "samples"
VALUES = (
    "null",
    "0",
    "-1",
    "1.5",
    "true",
    '""',
    '"x"',
    '"{}"',
    "[]",
    "{}",
    "[1]",
    "[[]]",
    '{"a": 1}',
    "1e400",
    '"NaN"',
)
TIMES = 15


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Each container in ``value`` with each of its keys."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield value, key
        yield from places(item)


@pytest.mark.parametrize("name", sorted(path.name for path in SAMPLES.glob("*.json*")))
def test_a_damaged_field_costs_no_more_than_its_trace(name: str, tmp_path: Path) -> None:
    rng = random.Random(name)
    imported = 0
    for number in range(TIMES):
        documents = [json.loads(line) for line in (SAMPLES / name).read_text().splitlines()]
        container, key = rng.choice(list(places(documents)))
        container[key] = json.loads(rng.choice(VALUES))
        (tmp_path / "damaged.json").write_text(json.dumps(documents))
        options = ImportOptions(reward=rng.choice([None, "correct"]), agent_key=rng.choice([None, "agent"]))
        try:
            summary = import_traces([tmp_path / "damaged.json"], tmp_path / str(number), options)
        except ConfigError:  # no document of a known format is left, or no score with this name
            continue
        imported += summary.traces
        assert summary.traces or summary.left_out
    assert imported or name in ("openai_completions.json", "openai_messages.jsonl", *ALONE)


def test_a_damaged_gzip_file_is_an_error(tmp_path: Path) -> None:
    data = bytearray(gzip.compress((SAMPLES / "mlflow_traces.json").read_bytes()))
    data[20:60] = b"\xff" * 40
    (tmp_path / "a.json.gz").write_bytes(data)
    with pytest.raises(ConfigError, match=r"a\.json\.gz' cannot be read: "):
        import_traces([tmp_path / "a.json.gz"], tmp_path / "out", ImportOptions())


ALONE = ("langsmith_feedback.jsonl", "phoenix_annotations.json")
"""Files that belong to others."""
