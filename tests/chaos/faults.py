"""Faults that a run meets: in its processes, around it, in its files, and in its agent."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from lightning_core.records.run_folder.checkpoints import checkpoints
from tests.chaos.agents import DISTURBANCES
from tests.chaos.runs import Ended, Trial, children, cut, finish, flip, locked
from tests.warm import Warm

WORKERS = ("rollouts.executor=process", "rollouts.concurrency=4")


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that happens to a run."""

    name: str
    meet: Callable[[Trial], Ended]
    """Starts the run, and lets it meet the fault."""
    takes_records: bool = False
    """Whether the fault itself removes rollouts that are recorded."""
    changes_run: bool = False
    """Whether the run becomes another one, with other settings."""
    changes_rollout: bool = False
    """Whether a rollout ends in another way: its agent fails, or it is sampled again, with another seed. None is lost or doubled."""
    undo: Callable[[Trial], object] | None = None
    """What a person does before the next try, where the message asks for it."""


def each_fault() -> Iterator[Fault]:
    yield from _kills()
    yield from _signals()
    yield from _workers()
    yield from _world()
    yield from _checkpoint_files()
    yield from _run_files()
    yield from _agents()


def _dies_at(function: str, number: int, *, after: bool = False) -> str:
    """Python by which a process kills itself at a call of a function of `os` or `sqlite3`."""
    die = f"count[0] == {number} and os.kill(os.getpid(), 9)"
    return f"""
import os
real, count = os.{function}, [0]
def counted(*arguments, **options):
    count[0] += 1
    {"pass" if after else die}
    result = real(*arguments, **options)
    {die if after else "pass"}
    return result
os.{function} = counted
"""


def _kills() -> Iterator[Fault]:
    for share in (0.1, 0.3, 0.5, 0.7, 0.9):
        yield Fault(f"SIGKILL after {share:.0%} of its time", partial(_killed_after, share=share))
    for line in ("step 1/", "step 3/", "held-out reward after 2", "held-out reward after 4"):
        yield Fault(f"SIGKILL at the line “{line}”", lambda trial, line=line: trial.until(line))
    for number, after in ((1, False), (2, True), (5, False), (6, True)):
        name = f"SIGKILL {'after' if after else 'before'} the {number}. file is moved into place"
        yield Fault(name, partial(_own_kill, function="replace", number=number, after=after))
    for number in (2, 7):
        name = f"SIGKILL before the {number}. file is written through to the disk"
        yield Fault(name, partial(_own_kill, function="fsync", number=number, after=False))
    yield Fault("SIGKILL five times, each after a fifth of its time", _killed_again_and_again)


def _killed_after(trial: Trial, share: float) -> Ended:
    return trial.when(partial(trial.spent, share * trial.bench.seconds))


def _own_kill(trial: Trial, function: str, number: int, after: bool) -> Ended:
    return trial.end(before=_dies_at(function, number, after=after))


def _killed_again_and_again(trial: Trial) -> Ended:
    ends = [_killed_after(trial, 0.2) for _ in range(5)]
    return ends[-1]


def _signals() -> Iterator[Fault]:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGABRT, signal.SIGSEGV):
        yield Fault(number.name, lambda trial, number=number: trial.until("step 2/", number))
    yield Fault("SIGINT while it loads", lambda trial: trial.when(partial(trial.spent, 0.2), signal.SIGINT))
    yield Fault("SIGTERM in an evaluation", lambda trial: trial.until("held-out reward after 2", signal.SIGTERM))
    yield Fault("SIGINT twice", _twice)
    yield Fault("SIGUSR1", lambda trial: trial.until("step 2/", signal.SIGUSR1))
    yield Fault("SIGSTOP, and SIGCONT two seconds later", _paused)


def _after_step_2(process: Warm) -> None:
    any("step 2/" in line for line in process.stdout)


def _twice(trial: Trial) -> Ended:
    def happened(process: Warm) -> None:
        _after_step_2(process)
        process.send_signal(signal.SIGINT)

    return trial.when(happened, signal.SIGINT)


def _paused(trial: Trial) -> Ended:
    def happened(process: Warm) -> None:
        _after_step_2(process)
        process.send_signal(signal.SIGSTOP)
        time.sleep(2)

    return trial.when(happened, signal.SIGCONT)


def _workers() -> Iterator[Fault]:
    for number in (signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM):
        yield Fault(f"{number.name} to all worker processes", partial(_to_workers, number=number))


def _to_workers(trial: Trial, number: int) -> Ended:
    trial.overrides.extend(WORKERS)
    process = trial.start()
    _after_step_2(process)
    for pid in children(process.pid):
        with suppress(ProcessLookupError):
            os.kill(pid, number)
    return finish(process)


def _world() -> Iterator[Fault]:
    for share in (0.1, 0.5, 0.95):
        yield Fault(f"no file may grow beyond {share:.0%} of the largest", partial(_full, share=share))
    yield Fault("at most 32 open files", partial(_limited, limit="NOFILE", amount=32))
    yield Fault("64 MB of memory more than at the start", partial(_limited, limit="AS", amount=64 << 20))
    yield Fault("2 seconds of CPU time", partial(_limited, limit="CPU", amount=2))
    yield Fault("nobody reads its output", _unread)
    yield Fault("the store is locked for two seconds", _locked)
    yield Fault("the model's folder moves away after step 2", _model_moves, undo=_model_returns)


def _full(trial: Trial, share: float) -> Ended:
    largest = max(path.stat().st_size for path in trial.bench.whole.folder.rglob("*") if path.is_file())
    return _limited(trial, "FSIZE", int(share * largest))


def _limited(trial: Trial, limit: str, amount: int) -> Ended:
    own = "int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()" if limit == "AS" else "0"
    if limit == "CPU":
        own = "int(time.process_time())"
    program = f"""
import resource, signal, time
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_{limit}, ({own} + {amount}, resource.getrlimit(resource.RLIMIT_{limit})[1]))
"""
    return trial.end(before=program)


def _unread(trial: Trial) -> Ended:
    process = trial.start()
    process.stdout.readline()
    process.stdout.close()
    code = process.wait()
    return Ended(code, "")


def _locked(trial: Trial) -> Ended:
    process = trial.start()
    _after_step_2(process)
    database = locked(trial.folder / "store.db")
    threading.Timer(2.0, database.close).start()
    return finish(process)


def _model_moves(trial: Trial) -> Ended:
    process = trial.start()
    _after_step_2(process)
    (trial.bench.root / "model").rename(trial.bench.root / "away")
    process.send_signal(signal.SIGKILL)
    finish(process)
    return trial.end()


def _model_returns(trial: Trial) -> None:
    (trial.bench.root / "away").rename(trial.bench.root / "model")


def _checkpoint_files() -> Iterator[Fault]:
    weights, optimizer, facts = "model.safetensors", "trainer/optimizer.safetensors", "trainer.json"
    for file in (weights, optimizer, facts, "config.json", "tokenizer.json"):
        yield Fault(f"{file} of the newest checkpoint: one bit changes", _stopped(partial(_in_newest, flip, file)))
    for file in (weights, optimizer, facts):
        yield Fault(f"{file} of the newest checkpoint: half is lost", _stopped(partial(_in_newest, cut, file)))
        yield Fault(f"{file} of the newest checkpoint: lost", _stopped(partial(_in_newest, Path.unlink, file)))
        yield Fault(f"{file} of the newest checkpoint: that of the one before", _stopped(partial(_foreign, file)))
    yield Fault("the newest checkpoint: lost", _stopped(lambda trial: shutil.rmtree(trial.newest())))
    yield Fault("all checkpoints: lost", _stopped(lambda trial: shutil.rmtree(trial.folder / "checkpoints")))
    yield Fault("a folder step-000002.bak beside the checkpoints", _stopped(_backup))
    yield Fault(
        "an empty folder step-000099 beside the checkpoints",
        _stopped(lambda trial: _beside(trial, "step-000099").mkdir()),
    )
    yield Fault(
        "a file step-000098 beside the checkpoints", _stopped(lambda trial: _beside(trial, "step-000098").touch())
    )


def _stopped(harm: Callable[[Trial], object]) -> Callable[[Trial], Ended]:
    """A run that is killed after its third step; ``harm`` follows, and the run is resumed."""

    def meet(trial: Trial) -> Ended:
        trial.until("step 3/")
        harm(trial)
        return trial.end()

    return meet


def _in_newest(change: Callable[[Path], object], file: str, trial: Trial) -> None:
    change(trial.newest() / file)


def _foreign(file: str, trial: Trial) -> None:
    before, newest = checkpoints(trial.folder)[-2:]
    shutil.copy(before / file, newest / file)


def _beside(trial: Trial, name: str) -> Path:
    return trial.folder / "checkpoints" / name


def _backup(trial: Trial) -> None:
    shutil.copytree(trial.newest(), _beside(trial, "step-000002.bak"))


def _run_files() -> Iterator[Fault]:
    for file in ("store.db", "metrics.jsonl", "config.yaml"):
        yield Fault(f"{file}: lost", _stopped(partial(_in_folder, Path.unlink, file)), takes_records=file == "store.db")
        yield Fault(f"{file}: half is lost", _stopped(partial(_in_folder, cut, file)))
    yield Fault("store.db: its first page is overwritten", _stopped(partial(_in_folder, _overwrite, "store.db")))
    yield Fault(
        "store.db: a page in the middle is overwritten", _stopped(partial(_in_folder, _overwrite_middle, "store.db"))
    )
    lose = partial(Path.unlink, missing_ok=True)
    yield Fault("store.db-wal: lost", _stopped(partial(_in_folder, lose, "store.db-wal")), takes_records=True)
    yield Fault(
        "metrics.jsonl: its last line is torn", _stopped(partial(_in_folder, partial(cut, share=0.99), "metrics.jsonl"))
    )
    yield Fault("metrics.jsonl: its last line twice", _stopped(partial(_in_folder, _repeat, "metrics.jsonl")))
    yield Fault("metrics.jsonl: zeros at its end", _stopped(partial(_in_folder, _zeros, "metrics.jsonl")))
    yield Fault(
        "running.lock with the number of a process that lives", _stopped(partial(_in_folder, _claim, "running.lock"))
    )
    yield Fault("the folder is copied, and the copy goes on", _stopped(_copied))
    yield Fault(
        "another training task",
        _stopped(partial(_configured, "tasks.train=tests.chaos.agents:more_tasks")),
        changes_run=True,
    )
    yield Fault(
        "other held-out tasks",
        _stopped(partial(_configured, "tasks.eval=tests.chaos.agents:more_tasks")),
        undo=_as_before,
    )
    rate = partial(_configured, "trainer.learning_rate=0.1")
    yield Fault("another learning rate", _stopped(rate), changes_run=True)


def _in_folder(change: Callable[[Path], object], file: str, trial: Trial) -> None:
    change(trial.folder / file)


def _overwrite(file: Path, place: float = 0.0) -> None:
    data = bytearray(file.read_bytes())
    start = int(place * len(data)) // 4096 * 4096
    data[start : start + 4096] = b"\xa5" * 4096
    file.write_bytes(data)


def _overwrite_middle(file: Path) -> None:
    _overwrite(file, 0.5)


def _repeat(file: Path) -> None:
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join([*lines, lines[-1]]))


def _zeros(file: Path) -> None:
    file.write_bytes(file.read_bytes() + bytes(100))


def _claim(file: Path) -> None:
    file.write_text(f"{os.getpid()}\n")


def _copied(trial: Trial) -> None:
    moved = trial.folder.with_name("moved")
    shutil.copytree(trial.folder, moved)
    shutil.rmtree(trial.folder)
    moved.rename(trial.folder)


def _configured(override: str, trial: Trial) -> None:
    trial.overrides.append(override)


def _as_before(trial: Trial) -> None:
    trial.overrides.clear()


def _agents() -> Iterator[Fault]:
    own = {"ends its process", "is killed", "crashes", "is stopped"}
    fails = {
        "raises",
        "exits",
        "recurses without end",
        "takes all file descriptors for half a second",
        "ignores SIGTERM",  # on a thread, where Python sets no signal handler
    }
    for name in DISTURBANCES:
        executor = WORKERS if name in own else ()
        yield Fault(
            f"the agent {name}",
            partial(_disturbed, name=name, overrides=executor),
            takes_records=name == "deletes the store",
            changes_rollout=name in own | fails,
        )


def _disturbed(trial: Trial, name: str, overrides: tuple[str, ...]) -> Ended:
    counted = trial.bench.root / "counted"
    shutil.rmtree(counted, ignore_errors=True)
    counted.mkdir()
    trial.overrides.extend(["agent=tests.chaos.agents:solve", *overrides])
    trial.environment = {
        "CHAOS": name,
        "CHAOS_AFTER": "30",
        "CHAOS_FOLDER": str(counted),
        "CHAOS_RUN": str(trial.folder),
    }
    return trial.end()
