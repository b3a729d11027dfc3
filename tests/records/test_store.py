"""The store: rollouts are read back unchanged, completely or not at all, also after a crash."""

from __future__ import annotations

import shutil
import sqlite3
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lightning_core import reward, rollout
from lightning_core import trace as tr
from lightning_core.capture import current_address
from lightning_core.capture.spans import start_span
from lightning_core.errors import ConfigError, RecordError
from lightning_core.records.sqlite.schema import CONTENTS, SCHEMA
from lightning_core.records.sqlite.span_rows import SHARED
from lightning_core.records.store import CallCredit, RolloutRecord, Store
from lightning_core.tools.runs.browse import RolloutFilter, find_rollouts
from lightning_core.trace import SpanRecord

OLD_RUN = Path(__file__).parents[1] / "data" / "run_of_0_1_0"
ID = "0123456789abcdef0123456789abcdef"


def record(identity: str = ID, **changes: object) -> RolloutRecord:
    values = {
        "id": identity,
        "step": 1,
        "task_id": "t1",
        "phase": "train",
        "attempt": 0,
        "status": "ok",
        "reward": 0.5,
        "error": None,
        "version": 3,
        "started_ns": 10,
        "ended_ns": 20,
    }
    return RolloutRecord(**{**values, **changes})  # type: ignore[arg-type]


def root(identity: str) -> SpanRecord:
    attributes = {tr.TASK_ID: "t1", tr.TASK: '{"id": "t1"}'}
    return SpanRecord(
        name="rollout",
        trace_id=identity,
        span_id="00000000000000aa",
        parent_id=None,
        start_ns=10,
        end_ns=20,
        attributes=attributes,
    )


def chat(identity: str, span: str, agent: str | None) -> SpanRecord:
    attributes = {tr.OPERATION: "chat"} | ({} if agent is None else {tr.AGENT: agent})
    return SpanRecord(
        name="chat m",
        trace_id=identity,
        span_id=span,
        parent_id="00000000000000aa",
        start_ns=11,
        end_ns=12,
        attributes=attributes,
    )


def calls_by_agent(store: Store) -> dict[str | None, int]:
    return {entry.agent: number for entry, number in store.ledger().items()}


def test_a_captured_rollout_comes_back_equal(tmp_path: Path) -> None:
    with rollout(task={"id": "t1", "q": "ü"}) as run:
        address = current_address()
        assert address is not None
        attributes = {
            tr.SEQUENCE: 4,
            tr.OUTPUT_IDS: tr.pack([1, 2, 0xFFFFFFFF], "<u4"),
            tr.LOGPROBS: tr.pack([-0.5, -1.25, 0.0], "<f4"),
            "gen_ai.response.finish_reasons": ("stop",),
            "gen_ai.request.temperature": 0.7,
            "gen_ai.input.messages": '[{"role": "user", "content": "ü"}]',
        }
        start_span(address, "m", "chat", agent="writer", attributes=attributes).end()
        reward(0.5)
    with Store(tmp_path / "store.db") as store:
        assert store.add_rollout(record(run.rollout, counters={"lost": 2}), run.spans) == 1
        assert sorted(store.spans(1), key=lambda s: s.span_id) == sorted(run.spans, key=lambda s: s.span_id)
        trace = store.trace(run.rollout)
        assert trace.counters == {"lost": 2}
        assert trace.reward == 0.5
        assert trace.task == {"id": "t1", "q": "ü"}
        (call,) = trace.calls
        assert (call.agent, call.finish_reason) == ("writer", "stop")
        assert call.output_ids is not None
        assert np.array_equal(call.output_ids, np.array([1, 2, 0xFFFFFFFF], dtype=np.uint32))
        assert store.rollout(1) == record(run.rollout, counters={"lost": 2}, ordinal=1, calls=1)


def test_text_that_utf_8_cannot_encode_is_stored(tmp_path: Path) -> None:
    """In JSON a lone surrogate stays as it is; in other columns it is escaped."""
    half = "ü\ud83d"
    attributes = {tr.OPERATION: "chat", tr.AGENT: half, "result": half, "list": (half,), half: b"\1"}
    span = replace(chat(ID, "1" * 16, None), name=half, error=half, attributes=attributes)
    with Store(tmp_path / "store.db") as store:
        store.add_rollout(record(task_id=half, error=half), [root(ID), span])
        store.add_credit([
            CallCredit(rollout=ID, call=span.span_id, agent=half, step=1, reward=1.0, advantage=1.0, tokens=1)
        ])  # fmt: skip
        escaped = "ü\\ud83d"
        assert (store.rollout(1).task_id, store.rollout(1).error) == (escaped, escaped)
        found = next(s for s in store.spans(1) if s.span_id == span.span_id)
        assert (found.name, found.error, found.attributes[escaped]) == (escaped, escaped, b"\1")
        assert (found.attributes["result"], found.attributes["list"]) == (half, (half,))
        assert calls_by_agent(store) == {escaped: 1}
        assert store.credited_agents() == {escaped}


def test_attributes_of_unusual_types_are_stored(tmp_path: Path) -> None:
    attributes = {tr.OPERATION: ("chat",), tr.AGENT: 1 << 70, "nested": (b"\1", {"bytes": b"\2"})}
    with Store(tmp_path / "store.db") as store:
        store.add_rollout(record(), [root(ID), replace(chat(ID, "1" * 16, None), attributes=attributes)])
        found = next(s for s in store.spans(1) if s.span_id == "1" * 16)
    assert found.attributes == {**attributes, "nested": ("AQ==", {"bytes": "Ag=="})}


def test_lists_and_filters(tmp_path: Path) -> None:
    a, b, c = ("a" * 32, "b" * 32, "c" * 32)
    with Store(tmp_path / "store.db") as store:
        store.add_rollout(record(a, phase="eval_before", step=0), [root(a), chat(a, "1" * 16, "w")])
        store.add_rollout(record(b), [root(b), chat(b, "1" * 16, "w"), chat(b, "2" * 16, None)])
        store.add_rollout(record(c, status="infrastructure", reward=None, error="Timeout: x", version=None), [])
        assert [(r.ordinal, r.id, r.calls) for r in store.rollouts()] == [(1, a, 1), (2, b, 2), (3, c, 0)]
        assert [r.id for r in store.rollouts(phase="train")] == [b, c]
        assert [r.id for r in store.rollouts(step=1, status="ok")] == [b]
        assert [r.id for r in store.rollouts(last=2)] == [b, c]
        assert [r.id for r in store.rollouts(phase="train", last=1)] == [c]
        assert store.count() == 3
        assert store.rollout(c).error == "Timeout: x"
        assert calls_by_agent(store) == {"w": 2, None: 1}
        with pytest.raises(LookupError, match="no rollout with ordinal 9; the store has 3, numbered from 1"):
            store.trace(9)
        with pytest.raises(ValueError, match="expected the spans of one rollout"):
            store.trace(3)


def test_credit_and_steps(tmp_path: Path) -> None:
    credit = CallCredit(rollout=ID, call="1" * 16, agent="w", step=1, reward=1.0, advantage=-0.5, tokens=7)
    with Store(tmp_path / "store.db") as store:
        with pytest.raises(ValueError, match="credit for a rollout that is not stored"):
            store.add_credit([credit])
        store.add_rollout(record(), [root(ID)])
        store.add_credit([credit])
        store.add_credit([credit])
        assert store.credit() == store.credit(rollout=1) == store.credit(step=1) == [credit]
        assert store.credit(step=2) == []
        assert store.credited_agents() == {"w"}
        store.add_step(1, {"reward": 0.25})
        store.add_step(2, {"reward": 0.5})
        store.add_step(2, {"reward": 0.75})
        assert store.steps() == {1: {"reward": 0.25}, 2: {"reward": 0.75}}


def test_rewind_forgets_what_will_be_done_again(tmp_path: Path) -> None:
    names = {"a": (0, "eval_before"), "b": (1, "train"), "c": (2, "train"), "d": (1, "eval"), "e": (1, "eval_after")}
    names |= {
        "1": (1, "judge"),
        "2": (2, "judge"),
        "3": (2, "eval"),
        "4": (1, "eval_unfinished"),
        "5": (2, "eval_after"),
    }
    with Store(tmp_path / "store.db") as store:
        for name, (step, phase) in names.items():
            sampled = chat(name * 32, "1" * 16, "w")
            sampled = replace(sampled, attributes={**sampled.attributes, tr.PROMPT_IDS: b"", tr.OUTPUT_IDS: b"\0" * 4})
            store.add_rollout(record(name * 32, step=step, phase=phase), [root(name * 32), sampled])
            call = CallCredit(rollout=name * 32, call="1" * 16, agent="w", step=step, reward=1, advantage=1, tokens=1)
            store.add_credit([call])
            store.add_step(step, {})
        store.rewind(1)
        assert calls_by_agent(store) == {"w": 5}
        left = sqlite3.connect(tmp_path / "store.db")
        assert left.execute("SELECT count(*), count(DISTINCT rollout) FROM contents").fetchone() == (5, 5)
        left.close()
        assert [r.id[0] for r in store.rollouts()] == ["a", "b", "d", "e", "1"]
        assert {c.rollout[0] for c in store.credit()} == {"a", "b", "d", "e", "1"}
        assert list(store.steps()) == [0, 1]
        store.add_rollout(record("c" * 32), [root("c" * 32)])


@pytest.fixture
def old_store(tmp_path: Path) -> Path:
    """A store of version 1, which counted the steps of rollouts and credit from 0: two steps, and two evaluations."""
    return Path(shutil.copy(OLD_RUN / "store.db", tmp_path))


def steps_in(store: Store) -> tuple[list[tuple[str, int]], list[int]]:
    """The phases and steps of rollouts, and the steps of credit, in ``store``."""
    return list(dict.fromkeys((r.phase, r.step) for r in store.rollouts())), [
        *dict.fromkeys(c.step for c in store.credit())
    ]


def test_an_older_store_is_read_with_steps_from_1_and_not_changed(old_store: Path) -> None:
    before = old_store.read_bytes()
    with Store(old_store, read_only=True) as store:
        assert steps_in(store) == ([("eval_before", 0), ("train", 1), ("train", 2), ("eval_after", 2)], [1, 2])
        assert [r.step for r in store.rollouts(phase="train", step=1)] == [1] * len(
            store.rollouts(phase="train", step=2)
        )
        assert list(store.steps()) == [1, 2]
    assert old_store.read_bytes() == before


def test_an_older_store_is_converted_once_when_it_is_written_to(old_store: Path) -> None:
    for _ in range(2):
        with Store(old_store) as store:
            assert steps_in(store) == ([("eval_before", 0), ("train", 1), ("train", 2), ("eval_after", 2)], [1, 2])
    with Store(old_store) as store:
        store.rewind(1)
        assert steps_in(store) == ([("eval_before", 0), ("train", 1)], [1])


def test_a_store_whose_calls_have_their_whole_prompts_is_read_and_goes_on(tmp_path: Path) -> None:
    """Version 2 kept the attributes of each call in its row, and bytes in ``arrays``."""
    path = tmp_path / "store.db"
    old = sqlite3.connect(path)
    old.executescript(f"""
        {SCHEMA.replace(CONTENTS, "")};
        PRAGMA user_version = 2;
        INSERT INTO rollouts VALUES (1, '{ID}', 1, 't1', 'train', 0, 'ok', 0.5, NULL, 3, 10, 20, 1, '{{}}');
        INSERT INTO spans VALUES ('{ID}', '00000000000000aa', NULL, 'rollout', 10, 20, NULL, NULL, NULL, '{{"lightning.task.id": "t1"}}');
        INSERT INTO spans VALUES ('{ID}', '{"1" * 16}', '00000000000000aa', 'chat m', 11, 12, NULL, 'chat', 'w',
            '{{"gen_ai.operation.name": "chat", "gen_ai.agent.name": "w", "gen_ai.input.messages": "[1, \\"needle\\"]"}}');
        INSERT INTO arrays VALUES ('{ID}', '{"1" * 16}', '{tr.PROMPT_IDS}', x'0100000002000000');
        INSERT INTO arrays VALUES ('{ID}', '{"1" * 16}', '{tr.OUTPUT_IDS}', x'03000000');
    """)
    old.close()
    before = path.read_bytes()
    sampled = {tr.PROMPT_IDS: b"\1\0\0\0", tr.OUTPUT_IDS: b"\2\0\0\0\3\0\0\0", tr.INPUT_MESSAGES: '["needle"]'}
    with Store(path, read_only=True) as reader:
        assert found_in(reader) == [1]
        assert reader.trace(1).calls[0].prompt_ids.tolist() == [1, 2]  # type: ignore[union-attr]
        assert path.read_bytes() == before
        with Store(path) as store:
            assert store.spans(1) == reader.spans(1)
            new = chat("b" * 32, "2" * 16, "w")
            new = replace(new, attributes={**new.attributes, **sampled})
            store.add_rollout(record("b" * 32), [root("b" * 32), new])
            assert found_in(store) == [1, 2]
            assert store.tokens_sampled() == 3
            assert store.trace(1).calls[0].output_ids.tolist() == [3]  # type: ignore[union-attr]
            assert store.spans(2, only=new.span_id) == (new,)
    with Store(path, read_only=True) as reader:
        assert [s.attributes.get(tr.INPUT_MESSAGES) for s in reader.spans(1)] == [None, '[1, "needle"]']


def found_in(store: Store) -> list[int]:
    """The ordinals of the rollouts in whose messages a person finds a word."""
    return [r.ordinal for r in find_rollouts(store, RolloutFilter(text="needle")).rollouts]


def test_another_program_cannot_refer_to_the_messages_of_a_rollout(tmp_path: Path) -> None:
    forged = replace(chat(ID, "1" * 16, "w"), attributes={tr.OPERATION: "chat", SHARED: [0, 0, 0, 0, 0, 5, 5, 0, 4]})
    with Store(tmp_path / "store.db") as store:
        store.add_rollout(record(), [root(ID), forged])
        store.add_spans([replace(forged, span_id="2" * 16)])
        assert [dict(span.attributes) for span in store.spans(1)[1:]] == [{tr.OPERATION: "chat"}] * 2
        assert store.tokens_sampled() == 0


def test_an_older_store_that_two_processes_open_at_once_is_converted_once(old_store: Path) -> None:
    """Both wait for a third that writes; a viewer has the file open all the time."""
    expected = [("eval_before", 0), ("train", 1), ("train", 2), ("eval_after", 2)], [1, 2]
    writer = sqlite3.connect(old_store, isolation_level=None)
    writer.execute("PRAGMA journal_mode = WAL")
    writer.execute("BEGIN IMMEDIATE")
    with Store(old_store, read_only=True) as viewer, ThreadPoolExecutor() as threads:
        opening = [threads.submit(Store, old_store) for _ in range(2)]
        assert steps_in(viewer) == expected
        writer.execute("ROLLBACK")
        for store in [future.result() for future in opening]:
            assert steps_in(store) == expected
            store.close()
        assert steps_in(viewer) == expected
    writer.close()


def test_the_phase_of_an_evaluation_changes_for_all_its_rollouts(tmp_path: Path) -> None:
    with Store(tmp_path / "store.db") as store:
        for name, step, phase in (
            ("a", 1, "eval_unfinished"),
            ("b", 1, "eval_unfinished"),
            ("c", 2, "eval_unfinished"),
        ):
            store.add_rollout(record(name * 32, step=step, phase=phase), [root(name * 32)])
        assert store.change_phase("eval_unfinished", "eval", 1) == 2
        assert store.change_phase("eval_unfinished", "eval", 1) == 0
        assert {r.id[0]: r.phase for r in store.rollouts()} == {"a": "eval", "b": "eval", "c": "eval_unfinished"}


def test_a_rollout_is_stored_whole_or_not_at_all(tmp_path: Path) -> None:
    with Store(tmp_path / "store.db") as store:
        with pytest.raises(ValueError, match="belongs to rollout"):
            store.add_rollout(record(), [root(ID), root("f" * 32)])
        unserializable = chat(ID, "1" * 16, "w")
        object.__setattr__(unserializable, "attributes", {"x": object()})
        with pytest.raises(TypeError):
            store.add_rollout(record(), [root(ID), unserializable])
        assert store.rollouts() == []
        store.add_rollout(record(), [root(ID)])
        with pytest.raises(ValueError, match="cannot be stored"):
            store.add_rollout(record(), [root(ID)])
        assert len(store.spans(1)) == 1


def test_committed_survives_a_killed_process(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    script = f"""
import os
from lightning_core.records.store import Store
store = Store({str(path)!r})
store.add_step(1, {{"reward": 1.0}})
store._db.execute("BEGIN")
store._db.execute("INSERT INTO steps VALUES (2, '{{}}')")
os._exit(9)
"""
    done = subprocess.run([sys.executable, "-c", script], check=False)
    assert done.returncode == 9
    with Store(path, read_only=True) as store:
        assert store.steps() == {1: {"reward": 1.0}}
    with Store(path) as store:
        store.add_step(2, {"reward": 2.0})
        assert list(store.steps()) == [1, 2]


def test_what_is_queued_survives_a_killed_process_when_its_future_is_done(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    script = f"""
import os
from lightning_core.records.store import Store
from tests.records.test_store import record, root
store = Store({str(path)!r})
ids = [f"{{number:032x}}" for number in range(20)]
for done in [store.queue_rollouts([(record(i), [root(i)])]) for i in ids]:
    done.result()
os._exit(9)
"""
    done = subprocess.run([sys.executable, "-c", script], check=False)
    assert done.returncode == 9
    with Store(path, read_only=True) as store:
        assert [r.id for r in store.rollouts()] == [f"{number:032x}" for number in range(20)]
        assert len(store.spans(20)) == 1


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"id": "0" * 32}, ValueError),
        ({"step": 1 << 70}, OverflowError),
        ({"error": {"a": 1}}, sqlite3.ProgrammingError),
        ({"counters": {"a": object()}}, TypeError),
    ],
    ids=["stored already", "large integer", "unsupported type", "not JSON"],
)
def test_rollouts_queued_during_a_write_share_a_transaction_but_not_an_error(
    tmp_path: Path, changes: dict[str, object], error: type[Exception]
) -> None:
    path = tmp_path / "store.db"
    ids = [f"{number:032x}" for number in range(10)]
    with Store(path) as store:
        commits: list[str] = []
        store._db.set_trace_callback(lambda sql: commits.append(sql) if sql == "COMMIT" else None)
        with store._transaction():  # holds the writer until all are queued
            first = store.queue_rollouts([(record("f" * 32), [])])
            time.sleep(0.05)
            queued = [store.queue_rollouts([(record(i), [root(i)])]) for i in ids]
        assert [f.result() for f in (first, *queued)] == [None] * 11
        assert len(commits) <= 3, "the transaction that held it back, the first rollout, and all others"
        with store._transaction():
            first = store.queue_rollouts([(record("e" * 32), [])])
            time.sleep(0.05)
            invalid = store.queue_rollouts([(record(**{"id": "b" * 32, **changes}), [])])
            other = store.queue_rollouts([(record("d" * 32), [])])
        with pytest.raises(error):
            invalid.result()
        other.result()
        store.queue_rollouts([(record("c" * 32), [])])
    with Store(path, read_only=True) as store:
        assert [r.id[0] for r in store.rollouts(last=3)] == ["e", "d", "c"], "closing writes what is queued"
        assert store.count() == 14


def test_a_failure_of_the_storage_fails_all_that_share_the_transaction(tmp_path: Path) -> None:
    with Store(tmp_path / "store.db") as store:
        statements: list[str] = []
        with store._transaction():
            first = store.queue_rollouts([(record("f" * 32), [])])
            time.sleep(0.05)
            queued = [store.queue_rollouts([(record(f"{number:032x}"), [])]) for number in range(3)]
            store._db.execute("DROP TABLE rollouts")
            store._db.set_trace_callback(statements.append)
        for future in (first, *queued):
            with pytest.raises(RecordError, match="no such table"):
                future.result()
    assert statements.count("BEGIN IMMEDIATE") == 2, "the first rollout, and all others"


def test_many_threads_and_a_reader(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    with Store(path) as store, Store(path, read_only=True) as reader:

        def work(thread: int) -> None:
            for index in range(10):
                identity = f"{thread:016x}{index:016x}"
                store.add_rollout(record(identity), [root(identity), chat(identity, "1" * 16, "w")])

        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(store.rollouts()) == len(reader.rollouts()) == 40
        assert calls_by_agent(reader) == {"w": 40}
        with pytest.raises(RecordError, match="readonly"):
            reader.add_step(1, {})


def test_files_that_are_no_store(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no store at .*expected the store\.db of a run's folder"):
        Store(tmp_path / "none.db", read_only=True)
    (tmp_path / "text.db").write_text("not a database, but long enough to be looked at as one" * 40)
    with pytest.raises(ConfigError, match="cannot be opened as a run's store"):
        Store(tmp_path / "text.db")
    other = sqlite3.connect(tmp_path / "other.db")
    other.execute("CREATE TABLE x (y)")
    other.close()
    with pytest.raises(ConfigError, match="has layout 0, expected 3: not a Lightning store"):
        Store(tmp_path / "other.db")


def test_reading_leaves_no_file_and_works_in_a_read_only_folder(tmp_path: Path) -> None:
    path = tmp_path / "run" / "store.db"
    with Store(path) as store:
        store.add_rollout(record(), [root(ID)])
        with Store(path, read_only=True) as reader:
            assert reader.count() == 1, "while another process writes"
            store.add_rollout(record("f" * 32), [root("f" * 32)])
            assert reader.count() == 2
    path.parent.chmod(0o500)
    try:
        with Store(path, read_only=True) as reader:
            assert reader.count() == 2
    finally:
        path.parent.chmod(0o700)
    assert [file.name for file in path.parent.iterdir()] == ["store.db"]
