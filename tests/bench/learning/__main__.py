"""Runs the studies of docs/evidence.md, one run after another, and writes the page's tables and figures.

    python -m tests.bench.learning --data FOLDER [--study spider …] [--arm broadcast …] [--seeds 6] [--resume]
    python -m tests.bench.learning --report

``--data``: the folder of the data sets, one folder each: their formats are in the examples' READMEs. Each run is a process of its
own; its record is added to ``--results`` when it ends. With ``--resume``, runs that are there with the same settings are skipped,
and an interrupted one continues from its last checkpoint in ``--work``. The seeds are the outer loop, so the arms are at any time
about equally far. ``--list`` prints what is left.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.bench.learning import records
from tests.bench.learning.records import EVALUATED, UNTRAINED, Record
from tests.bench.learning.report import write_report
from tests.bench.learning.studies import ROOT, STUDIES, settings_digest

RESULTS = Path(__file__).parent / "results.jsonl"


def wanted(studies: Sequence[str], arms: Sequence[str] | None, seeds: int) -> Iterator[tuple[str, str, int]]:
    """The runs in their order: study, arm, seed."""
    for study in studies:
        evaluated = EVALUATED if STUDIES[study].warm else (UNTRAINED,)
        yield from ((study, arm, 0) for arm in evaluated if not arms or arm in arms)
    for seed in range(seeds):
        for study in studies:
            yield from ((study, arm, seed) for arm in STUDIES[study].arms if not arms or arm in arms)


def is_current(record: Record) -> bool:
    """Whether a record has the settings that its arm has now."""
    study = STUDIES.get(record.study)
    if study is None:
        return False
    return record.arm in (*EVALUATED, *study.arms) and record.settings == settings_digest(study, record.arm)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--study", nargs="+", choices=list(STUDIES), default=list(STUDIES))
    parser.add_argument("--arm", nargs="+")
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--report", action="store_true")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "learning")
    options = parser.parse_args()
    if options.report and not options.results.is_file():
        parser.error(f"--results: there is no file {str(options.results)!r}; expected the records to report")
    known = {*EVALUATED, *(arm for study in STUDIES.values() for arm in study.arms)}
    if unknown := [arm for arm in options.arm or () if arm not in known]:
        parser.error(f"--arm: found {unknown[0]!r}, expected some of {sorted(known)!r}")
    found = records.read(options.results)
    current = [record for record in found if is_current(record)]
    if other := len(found) - len(current):
        print(f"{other} of {len(found)} records in {options.results} have other settings than now and are not used")
    if repeated := [key for key, number in Counter(map(_key, current)).items() if number > 1]:
        parser.error(
            f"{options.results} has several records of {', '.join(map(str, repeated))}; delete all but one of each"
        )
    if options.report:
        write_report(ROOT / "docs", current)
        return 0
    runs = list(wanted(options.study, options.arm, options.seeds))
    done = set(map(_key, current))
    left = [run for run in runs if run not in done]
    if options.list:
        print("\n".join(f"{study}, {arm}, seed {seed}" for study, arm, seed in left))
        return 0
    if len(left) < len(runs) and not options.resume:
        parser.error(
            f"{len(runs) - len(left)} of the {len(runs)} runs are in {options.results}; add --resume to run the other {len(left)}, or name "
            "another file with --results"
        )
    if any(STUDIES[study].tasks for study, *_ in left) and options.data is None:
        parser.error("--data: expected the folder of the data sets")
    return _run_all(left, options)


def _key(record: Record) -> tuple[str, str, int]:
    return record.study, record.arm, record.seed


def _run_all(left: Sequence[tuple[str, str, int]], options: argparse.Namespace) -> int:
    failed = 0
    for number, (study, arm, seed) in enumerate(left, 1):
        print(f"\n[{number}/{len(left)}] {study}, {arm}, seed {seed}", flush=True)
        if any(is_current(r) and _key(r) == (study, arm, seed) for r in records.read(options.results)):
            print("recorded by another queue")
            continue
        command = [
            *(sys.executable, "-m", "tests.bench.learning.one_run", study, arm, str(seed)),
            *("--data", str((options.data or options.work).absolute())),
            *("--work", str(options.work.absolute()), "--results", str(options.results.absolute())),
        ]
        if subprocess.run(command, check=False, cwd=ROOT).returncode:
            failed += 1
            print(f"FAILED: {study}, {arm}, seed {seed}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
