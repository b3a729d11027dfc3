"""A metrics file is read while another process appends to it."""

from __future__ import annotations

from pathlib import Path

from lightning_core.records.report import MetricsLog
from lightning_core.records.run_folder.tail import MetricsTail, NewLines


def test_only_new_complete_lines_are_read(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = MetricsTail(path)
    assert tail.read() == NewLines([], restarted=False), "a missing file is empty"
    log = MetricsLog(path)
    log.append(1, {"reward": 0.5})
    assert tail.read().lines == [{"step": 1, "reward": 0.5}]
    assert tail.read().lines == []
    with path.open("a") as file:
        file.write('{"step": 2}\n{"step": ')
        file.flush()
        assert tail.read().lines == [{"step": 2}]
        file.write("3}\n")
        file.flush()
        assert tail.read().lines == [{"step": 3}]


def test_a_replaced_file_is_read_from_its_start(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log, tail = MetricsLog(path), MetricsTail(path)
    log.append(1, {})
    log.append(2, {})
    assert not tail.read().restarted
    MetricsLog(path, keep_steps=1).append(2, {"reward": 1})
    assert tail.read() == NewLines([{"step": 1}, {"step": 2, "reward": 1}], restarted=True)
    path.write_text("")
    assert tail.read() == NewLines([], restarted=True)


def test_damaged_lines_are_counted_and_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{[\n[1]\n{"step": "2"}\n\xff\xfe\n\n{"step": 3}\n')
    tail = MetricsTail(path)
    assert [line["step"] for line in tail.read().lines] == [1, 3]
    assert tail.damaged == 4
