"""Damaged files: a field that is missing or has another type rejects a trace, and never ends the import."""

from __future__ import annotations

import gzip
import json
import random
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lightning_core.errors import ConfigError
from lightning_core.otel import read_traces
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


def test_a_text_that_was_cut_inside_a_character_is_imported_with_a_replacement(tmp_path: Path) -> None:
    text = (SAMPLES / "mlflow_traces.json").read_text(encoding="utf-8")
    name = re.search(r'"content": "([^"\\]+)"', text) or re.search(r'content\\": \\"([^"\\]+)', text)
    assert name is not None
    (tmp_path / "cut.json").write_text(text.replace(name[1], name[1] + "\\ud83d"))
    summary = import_traces([tmp_path / "cut.json"], tmp_path / "out", ImportOptions())
    assert summary.traces == 2
    assert summary.file is not None
    assert "\ufffd" in summary.file.read_text(encoding="utf-8")


def test_a_damaged_file_of_an_archive_costs_no_other(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "traces.zip", "w") as archive:
        archive.writestr("a.json", "")
        archive.writestr("b.json.gz", b"\x1f\x8b damaged")
        archive.write(SAMPLES / "mlflow_traces.json", "c.json")
    summary = import_traces([tmp_path / "traces.zip"], tmp_path / "out", ImportOptions())
    assert summary.traces == 2
    assert sorted(reason.split("'")[1].rpartition("/")[2] for reason in summary.left_out) == ["a.json", "b.json.gz"]


TRACES = (SAMPLES / "mlflow_traces.json").read_text(encoding="utf-8")
DEEP = "[" * 100_000 + "]" * 100_000


def files(folder: Path, **contents: bytes) -> list[Path]:
    """A file for each of ``contents``, beside one with two traces."""
    for name, content in contents.items():
        (folder / name.replace("_", ".")).write_bytes(content)
    (folder / "good.json").write_text(TRACES, encoding="utf-8")
    return [folder]


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("a_json", '{"name": "café"}'.encode("latin-1"), "records of a.json that are not UTF-8"),
        ("a_jsonl", b'{"x": "caf\xe9"}\n{"x": "tea"}\n', "records of a.jsonl that are not UTF-8"),
        ("a_json", DEEP.encode(), "lines of a.json that are nested too deeply"),
        ("a_json", DEEP[99_500:100_500].encode(), "values that are not JSON objects"),
        ("a_pb", b"", "a.pb' is empty"),
        ("a_json_gz", gzip.compress(TRACES.encode(), mtime=0)[:40], "a.json.gz' cannot be read"),
        ("a_zip", b"PK\x03\x04 and no more", "a.zip' cannot be read: BadZipFile"),
    ],
)
def test_a_file_that_cannot_be_read_is_named_and_the_others_are_imported(
    name: str, content: bytes, reason: str, tmp_path: Path
) -> None:
    summary = import_traces(files(tmp_path, **{name: content}), tmp_path / "out", ImportOptions())
    assert summary.traces == 2
    assert any(reason in text for text in summary.left_out), summary.left_out


def test_a_value_that_is_nested_too_deeply_costs_its_trace(tmp_path: Path) -> None:
    spans = [json.loads(line) for line in (SAMPLES / "phoenix_frame.jsonl").read_text(encoding="utf-8").splitlines()]
    text = json.dumps(spans[0]).replace(json.dumps(spans[0]["name"]), DEEP[99_000:101_000], 1)
    (tmp_path / "a.jsonl").write_text("\n".join([text, *map(json.dumps, spans[1:])]), encoding="utf-8")
    summary = import_traces([tmp_path / "a.jsonl"], tmp_path / "out", ImportOptions())
    assert summary.traces
    assert summary.left_out


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"\xff\xfe\x00"], ids=["empty", "archive", "odd UTF-16"])
def test_a_file_alone_that_cannot_be_read_is_an_error(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"a\.json' (is empty|cannot be read: )"):
        import_traces([tmp_path / "a.json"], tmp_path / "out", ImportOptions())


@pytest.mark.parametrize("encoding", ["utf-16", "utf-8-sig", "gz", "zip", "unpacked gz"])
def test_files_as_editors_and_browsers_write_them_are_read(encoding: str, tmp_path: Path) -> None:
    path = tmp_path / f"a.{encoding.rpartition(' ')[2]}"
    if encoding == "zip":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("export/traces.json", TRACES)
            archive.writestr("__MACOSX/export/._traces.json", b"\x00\x05")
            archive.writestr("README.txt", "no traces")
    elif encoding == "gz":
        path.write_bytes(gzip.compress(TRACES.encode()))
    else:
        path.write_bytes(TRACES.encode("utf-8" if encoding == "unpacked gz" else encoding))
    summary = import_traces([path], tmp_path / "out", ImportOptions())
    assert (summary.traces, dict(summary.left_out)) == (2, {})


@pytest.mark.parametrize(
    ("name", "old", "new", "traces"),
    [
        ("logfire_rows.json", '"trace_id": "', '"trace_id": "run-', 2),
        ("logfire_rows.json", '"span_id": "', '"span_id": "span-', 2),
        ("logfire_rows.json", '"parent_span_id": "', '"parent_span_id": "no-', 2),
        ("phoenix_spans.json", '"span_id": "', '"span_id": "ffffffff', 1),
        ("mlflow_traces.json", '"span_id": "', '"span_id": "QUJDREVGR0hJSktM", "was": "', 1),
    ],
)  # fmt: skip
def test_an_odd_id_leaves_the_imported_file_readable(
    name: str, old: str, new: str, traces: int, tmp_path: Path
) -> None:
    text = (SAMPLES / name).read_text(encoding="utf-8")
    assert old in text
    (tmp_path / "odd.json").write_text(text.replace(old, new, 1))
    summary = import_traces([tmp_path / "odd.json"], tmp_path / "out", ImportOptions())
    assert summary.file is not None
    assert len(read_traces(summary.file)) == summary.traces
    assert summary.traces >= traces
    assert summary.traces > 1 or any("digits" in reason for reason in summary.left_out)


def test_a_damaged_line_in_the_folder_does_not_stop_an_import(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "old.jsonl").write_bytes(b'{"a": "caf\xe9"}\n\n{"a": 1}\n' + DEEP.encode() + b'\n{"b": ')
    summary = import_traces([SAMPLES / "mlflow_traces.json"], tmp_path / "out", ImportOptions())
    assert summary.traces == 2
    ((reason, number),) = summary.left_out.items()
    assert (number, "old.jsonl that are not JSON" in reason) == (3, True)


ALONE = ("langsmith_feedback.jsonl", "phoenix_annotations.json")
"""Files that belong to others."""
