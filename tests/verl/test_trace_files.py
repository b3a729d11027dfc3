"""Traces from Parquet files: verl requires pyarrow, Lightning does not."""

from pathlib import Path

import pytest

from lightning_core.tools.interchange.importing import ImportOptions, import_traces

SAMPLES = Path(__file__).parents[1] / "tools" / "interchange" / "samples"


@pytest.mark.parametrize("name", ["langsmith_export.parquet", "phoenix_frame.parquet"])
def test_parquet_files_have_what_the_json_files_have(name: str, tmp_path: Path) -> None:
    summary = import_traces([SAMPLES / name], tmp_path, ImportOptions())
    assert (summary.traces, summary.failed, sum(summary.calls.values())) == (2, 1, 3)
    assert summary.models == {"gpt-4o-mini-2024-07-18": 2, "gpt-4o-mini": 1}
    assert summary.left_out == {}
